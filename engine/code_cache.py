"""Safety of compiled code on disk: only private folders, no signals while machine code loads.

numba unpickles the code, which runs it: only folders that no one else can write are read.
"""

import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from numba.core.codegen import ll  # type: ignore[attr-defined]

from .garbage import uncollected

try:
    import fcntl
except ImportError:  # Windows: a user's folders are private
    fcntl = None  # type: ignore[assignment]

ROOT = 0  # user id
# LLVM's callbacks into Python while it makes or loads code.
CALLBACKS = {
    ll.ExecutionEngine._raw_object_cache_notify.__code__, ll.ExecutionEngine._raw_object_cache_getbuffer.__code__,
}  # fmt: skip


def is_private(folder: Path) -> bool:
    """Whether only this user and root can change or replace a folder's content."""
    if fcntl is None:
        return True
    try:
        target = folder.resolve(strict=True)
        if not is_own(target):
            return False
        # Links on the path may be another user's.
        paths = {*target.parents, *folder.absolute().parents, folder.absolute()}
        return all(_keeps(path) for path in paths)
    except (OSError, RuntimeError):
        return False


def is_own(path: Path) -> bool:
    """Whether a folder (no link) is this user's, and only the user can write it."""
    status = path.lstat()
    if fcntl is None:
        return True
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == user() and not stat.S_ISLNK(status.st_mode) and not is_shared


def _keeps(path: Path) -> bool:
    """Whether only this user and root can replace what a folder or link leads to."""
    status = path.lstat()
    if status.st_uid not in (user(), ROOT):
        return False
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:  # owners keep their files in a sticky folder
        return True
    # A group with the user's id has no other member.
    is_shared = status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid
    return not (is_shared or status.st_mode & stat.S_IWOTH)


@cache
def user() -> int:
    """Owner of files that this process writes."""
    with tempfile.NamedTemporaryFile() as file:
        return Path(file.name).stat().st_uid


@contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Compile without the garbage collector, which takes a fifth of the time; one process per folder at a time."""
    with ExitStack() as stack:
        if fcntl is not None:
            with suppress(OSError):  # no file locks: each process compiles
                lock = stack.enter_context(open(folder / "lock", "a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        stack.enter_context(uncollected())
        stack.enter_context(_undisturbed())
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay signals while LLVM calls Python back.

    An exception in such a callback is lost together with the machine code; numba then fails or crashes.
    """
    handlers: dict[int, Any] = {
        int(n): handler for n in signal.valid_signals() if callable(handler := signal.getsignal(n))
    }
    delayed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None and caller.f_code not in CALLBACKS:
            caller = caller.f_back
        if caller is None:
            handlers[number](number, frame)
        else:
            delayed.append(number)

    try:
        for number in handlers:
            signal.signal(number, handle)
    except ValueError:  # the main thread handles signals
        handlers = {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in delayed:
            handlers[number](number, None)
