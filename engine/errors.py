"""The one family of errors that are told in one line: of what a user can mend (exit code 2), and of the machine (1)."""


class DsimError(Exception):
    """Bad input, said in one line that names the place, the value found and the value expected."""


class TraceError(DsimError):
    """A trace that cannot be read or replayed."""


class ProfileError(DsimError):
    """A profile that cannot be read, or that lacks what a run asks of it."""


class PolicyError(DsimError):
    """A policy that does not exist, or a field or value that it does not have."""


class ModelError(DsimError):
    """A model that cannot be loaded, or a device that cannot run it."""


class MachineError(DsimError):
    """What no other input would mend: a full disk, a failing device, too little memory. Exit code 1."""
