"""The errors that end a command with one line: a user's (exit code 2) and the machine's (1).

Input in a line goes through `cut` or `quoted`: it may be a whole file.
"""

SHOWN = 80  # characters of the input that a message quotes


class DsimError(Exception):
    """Bad input, said in one line that names the place, the value found and the value expected."""


class TraceError(DsimError):
    """A trace that cannot be read or replayed."""


class ProfileError(DsimError):
    """A profile that cannot be read, or that lacks what a run asks of it."""


class PolicyError(DsimError):
    """A policy that does not exist, or a field or value that it does not have."""


class CodeError(DsimError):
    """A file asks for Python code that the user did not name."""


class ModelError(DsimError):
    """A model that cannot be loaded, or a device that cannot run it."""


class MachineError(DsimError):
    """A failure that different input would not fix: a full disk, a failing device, too little memory. Exit code 1."""


def cut(text: object, most: int = SHOWN) -> str:
    """A piece of input for a message: on one line, and shortened."""
    line = " ".join(str(text)[: 4 * most].split())
    return line if len(line) <= most else line[: most - 3] + "..."


def quoted(value: object) -> str:
    """A value as Python writes it, as a message shows it."""
    return cut(repr(value))
