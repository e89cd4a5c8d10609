"""Compiled code on disk: a damaged file costs no more than compiling it again, and no other user's code is loaded."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsim.engine import jit, numba_parts

pytestmark = pytest.mark.skipif(not jit.JIT, reason="rules run as plain Python: nothing is compiled")


def squares(n: int) -> int:
    total = 0
    for i in range(n):
        total += i * i
    return total


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(jit, "_home", lambda: folder)
    return folder


def was_loaded() -> bool:
    """Whether the rule's code came from disk, in a process that has nothing of it in memory."""
    function: Any = jit.bind(squares, {})
    assert function(4) == 14
    return bool(function.stats.cache_hits)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove_all(path: Path) -> None:
    shutil.rmtree(path.parent.parent)


@pytest.mark.parametrize(
    ("which", "damage"), [("nbc", cut), ("nbc", empty), ("nbc", Path.unlink), ("nbi", Path.unlink), ("nbi", remove_all)]
)
def test_damaged_code_is_compiled_again_and_kept(home: Path, which: str, damage: Callable[[Path], Any]) -> None:
    assert not was_loaded()
    assert was_loaded()
    [path] = home.rglob(f"*.{which}")
    damage(path)
    assert not was_loaded()
    assert was_loaded()


def test_where_nothing_can_be_written_a_rule_is_compiled_all_the_same(home: Path) -> None:
    home.rmdir()
    home.write_text("a file, in which no folder can be made")
    assert not was_loaded()
    assert not was_loaded()
    assert not list(Path(__file__).parent.rglob("squares*.nb?"))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where NUMBA_CACHE_DIR and the user's home are given places under this folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(numba_parts.config, "CACHE_DIR", str(tmp_path / "given"))
    jit._home.cache_clear()
    yield tmp_path
    jit._home.cache_clear()


def test_a_folder_that_another_user_can_write_is_passed_over(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = places / "given" / "dsim"
    assert jit._home() == folder
    folder.chmod(0o770)
    jit._home.cache_clear()
    assert jit._home().name.startswith("dsim-")
    folder.chmod(0o700)
    assert jit.is_private(folder)
    true = folder.stat()
    monkeypatch.setattr(
        Path, "stat", lambda path: SimpleNamespace(st_uid=true.st_uid + (path == folder), st_mode=0o700)
    )
    assert not jit.is_private(folder)


def test_a_file_of_the_current_folder_does_not_say_where_code_is_loaded_from(places: Path) -> None:
    (places / ".numba_config.yaml").write_text("cache_dir: given\n")
    assert jit._home() == places / "home" / ".cache" / "dsim"
