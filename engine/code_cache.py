"""Compiled code on disk: read and written so that no damaged file and no signal ends in more than compiling again.

To read it is to run it: numba unpickles it. So only what this user wrote counts, in a folder that no other can change.
"""

import hashlib
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from numba.core import caching
from numba.core.codegen import ll

try:
    import fcntl as posix
except ImportError:  # Windows, where a mode does not say who may write: a user's own folders are private there
    posix = None  # type: ignore[assignment]

SIZE = hashlib.sha256().digest_size  # bytes
ROOT = 0  # the number of the superuser
CALLED_BACK = {
    ll.ExecutionEngine._raw_object_cache_notify.__code__, ll.ExecutionEngine._raw_object_cache_getbuffer.__code__,
}  # fmt: skip


def keep(made: Any, function: Callable[..., Any]) -> None:
    """Keep what a dispatcher of numba's compiles in numba's `config.CACHE_DIR`; nowhere if nothing can be written."""
    with suppress(RuntimeError):  # no place
        made._cache = _Cache(function)


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


def undisturbed(compile: Callable[..., Any]) -> Callable[..., Any]:
    """A dispatcher's `compile` which no signal disturbs where its interruption would be lost.

    While LLVM makes or loads machine code it calls Python back. An exception that a signal's handler raises in there
    goes nowhere, and the code neither: numba then fails with "no compiled object yet", or calls what was never loaded
    and ends the process. Such a signal waits until the code is there.
    """

    @wraps(compile)
    def compiled(*arguments: Any) -> Any:
        with _after_callbacks():
            return compile(*arguments)

    return compiled


@contextmanager
def _after_callbacks() -> Iterator[None]:
    came: list[int] = []
    before: dict[int, Any] = {
        int(n): handler for n in signal.valid_signals() if callable(handler := signal.getsignal(n))
    }

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_called_back(frame):
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


def _is_called_back(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in CALLED_BACK:
        frame = frame.f_back
    return frame is not None


class _InItsFolder(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Nowhere but in the folder that is named by the sources."""

    _locator_classes: ClassVar[list[Any]] = [caching.UserProvidedCacheLocator]  # type: ignore[misc]


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Code that cannot be read is compiled again; what cannot be kept is compiled again by the next process."""

    _impl_class = _InItsFolder

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        held = self._cache_file
        self._cache_file = _Files(held._cache_path, self._impl.filename_base, held._source_stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):  # of a damaged file, unpickling may raise anything
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk, or no folder any more
            super().save_overload(sig, data)


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Files that end with a hash of what they hold: machine code of which a bit is another crashes, or lies."""

    def _load_index(self) -> Any:
        with suppress(Exception):
            self._check_own(self._index_path)
            return super()._load_index()
        return {}

    def _check_own(self, path: str) -> None:
        if not is_own(Path(path)):
            raise OSError(f"{path} is another user's")  # as good as gone

    def _dump(self, obj: Any) -> bytes:
        held: bytes = super()._dump(obj)
        return held + hashlib.sha256(held).digest()

    def _load_data(self, name: str) -> Any:
        self._check_own(self._data_path(name))
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-SIZE]).digest() != data[-SIZE:]:
            raise OSError(f"{name} is damaged")  # as good as gone
        return super()._load_data(name)  # it reads as far as what was held goes
