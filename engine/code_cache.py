"""Compiled code on disk: read and written so that no damaged file and no signal ends in more than compiling again."""

import hashlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from numba.core import caching
from numba.core.codegen import ll

SIZE = hashlib.sha256().digest_size  # bytes
CALLED_BACK = {
    ll.ExecutionEngine._raw_object_cache_notify.__code__, ll.ExecutionEngine._raw_object_cache_getbuffer.__code__,
}  # fmt: skip


def keep(made: Any, function: Callable[..., Any]) -> None:
    """Keep what a dispatcher of numba's compiles in numba's `config.CACHE_DIR`; nowhere if nothing can be written."""
    with suppress(RuntimeError):  # no place
        made._cache = _Cache(function)


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
            return super()._load_index()
        return {}

    def _dump(self, obj: Any) -> bytes:
        held: bytes = super()._dump(obj)
        return held + hashlib.sha256(held).digest()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-SIZE]).digest() != data[-SIZE:]:
            raise OSError(f"{name} is damaged")  # as good as gone
        return super()._load_data(name)  # it reads as far as what was held goes
