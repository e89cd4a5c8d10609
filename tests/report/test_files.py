"""A run's folder: whole or absent, the same bytes for the same run, and refused before it hides something."""

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from dsim.files.write import encoded
from dsim.report.run_page import run_html
from dsim.results.metrics import Summary
from dsim.results.run import read_run
from dsim.results.run_folder import RunWriter
from dsim.results.run_info import FILES, RunInfo, TraceInfo

from ..checks import cases, refused
from ..worlds import Collector
from .fabricate import POLICIES, toy_run, write_run

SMALL = {"num_requests": 12, "rate": 8.0}
EMPTY = RunInfo(trace=TraceInfo("none"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Summary]]:
    folder = tmp_path_factory.mktemp("written") / "run"
    return folder, write_run(folder, **SMALL, lists=True)


@pytest.fixture
def run(written: tuple[Path, list[Summary]]) -> Path:
    """A run in a folder of the test's own."""
    return Path(shutil.copytree(written[0], "run"))


def test_a_run_reads_back_as_it_was_written(written: tuple[Path, list[Summary]]) -> None:
    folder, summaries = written
    assert sorted(p.name for p in folder.parent.iterdir()) == ["run"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES[:4])
    run = read_run(folder)
    assert run.policies == list(POLICIES)
    assert run.info.policies == tuple(summaries)
    for policy in POLICIES:
        journal = Collector()
        requests = toy_run(policy, journal, **SMALL).table.columns
        found = run.requests(policy)
        assert list(found) == list(REQUEST_COLUMNS)
        for name, dtype in REQUEST_COLUMNS.items():
            assert found[name].dtype == dtype
            np.testing.assert_array_equal(found[name], requests[name])
        found = run.steps(policy)
        assert list(found) == list(STEP_COLUMNS)
        for name, dtype in STEP_COLUMNS.items():
            assert found[name].dtype == dtype
            np.testing.assert_array_equal(found[name], journal.steps[name])
        for name, held in run.step_lists(policy).items():
            for mine, theirs in zip(held, journal.lists[name], strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_other_tools_read_names_not_numbers(run: Path) -> None:
    requests = pq.read_table(run / "requests.parquet").to_pandas()
    assert list(requests.columns) == ["policy", *REQUEST_COLUMNS]
    assert set(requests["policy"]) == set(POLICIES)
    assert set(requests["status"]) <= set(STATUSES)
    assert pq.read_table(run / "steps.parquet").column_names == ["policy", *STEP_COLUMNS, *STEP_LISTS]


@cases(
    "change says",
    ({"trace": []}, "trace is a list of 0, expected "),
    ({"slos": "ttft=1s"}, 'slos is "ttft=1s", expected a valid array'),
    ({"slos": ["ttft=1"]}, "slos: SLO 'ttft=1': bound is '1', expected a time above zero"),
    ({"replicas": True}, "replicas is true, expected a valid integer"),
    ({"new": 1}, "new is unknown"),
    ({"version": 2}, "version is 2, expected 1"),
)
def test_a_run_json_that_dsim_would_not_write_is_refused_in_one_line(run: Path, change: object, says: str) -> None:
    path = run / "run.json"
    assert read_run(run).info.to_json() == json.loads(path.read_text())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))  # type: ignore[operator]
    with refused() as error:
        read_run(run)
    assert str(error.value).startswith(f"{path}: {says}")


def test_a_run_may_be_read_by_whom_any_new_folder_may(written: tuple[Path, list[Summary]]) -> None:
    Path("other").mkdir()
    assert written[0].stat().st_mode == Path("other").stat().st_mode


def test_a_run_that_does_not_finish_leaves_nothing_and_what_was_there(run: Path) -> None:
    before = (run / "run.json").read_bytes()
    for place in ("run", "deep/er/run"):
        with RunWriter(place, force=True) as writer:
            toy_run("chunk:8", partial(writer.append, "chunk:8"), **SMALL)
    assert os.listdir() == ["run"]
    assert (run / "run.json").read_bytes() == before


def test_ctrl_c_while_a_run_is_written_takes_a_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    times = 1

    def interrupted(_: object) -> str:
        for _i in range(times):
            signal.raise_signal(signal.SIGINT)
        return ""

    before = signal.getsignal(signal.SIGINT)
    with RunWriter("run") as writer:
        writer.finish(EMPTY, interrupted)
    assert Path("run/run.json").is_file()
    assert capsys.readouterr().err == f"Writing {Path.cwd()}/run: Ctrl-C again discards it\n"
    times = 2
    with pytest.raises(KeyboardInterrupt), RunWriter("other") as writer:
        writer.finish(EMPTY, interrupted)
    assert os.listdir() == ["run"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_without_lists_says_so_when_asked_for_them() -> None:
    write_run(Path("other"), **SMALL)
    with refused("column 'requests' is empty: the run kept scalar columns only"):
        read_run("other").step_lists("optimus")


def test_half_a_character_in_a_run_json_is_its_escape_on_the_page(run: Path) -> None:
    held = read_run(run)
    page = run_html(replace(held, info=replace(held.info, command="dsim replay \ud800.csv")))
    assert b"dsim replay \\ud800.csv" in encoded(page)


def test_a_folder_without_a_run_is_told_apart(run: Path) -> None:
    with refused("no such folder"):
        read_run("none")
    with refused(r"it lacks run.json, requests.parquet, steps.parquet"):
        read_run(".")
    (run / "steps.parquet").write_text("cut short")
    with refused(r"steps.parquet: cannot be read as a run's Parquet file"):
        read_run(run)
