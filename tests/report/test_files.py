"""A run's folder: whole or absent, the same bytes for the same run, and refused before it hides something."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsim.engine.errors import DsimError
from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from dsim.report.run_folder import RunWriter
from dsim.report.run_page import write_html
from dsim.results.manifest import FILES
from dsim.results.metrics import Summary
from dsim.results.run import read_run

from ..worlds import Collector
from .fabricate import POLICIES, toy_run, write_run

SMALL = {"num_requests": 12, "rate": 8.0}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Summary]]:
    folder = tmp_path_factory.mktemp("written") / "run"
    return folder, write_run(folder, **SMALL, lists=True)


@pytest.fixture
def run(written: tuple[Path, list[Summary]], tmp_path: Path) -> Path:
    """A run in a folder of the test's own."""
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def test_a_run_reads_back_as_it_was_written(written: tuple[Path, list[Summary]]) -> None:
    folder, summaries = written
    assert sorted(p.name for p in folder.parent.iterdir()) == ["run"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES[:4])
    run = read_run(folder)
    assert run.policies == list(POLICIES)
    assert run.info["policies"] == [s.to_json() for s in summaries]
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
    steps = pq.read_table(run / "steps.parquet")
    assert steps.column_names == ["policy", *STEP_COLUMNS, *STEP_LISTS]


def test_run_json_says_what_it_is_and_holds_no_nan(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.finish({"interrupted": True, "policies": [], "trace": {"rate": float("nan")}, "seed": np.int64(3)})  # type: ignore[typeddict-item]
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found == {
        "schema": "dsim-run", "version": 1, "interrupted": True, "policies": [], "trace": {"rate": None}, "seed": 3,
    }  # fmt: skip


def test_a_run_may_be_read_by_whom_any_new_folder_may(written: tuple[Path, list[Summary]], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert written[0].stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_run_that_does_not_finish_leaves_nothing_and_what_was_there(run: Path, tmp_path: Path) -> None:
    before = (run / "run.json").read_bytes()
    for place in ("run", "deep/er/run"):
        with RunWriter(tmp_path / place, force=True) as writer:
            toy_run("chunk:8", writer.steps("chunk:8").append, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert (run / "run.json").read_bytes() == before


def test_ctrl_c_while_a_run_is_written_takes_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = 1

    def interrupted(*_: object) -> None:
        for _i in range(times):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("dsim.report.run_page.write_html", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with RunWriter(tmp_path / "run") as writer:
        writer.finish({"policies": []})
    assert (tmp_path / "run" / "run.json").is_file()
    assert capsys.readouterr().err == f"Writing {tmp_path / 'run'}: Ctrl-C again discards it\n"
    times = 2
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path / "other") as writer:
        writer.finish({"policies": []})
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_without_lists_says_so_when_asked_for_them(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other", **SMALL)
    with pytest.raises(DsimError, match="column 'requests' is empty: the run kept scalar columns only"):
        read_run(tmp_path / "other").step_lists("optimus")
    held, ever, steps = read_run(run), [(0.0, 1e9)], run / "steps.parquet"
    assert list(held.step_groups("optimus", ever))
    pq.write_table(pq.read_table(steps).drop_columns(["requests"]), steps)
    assert list(held.step_groups("optimus", ever)) == []


def test_half_a_character_in_a_run_json_is_its_escape_on_the_page(run: Path, tmp_path: Path) -> None:
    held = read_run(run)
    write_html(tmp_path / "page.html", replace(held, info={**held.info, "command": "dsim replay \ud800.csv"}))
    assert b"dsim replay \\ud800.csv" in (tmp_path / "page.html").read_bytes()


@pytest.mark.parametrize("number", [-1, 2**30])
def test_a_request_s_number_that_no_trace_has_is_refused(run: Path, number: int) -> None:
    path = run / "requests.parquet"
    table = pq.read_table(path)
    at = table.column_names.index("request")
    numbers = table["request"].to_numpy().copy()
    numbers[0] = number
    pq.write_table(table.set_column(at, "request", pa.array(numbers)), path)
    with pytest.raises(
        DsimError, match=rf"requests.parquet: a request has the number {number}, expected 0 to 33554431"
    ):
        read_run(run).requests(read_run(run).policies[0])


def test_a_small_file_of_many_rows_is_refused_before_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.results.run.MOST_REQUESTS", 10)
    path = run / "requests.parquet"
    pq.write_table(pa.concat_tables([pq.read_table(path).slice(0, 1)] * 50_000).combine_chunks(), path)
    with pytest.raises(DsimError, match="holds 50000 rows, expected at most "):
        read_run(run)


def test_a_folder_without_a_run_is_told_apart(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DsimError, match="no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(DsimError, match=r"it lacks run.json, requests.parquet, steps.parquet"):
        read_run(tmp_path)
    (run / "steps.parquet").write_text("cut short")
    with pytest.raises(DsimError, match=r"steps.parquet: cannot be read as a run's Parquet file"):
        read_run(run)
