"""Signals: the first asks, the second ends, and what must not be cut off is not."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dsim.files.interrupt import SIGNALS, as_ctrl_c, asked_to_stop, uninterrupted

from ..checks import cases


@pytest.fixture
def _as_a_command() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_a_command")
@cases("number", *SIGNALS)
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    told = threading.Event()
    with asked_to_stop(told.set):
        signal.raise_signal(number)
        assert told.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.usefixtures("_as_a_command")
@cases("number", *SIGNALS)
def test_a_signal_waits_until_what_is_done_is_done(number: signal.Signals) -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]


def test_what_is_fatal_or_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with asked_to_stop(lambda: pytest.fail("nobody asked")):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_under_nohup_goes_on_ignoring_its_terminals_end() -> None:
    code = (
        "import signal; from dsim.files.interrupt import as_ctrl_c\n"
        "with as_ctrl_c(): print(*map(callable, map(signal.getsignal, (1, 15))))"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False True\n"


class Dropping:
    """As it goes away a signal comes, and Python drops what is raised there."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_that_python_drops_comes_once_more() -> None:
    def work() -> None:
        gone = Dropping()
        del gone
        for _ in range(1000):
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), as_ctrl_c():
        work()
