"""Compiled code on disk: read and written so that no damaged file and no signal ends in more than compiling again.

To read it is to run it: numba unpickles it. So only what this user wrote counts, in a folder that no other can change.
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
except ImportError:  # Windows, where a mode does not say who may write: a user's own folders are private there
    posix = None  # type: ignore[assignment]

ROOT = 0  # the number of the superuser


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's own, and none but this user and root can change or replace what is in it."""
    if posix is None:
        return True
    try:
        found = folder.resolve(strict=True)
        if not is_own(found):
            return False
        # The path as it is written may lead through links, each of which someone may have put there.
        ways = {*found.parents, *folder.absolute().parents, folder.absolute()}
        return all(_keeps(way) for way in ways)
    except (OSError, RuntimeError):
        return False


def is_own(path: Path) -> bool:
    """Whether a file or folder, and no link to one, is this user's and can be written by no other."""
    held = path.lstat()
    if posix is None:
        return True
    return held.st_uid == user() and not stat.S_ISLNK(held.st_mode) and not held.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keeps(way: Path) -> bool:
    """Whether a folder or link on the way lets none but this user and root replace what it leads to."""
    held = way.lstat()
    if held.st_uid not in (user(), ROOT):
        return False
    if stat.S_ISLNK(held.st_mode) or held.st_mode & stat.S_ISVTX:  # of a sticky folder only its owner replaces a file
        return True
    # A group with the number of its user has no other member, by the convention of user-private groups.
    is_shared = held.st_mode & stat.S_IWGRP and held.st_gid != held.st_uid
    return not (is_shared or held.st_mode & stat.S_IWOTH)


@cache
def user() -> int:
    """The number of this user: the owner of what this process writes."""
    with tempfile.NamedTemporaryFile() as file:
        return Path(file.name).stat().st_uid


def undisturbed(compile: Callable[..., Any], called_back: set[CodeType]) -> Callable[..., Any]:
    """A dispatcher's `compile` which no signal disturbs where its interruption would be lost.

    While LLVM makes or loads machine code it calls Python back. An exception that a signal's handler raises in there
    goes nowhere, and the code neither: numba then fails with "no compiled object yet", or calls what was never loaded
    and ends the process. Such a signal waits until the code is there.
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
    with suppress(ValueError):  # not the main thread: no signal's handler is run in here
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
