"""How Ctrl-C, SIGTERM and SIGHUP end a command."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # as in a shell
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any]


def end_interrupted() -> NoReturn:
    """As Ctrl-C does."""
    print("Interrupted.", file=sys.stderr)
    sys.exit(INTERRUPTED)


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C; ignored signals stay ignored."""
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number, handler in _handlers().items() if handler in usual}
    dropped, sys.unraisablehook = sys.unraisablehook, _again
    _install(dict.fromkeys(before, signal.default_int_handler))
    try:
        yield
    finally:
        _install(before)
        sys.unraisablehook = dropped


def _again(dropped: "sys.UnraisableHookArgs") -> None:
    """Resend an interrupt from where Python cannot raise, as in a module lock's release."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, _thread.interrupt_main).start()  # at once it would be dropped again
    else:
        sys.__unraisablehook__(dropped)


@contextmanager
def handled(handler: Handler) -> Iterator[Mapping[int, Handler]]:
    """A handler for the signals with a Python handler; yields those."""
    # A worker that ignores Ctrl-C keeps ignoring it; in a notebook SIGTERM still ends the process.
    before = {number: handler for number, handler in _handlers().items() if callable(handler)}
    _install(dict.fromkeys(before, handler))
    try:
        yield before
    finally:
        _install(before)


@contextmanager
def asked_to_stop(tell: Callable[[], object]) -> Iterator[None]:
    """The first signal only calls `tell`; the second acts as outside."""

    def first(_signum: int, _frame: FrameType | None) -> None:
        _install(before)
        tell()

    with handled(first) as before:
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals, so that a write or rename is whole."""
    signals: list[int] = []
    with handled(lambda signum, _frame: signals.append(signum)):
        yield
    if signals:
        raise KeyboardInterrupt


def _handlers() -> dict[int, Any]:
    """By signal; none but in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in SIGNALS}


def _install(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
