"""Compiled code on disk: neither a damaged file nor a signal costs more than compiling it again."""

import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dsim.engine import jit, numba_parts
from dsim.engine.code_cache import is_private

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
    return jit.bind(squares, {})


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


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Owners of files that are said to be others', by path."""
    found: dict[Path, int] = {}
    lstat = Path.lstat

    def told(path: Path) -> os.stat_result:
        held = list(lstat(path))
        held[stat.ST_UID] = found.get(path, held[stat.ST_UID])
        return os.stat_result(held)

    monkeypatch.setattr(Path, "lstat", told)
    return found


STRANGER = 54321


def test_code_in_a_folder_of_another_user_or_that_others_may_write_is_not_loaded(
    home: Path, owners: dict[Path, int]
) -> None:
    assert not was_loaded(made())
    [folder] = home.iterdir()
    assert was_loaded(made())
    owners[folder] = STRANGER
    assert not was_loaded(made())
    owners.clear()
    assert was_loaded(made())
    folder.chmod(0o777)
    assert not was_loaded(made())
    folder.chmod(0o700)
    elsewhere = home.parent / "elsewhere"
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere)
    assert not was_loaded(made())


def private(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "kept"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o755)
    return folder


def test_a_folder_is_private_if_no_other_user_can_change_or_replace_it(tmp_path: Path, owners: dict[Path, int]) -> None:
    folder = private(tmp_path)
    above = folder.parent
    assert is_private(folder)
    for path in (folder, above):
        owners[path] = STRANGER
        assert not is_private(folder)
        owners.clear()
        path.chmod(0o777)
        assert not is_private(folder)
        path.chmod(0o755)
    above.chmod(0o1777)  # as /tmp is
    assert is_private(folder)
    above.chmod(0o755)
    owners[above] = 0
    assert is_private(folder)
    assert not is_private(tmp_path / "none")


def test_a_link_is_as_private_as_what_it_leads_to_and_the_folders_on_the_way(
    tmp_path: Path, owners: dict[Path, int]
) -> None:
    folder, links = private(tmp_path), tmp_path / "links"
    links.mkdir()
    link = links / "kept"
    link.symlink_to(folder)
    assert is_private(link)
    owners[link] = STRANGER
    assert not is_private(link)
    owners.clear()
    links.chmod(0o777)
    assert not is_private(link)
    links.chmod(0o755)
    folder.parent.chmod(0o777)
    assert not is_private(link)
    circle = links / "circle"
    circle.symlink_to(circle)
    assert not is_private(circle)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where NUMBA_CACHE_DIR and the user's home are given places under this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(numba_parts.config, "CACHE_DIR", str(tmp_path / "given"))
    jit._home.cache_clear()
    yield tmp_path
    jit._home.cache_clear()


def test_a_cache_that_others_may_write_is_passed_over(places: Path) -> None:
    assert jit._home() == places / "given" / "dsim"
    (places / "given").chmod(0o777)
    jit._home.cache_clear()
    assert jit._home() == places / "home" / ".cache" / "dsim"
    (places / "home" / ".cache" / "dsim").chmod(0o770)
    jit._home.cache_clear()
    assert jit._home().name.startswith("dsim-")
    assert is_private(jit._home())


def test_a_file_of_the_current_folder_does_not_say_where_code_is_loaded_from(places: Path) -> None:
    (places / ".numba_config.yaml").write_text("cache_dir: given\n")
    assert jit._home() == places / "home" / ".cache" / "dsim"
