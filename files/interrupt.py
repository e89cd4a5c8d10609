"""Ctrl-C, SIGTERM and SIGHUP: how they end a command, and what they may not interrupt."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # the exit code after Ctrl-C, as a shell says it
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any]


def end_interrupted() -> NoReturn:
    """End the process as Ctrl-C does."""
    print("Interrupted.", file=sys.stderr)
    sys.exit(INTERRUPTED)


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does: for a command, which they end. One that is ignored stays so.

    Where one comes while a library's C++ is loaded, that says ImportError in its place: it is Ctrl-C again here.
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
    """An interrupt that came where Python can raise nothing, as while a module's lock is let go, comes once more."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, _thread.interrupt_main).start()  # not from in here, where it would be dropped, too
    else:
        sys.__unraisablehook__(dropped)


@contextmanager
def asked_to_stop(tell: Callable[[], object]) -> Iterator[None]:
    """The first signal calls `tell` and ends nothing; the second does what it would have done without this.

    with asked_to_stop(event.set): ...
    """
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
    """A signal waits until what is done in here is done: a line half written, a rename half made."""
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
    """The signals that end this thread's work by a handler of Python's; not those that are ignored or fatal.

    A worker that ignores Ctrl-C goes on ignoring it, and in a notebook SIGTERM goes on ending the process.
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
