"""A spare, tried: where the busiest stretch lies, and what a lost replica does with and without it."""

import json
from pathlib import Path

import numpy as np
import pytest

from dsim.planner.lost import busiest, in_words, lost_replica
from dsim.planner.memo import Memo
from dsim.results.scenario import Scenario
from dsim.traces import Trace


def test_the_busiest_stretch_is_a_quarter_of_a_short_trace_and_begins_where_most_tokens_arrive() -> None:
    arrival, lengths = np.arange(0.0, 101.0, 10.0), np.full(11, 5)
    lengths[6] = 90
    begin, length = busiest(Trace("ten", arrival, lengths, lengths))
    assert length == 25.0
    assert begin <= 60.0 <= begin + length
    late = Trace("late", 1e4 * np.arange(9.0), np.ones(9, int), np.ones(9, int))
    assert busiest(late)[1] == 900.0


def test_a_fleet_that_a_lost_replica_overloads_is_saved_by_a_spare() -> None:
    scenario = Scenario(
        trace="azure-conv", policy="ar", replicas=2, rate=9.0, num_requests=1200, slos=("ttft=2s", "100ms/token"),
        router="least-tokens",
    )  # fmt: skip
    found = lost_replica(scenario, 1, Memo())
    assert found is not None
    whole = scenario.summarize(scenario.simulate()).slo_attainment
    assert found["without"] < found["with_spare"]
    assert found["without"] < whole - 0.01
    said = in_words(found, 0.99)
    assert f"{100 * found['with_spare']:.1f} % of requests meet the SLOs with the spare" in said
    assert said.endswith("99 % is asked")


def test_requests_that_come_at_once_have_no_stretch_to_lose_a_replica_in(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 8, "output_length": 4}] * 3
    (tmp_path / "at_once.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = Scenario(trace=str(tmp_path / "at_once.jsonl"), policy="ar", slos=("ttft=2s",))
    assert lost_replica(scenario, 1, Memo()) is None


@pytest.mark.parametrize("slos", [(), ("p90:ttft=2s",)])
def test_without_an_slo_of_each_request_nothing_is_replayed(slos: tuple[str, ...]) -> None:
    assert lost_replica(Scenario(trace="azure-conv", policy="ar", slos=slos), 1, Memo()) is None
