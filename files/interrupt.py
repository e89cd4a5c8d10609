"""Ctrl-C, SIGTERM, SIGHUP and a lost cluster: how they end a command, and what may finish first."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ..engine.errors import MachineError

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any]


class LostError(MachineError):
    """A cluster that stopped answering; its client may crash the process at exit."""


def end_interrupted() -> NoReturn:
    """End the process as Ctrl-C does."""
    print("Interrupted.", file=sys.stderr)
    sys.exit(INTERRUPTED)


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C in this block; ignored signals stay ignored.

    A signal during the import of a C++ library can surface as ImportError; it is raised as KeyboardInterrupt here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {n: handler for n, handler in handlers.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    dropped, sys.unraisablehook = sys.unraisablehook, _again
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except ImportError as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = dropped


def _again(dropped: "sys.UnraisableHookArgs") -> None:
    """Resend an interrupt that came where Python cannot raise, such as during the release of a module's lock."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, _thread.interrupt_main).start()  # later: in here it would be dropped again
    else:
        sys.__unraisablehook__(dropped)


@contextmanager
def asked_to_stop(tell: Callable[[], object]) -> Iterator[None]:
    """The first signal only calls `tell`; the second acts as outside this context."""
    before = _ours()

    def first(_signum: int, _frame: FrameType | None) -> None:
        _restore(before)
        tell()

    _install(before, first)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals until the block ends, so that a write or rename is not cut short."""
    before = _ours()
    came: list[int] = []
    _install(before, lambda signum, _frame: came.append(signum))
    try:
        yield
    finally:
        _restore(before)
    if came:
        raise KeyboardInterrupt


def _ours() -> dict[int, Handler]:
    """The signals with a Python handler in this thread; ignored and default ones are left alone.

    So a worker that ignores Ctrl-C keeps ignoring it, and in a notebook SIGTERM still ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}


def _install(of: dict[int, Handler], handler: Handler) -> None:
    for number in of:
        signal.signal(number, handler)


def _restore(before: dict[int, Handler]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
