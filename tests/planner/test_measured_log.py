"""A trace that says what its clients waited: measured beside predicted, unasked."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.comparison.measured_log import is_as_logged, measured_log
from dsim.report.page import Page
from dsim.report.run import log_words, run_words
from dsim.results.metrics import latencies
from dsim.results.run_info import MeasuredLog, RunInfo, TraceInfo
from dsim.results.world import World, arrived
from dsim.traces import load, write

from ..cli.command import succeed

POLICY = "chunk:4"


def page_of(measured: MeasuredLog | None) -> Page:
    return run_words(RunInfo(trace=TraceInfo("log"), measured=measured))


@pytest.fixture
def logged(tmp_path: Path) -> World:
    """Forty requests whose log says twice the times of dsim's own replay, but for one that it says nothing of."""
    source = load("azure-conv").head(40).time_scaled(8.0)
    plain = World(str(tmp_path / "plain.jsonl"), POLICY)
    write(source, plain.trace)
    found = latencies(plain.simulate(plain.requests()).table.columns)
    waited = {f"measured_{name}": [None, *(2 * found[name][1:]).tolist()] for name in ("ttft", "e2el")}
    trace = tmp_path / "log.jsonl"
    write(replace(load(plain.trace), extras=waited), trace)
    return replace(plain, trace=str(trace), slos=("ttft=1s",))


def test_what_was_measured_stands_beside_what_is_predicted_for_the_same_requests(logged: World) -> None:
    found = measured_log(logged, {POLICY: arrived(logged.simulate())})
    assert found is not None
    assert (found.num_timed, found.num_requests) == (39, 40)
    for row in found.beside:
        measured, predicted = row.measured_predicted_ms[POLICY]
        assert measured == pytest.approx(2 * predicted, rel=1e-6)
    assert [(row.metric, row.stat) for row in found.beside][:2] == [("ttft", "p50"), ("ttft", "p90")]
    waited = np.array(load(logged.trace).extras["measured_ttft"][1:])
    assert found.summary.slo_attainment == pytest.approx((waited <= 1).mean())
    assert (
        f"Largest difference from it for the same requests: {POLICY} -50.0 % (ttft p50); the"
        in page_of(found).details[0]
    )
    assert f"met the SLOs for {100 * (waited <= 1).mean():.1f} % of 39 requests" in log_words(found)
    (section,) = page_of(found).sections
    assert section.blocks[0].rows[0].cells[2].endswith(" ms (-50.0 %)")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "other", [{"rate": 2.0}, {"arrival": "poisson", "rate": 2.0}, {"lengths": "fixed:8,8"},
              {"concurrency": 2}, {"num_requests": 41}]
)  # fmt: skip
def test_other_traffic_than_the_logs_is_compared_with_nothing(logged: World, other: dict[str, object]) -> None:
    asked = replace(logged, **other)  # type: ignore[arg-type]
    assert is_as_logged(logged)
    assert not is_as_logged(asked)
    found = measured_log(asked, {POLICY: arrived(logged.simulate())})
    assert found is not None
    assert (found.beside, page_of(found).sections) == ((), ())
    assert page_of(found).details[0].endswith("This traffic is not the log's: its times do not test the prediction.")


def test_a_trace_without_times_is_compared_with_nothing() -> None:
    assert measured_log(World("azure-conv")) is None
    assert (page_of(None).details, page_of(None).sections) == ((), ())


def test_a_replay_says_so_in_its_second_line_and_on_its_page(logged: World, tmp_path: Path) -> None:
    ran = succeed("replay", logged.trace, "--policy", POLICY, "--slo", "ttft=1s", "-o", str(tmp_path / "run"))
    first, second, *rest = ran.out.splitlines()
    assert first.startswith(f"{POLICY} meets the SLOs for ")
    assert second.startswith("The log measured at ")
    assert "Measured beside predicted" in rest
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["measured"]
    assert kept["num_timed"] == 39
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Largest difference from it for the same requests" in page
    assert "<h2>Measured beside predicted</h2>" in page
