"""Safety of compiled code on disk: only private files, no signals while machine code loads.

numba unpickles the code, which runs it: only files that no one else can write are read.
"""

import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

try:
    import fcntl as posix
except ImportError:  # Windows: a user's folders are private
    posix = None  # type: ignore[assignment]

ROOT = 0  # user id


def is_private(folder: Path) -> bool:
    """Whether only this user and root can change or replace a folder's content."""
    if posix is None:
        return True
    try:
        found = folder.resolve(strict=True)
        if not is_own(found):
            return False
        # Links on the path may be another user's.
        ways = {*found.parents, *folder.absolute().parents, folder.absolute()}
        return all(_keeps(way) for way in ways)
    except (OSError, RuntimeError):
        return False


def is_own(path: Path) -> bool:
    """Whether a file or folder (no link) is this user's, and only the user can write it."""
    held = path.lstat()
    if posix is None:
        return True
    return held.st_uid == user() and not stat.S_ISLNK(held.st_mode) and not held.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keeps(way: Path) -> bool:
    """Whether only this user and root can replace what a folder or link leads to."""
    held = way.lstat()
    if held.st_uid not in (user(), ROOT):
        return False
    if stat.S_ISLNK(held.st_mode) or held.st_mode & stat.S_ISVTX:  # owners keep their files in a sticky folder
        return True
    # A group with the user's id has no other member.
    is_shared = held.st_mode & stat.S_IWGRP and held.st_gid != held.st_uid
    return not (is_shared or held.st_mode & stat.S_IWOTH)


@cache
def user() -> int:
    """Owner of files that this process writes."""
    with tempfile.NamedTemporaryFile() as file:
        return Path(file.name).stat().st_uid


def undisturbed(compile: Callable[..., Any], called_back: set[CodeType]) -> Callable[..., Any]:
    """A dispatcher's `compile` that delays signals while LLVM calls Python back.

    An exception in such a callback is lost together with the machine code; numba then fails or crashes.
    """

    @wraps(compile)
    def compiled(*arguments: Any) -> Any:
        with _after_callbacks(called_back):
            return compile(*arguments)

    return compiled


@contextmanager
def _after_callbacks(called_back: set[CodeType]) -> Iterator[None]:
    came: list[int] = []
    before: dict[int, Any] = {
        int(n): handler for n in signal.valid_signals() if callable(handler := signal.getsignal(n))
    }

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_called_back(frame, called_back):
            came.append(number)
        else:
            before[number](number, frame)

    changed = []
    with suppress(ValueError):  # handlers run in the main thread only
        for number in before:
            signal.signal(number, handle)
            changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
        for number in came:
            before[number](number, None)


def _is_called_back(frame: FrameType | None, called_back: set[CodeType]) -> bool:
    while frame is not None and frame.f_code not in called_back:
        frame = frame.f_back
    return frame is not None
