"""A run as trace events: whole, nested as a viewer needs it, and with the run's own times."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.report.trace_view import events
from dsim.results.run import Run, read_run

from ..cli.command import dsim, succeed

Event = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with contextlib.chdir(tmp_path_factory.mktemp("runs")):
        command = ["replay", "azure-conv", "--num-requests", 40, "--rate", 8, "--replicas", 2, "-o", "run"]
        succeed(*command, "--policy", "lmdeploy-bd32", "--policy", "optimus")
        yield Path.cwd()


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder / "run")


def slices(found: list[Event]) -> dict[tuple[int, int], list[Event]]:
    by: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            by[event["pid"], event["tid"]].append(event)
    return by


def test_slices_of_a_thread_nest_or_follow_each_other(run: Run) -> None:
    for mine in slices(list(events(run, rows=True))).values():
        open_until: list[float] = []
        for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)


def test_every_step_and_every_request_is_there_with_its_times(run: Run) -> None:
    found = list(events(run))
    steps = [e for e in found if e.get("cat") == "step"]
    assert len(steps) == run.num_steps
    served = {(e["pid"], e["name"]): e for e in found if e.get("cat") == "request"}
    assert len(served) == 80
    for i, policy in enumerate(run.policies):
        columns = run.requests(policy)
        for row in range(40):
            event = served[2 * i + columns["replica"][row], f"request {row}"]
            assert event["ts"] == pytest.approx(1e6 * columns["scheduled"][row], abs=1e-2)
            assert event["ts"] + event["dur"] == pytest.approx(1e6 * columns["finish"][row], abs=1e-2)
            assert event["args"]["tokens"] == columns["num_tokens"][row]
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {f"{policy}, replica {k}" for policy in run.policies for k in (0, 1)}


def test_what_waits_begins_and_ends_where_the_request_says(run: Run) -> None:
    found = [e for e in events(run) if e.get("cat") == "queue"]
    ends = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    begins = {e["id"]: e["ts"] for e in found if e["ph"] == "b"}
    assert len(begins) == len(ends) == 80
    assert all(begins[k] <= ends[k] for k in begins)


def test_a_stretch_of_time_holds_what_overlaps_it(run: Run) -> None:
    columns = run.steps("optimus", ["start", "latency"])
    inside = (columns["start"] + columns["latency"] > 2.0) & (columns["start"] < 3.0)
    found = [e for e in events(run, 2.0, 3.0) if e.get("cat") == "step" and e["pid"] >= 2]
    assert len(found) == int(np.count_nonzero(inside)) > 0


def test_rows_commit_what_their_steps_commit(run: Run) -> None:
    found = list(events(run, rows=True))
    rows: dict[tuple[int, int], int] = defaultdict(int)
    for event in found:
        if event.get("cat") == "row":
            rows[event["pid"], event["args"]["step"]] += event["args"]["committed"]
    steps = {(e["pid"], e["args"]["step"]): e["args"]["committed"] for e in found if e.get("cat") == "step"}
    assert dict(rows) == steps


def test_the_command_writes_json_once_and_the_same_again(folder: Path) -> None:
    ran = dsim("trace-view", "run")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith("Wrote run.trace.json (")
    first = Path("run.trace.json").read_bytes()
    found = json.loads(first)
    assert f"({len(found['traceEvents']):,} events)" in ran.err
    said = dsim("trace-view", "run").refusal
    assert said == "run.trace.json exists: choose another name, or pass --force to replace it"
    assert dsim("trace-view", "run", "--force").code == 0
    assert Path("run.trace.json").read_bytes() == first
