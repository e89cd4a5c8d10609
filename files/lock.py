"""One writer a file or folder."""

import os
from pathlib import Path

from ..engine.errors import DsimError

try:
    import fcntl
except ImportError:  # no POSIX: no locks
    fcntl = None  # type: ignore[assignment]


class Lock:
    """The kernel's lock: it ends with the process and leaves no file. DsimError if taken."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        if not _take(self._descriptor):
            self.close()
            raise DsimError(f"{path}: another dsim is writing there: wait for it, or choose another place")

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """By a running process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's writer
    except OSError:
        return False
    try:
        return not _take(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return True
    return True
