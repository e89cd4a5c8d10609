"""Errors that end a command with one line: a user's (exit code 2) and the machine's (1).

Input goes through `cut` or `quoted`: it may be a whole file.
"""

SHOWN = 80  # characters of input in a message


class DsimError(Exception):
    """Bad input, in one line: place, value found, value expected."""


class TraceError(DsimError):
    """A trace that cannot be read or replayed."""


class ProfileError(DsimError):
    """A profile that cannot be read, or lacks what a run needs."""


class PolicyError(DsimError):
    """An unknown policy, field or value."""


class CodeError(DsimError):
    """A file asks for Python code that the user did not name."""


class ModelError(DsimError):
    """A model that cannot be loaded or run on a device."""


class MachineError(DsimError):
    """A failure that different input would not fix, such as a full disk. Exit code 1."""


def cut(text: object, limit: int = SHOWN) -> str:
    """Input for a message, on one line and shortened."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def quoted(value: object) -> str:
    """A value as Python writes it, for a message."""
    return cut(repr(value))
