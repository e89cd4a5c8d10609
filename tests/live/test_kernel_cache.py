"""Where Triton keeps compiled kernels: in its own folder, unless another user could have put something there."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from dsim.engine.errors import ModelError
from dsim.live.kernel_cache import keep_private


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_HOME", raising=False)


def test_tritons_own_folder_is_used_where_it_is_private(tmp_path: Path) -> None:
    keep_private()
    assert os.environ["TRITON_CACHE_DIR"] == ""
    assert (tmp_path / ".triton" / "cache").is_dir()


def test_a_folder_that_others_may_write_is_left_for_one_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(tmp_path, monkeypatch)
    keep_private()
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used.name.startswith("dsim-triton-")
    assert used.stat().st_mode & 0o777 == 0o700


def test_a_gpu_is_taken_only_with_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = pytest.importorskip("dsim.profiler.measure")
    share(tmp_path, monkeypatch)
    with suppress(ModelError):  # there is none here
        measure.select("cuda")
    assert Path(os.environ["TRITON_CACHE_DIR"]).name.startswith("dsim-triton-")


def share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's folder be one that others may write."""
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
