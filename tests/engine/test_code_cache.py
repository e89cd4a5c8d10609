"""Compiled code on disk: neither a damaged file nor a signal costs more than compiling it again."""

import multiprocessing
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dsim.engine import jit

pytestmark = pytest.mark.skipif(not jit.JIT, reason="rules run as plain Python: nothing is compiled")


def squares(n: int) -> int:
    total = 0
    for i in range(n):
        total += i * i
    return total


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jit, "_home", lambda: tmp_path / "home")
    return tmp_path / "home"


def made() -> Any:
    """The rule as another process meets it: nothing of it is in memory."""
    return jit._compiled(squares, "key")


def was_loaded(function: Any) -> bool:
    """Whether the rule's code came from disk."""
    assert function(4) == 14
    return bool(function.stats.cache_hits)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"\x7fELF") + 700] ^= 1
    path.write_bytes(data)


def remove_all(path: Path) -> None:
    shutil.rmtree(path.parent.parent)


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        ("nbc", cut), ("nbc", empty), ("nbc", flip), ("nbc", Path.unlink), ("nbi", cut), ("nbi", empty),
        ("nbi", Path.unlink), ("nbi", remove_all),
    ],
)  # fmt: skip
def test_damaged_code_is_compiled_again_and_kept(home: Path, which: str, damage: Callable[[Path], Any]) -> None:
    assert not was_loaded(made())
    assert was_loaded(made())
    [path] = home.rglob(f"*.{which}")
    damage(path)
    assert not was_loaded(made())
    assert was_loaded(made())


def test_where_nothing_can_be_written_a_rule_is_compiled_all_the_same(home: Path) -> None:
    home.write_text("a file, in which no folder can be made")
    assert not was_loaded(made())
    home.unlink()
    later = made()
    shutil.rmtree(home)
    home.write_text("")
    assert not was_loaded(later)
    assert not list(Path(__file__).parent.rglob("squares*.nb?"))


def _compile_at_once(begin: Any) -> None:
    function = made()
    begin.wait()
    assert function(4) == 14


def test_two_processes_may_begin_with_an_empty_folder(home: Path) -> None:
    forks = multiprocessing.get_context("fork")
    begin = forks.Barrier(2)
    both = [forks.Process(target=_compile_at_once, args=(begin,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert was_loaded(made())


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Exceptions that Python dropped."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    signal.signal(signal.SIGINT, before)


def interrupted_in(callback: str) -> Any:
    """The rule after its first call, in which an interrupt came while LLVM called this back."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == callback:
            signal.raise_signal(signal.SIGINT)

    function, profiled = made(), sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            function(4)
    finally:
        sys.setprofile(profiled)
    return function


def test_a_signal_while_llvm_calls_back_waits_until_the_code_is_there(home: Path, lost: list[object]) -> None:
    assert not was_loaded(interrupted_in("_object_compiled_hook"))
    assert was_loaded(interrupted_in("_object_getbuffer_hook"))  # where it would otherwise end the process
    assert lost == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
