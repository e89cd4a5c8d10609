"""The one family of errors that a user caused or can mend: the command line prints its one line and exits with 2."""


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
