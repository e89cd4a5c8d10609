"""Where the tests of the command line run, and by which clock."""

import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _budgets_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a budget of seconds measure as much on a busy machine as on an idle one."""
    clocks = SimpleNamespace(**{**vars(time), "monotonic": time.process_time})
    for module in ("measure", "measure_canvas") if find_spec("torch") else ():
        monkeypatch.setattr(f"dsim.profiler.{module}.time", clocks)
