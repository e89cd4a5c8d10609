"""Replications: evenly resampled, the same at every rate, and judged as the SLOs say."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsim.planner.replicate import Criterion, criteria_of, interval, judged, measure, replication, resample, to_judge
from dsim.results.slo import Slo
from dsim.results.world import World
from dsim.traces import Trace, synth

from ..results.test_stable import single_server

AZURE = World("azure-conv", policy="ar,max_batch=4")


def criteria(*texts: str, attainment: float = 0.99) -> tuple[Criterion, ...]:
    return criteria_of([Slo.parse(text) for text in texts], attainment)


def test_a_replication_holds_every_row_once_or_evenly_where_it_is_longer() -> None:
    assert np.bincount(resample(60, 600, 6, seed=0)).tolist() == [10] * 60
    rows = resample(1000, 1000, 50, seed=3)
    assert sorted(rows.tolist()) == list(range(1000))
    # Blocks of consecutive rows, around the ring's end.
    assert ((np.diff(rows.reshape(20, 50), axis=1) - 1) % 1000 == 0).all()
    assert not np.array_equal(rows, resample(1000, 1000, 50, seed=4))
    assert np.array_equal(rows, resample(1000, 1000, 50, seed=3))


def test_every_row_is_equally_likely() -> None:
    counts = sum(np.bincount(resample(40, 10, 5, seed), minlength=40) for seed in range(2000))
    # Each of 40 rows is drawn 500 times on average; a row's count varies as a coin's, by 19.
    assert np.abs(np.asarray(counts) - 500).max() < 5 * 20


def test_a_replication_keeps_each_request_with_its_lengths_and_the_gap_before_it() -> None:
    source = AZURE.source()
    own, requests = replication(AZURE, 0, 400, 100)
    # 40 that lead up to those judged, 340 that are, and 20 that follow.
    rows = resample(len(source), 340, 100, own.seed)
    rows = np.concatenate((rows[0] - np.arange(40, 0, -1), rows, rows[-1] + np.arange(1, 21))) % len(source)
    assert requests.input_length.tolist() == source.input_length[rows].tolist()
    assert requests.output_length.tolist() == source.output_length[rows].tolist()
    inside = [i for i in range(1, 400) if rows[i] == rows[i - 1] + 1]
    gaps, own = np.diff(requests.arrival), np.diff(source.arrival)
    scale = gaps[inside[0] - 1 : inside[90]].sum() / own[rows[inside[0]] - 1 : rows[inside[90]]].sum()
    assert np.allclose(gaps[np.array(inside) - 1], scale * own[rows[inside] - 1], atol=1e-9)
    seen = requests.arrival[judged(400)]
    assert (seen[-1] - seen[0]) / 339 == pytest.approx(1.0)


def swing(trace: Trace, window: int) -> float:
    """The relative spread of the work that comes in a second, over windows of so many requests."""
    ends = np.arange(window, len(trace), window)
    rate = np.add.reduceat(trace.input_length + trace.output_length, ends)[:-1] / np.diff(trace.arrival[ends])
    return float(rate.std() / rate.mean())


def test_blocks_of_a_quarter_keep_the_swings_of_load_that_blocks_of_a_hundred_lose() -> None:
    source = AZURE.source()
    num = to_judge(len(source))
    own = {window: swing(source, window) for window in (500, 1000, 2000)}

    def kept(block: int) -> list[float]:
        drawn = [replication(AZURE, k, num, block)[1] for k in range(4)]
        return [float(np.mean([swing(trace, window) for trace in drawn])) / own[window] for window in own]

    # What is judged lies between two parts of itself, which doubles some minutes.
    assert all(0.95 < ratio < 1.2 for ratio in kept(-(-len(source) // 4)))
    # Shuffled, the minutes in which prompts are long are spread over the hour.
    assert all(ratio < 0.65 for ratio in kept(100))
    assert kept(100)[2] < 0.35


def test_what_is_judged_by_default_is_the_trace_once() -> None:
    source = AZURE.source()
    seen = judged(to_judge(len(source)))
    assert seen.stop - seen.start in (len(source), len(source) + 1)
    counts = np.bincount(resample(len(source), seen.stop - seen.start, -(-len(source) // 4), seed=0))
    # But for a row or two at each end of a block, where its length is no whole part of the trace's.
    assert len(counts) == len(source)
    assert (counts != 1).sum() <= 8


def test_replications_differ_in_requests_and_luck_and_a_fresh_one_of_the_same_index_does_not() -> None:
    (first, a), (again, b), (other, c) = (replication(AZURE, k, 300, 30) for k in (0, 0, 1))
    assert first.seed == again.seed != other.seed
    assert a.arrival.tolist() == b.arrival.tolist() != c.arrival.tolist()
    poisson = World("azure-conv", arrival="poisson")
    assert not np.allclose(replication(poisson, 0, 300, 30)[1].arrival, replication(poisson, 1, 300, 30)[1].arrival)


def test_latency_rises_with_the_rate_within_a_replication() -> None:
    own, requests = replication(AZURE, 0, 300, 30)
    judged = criteria("p50:e2el=20s", "90%:ttft=1s")
    readings = [measure(own, judged, requests, rate)[0] for rate in (0.05, 0.2, 1.0, 4.0)]
    values, shares = zip(*(reading.values for reading in readings), strict=True)
    assert list(values) == sorted(values)
    assert list(shares) == sorted(shares, reverse=True)
    assert readings[0].holds
    assert not readings[-1].holds


def test_slos_without_a_statistic_are_met_together() -> None:
    found = criteria("ttft=2s", "p90:e2el=9s", "tpot=50ms", "95%:ttft=1s")
    assert [c.text for c in found] == ["p90:e2el=9s", "95%:ttft=1s", "99% meet ttft=2s and tpot=50ms"]
    assert [c.bound for c in found] == [9.0, 0.95, 0.99]


def test_a_days_swing_is_no_queue_that_grows_and_a_bursty_overload_is() -> None:
    trace = synth("constant", 10.0, lengths="fixed:1,1", num_requests=2000)
    day = np.pi / 200
    # Half a sine of 70 %, from trough to peak; each request is served at once and takes 30 s.
    arrival = np.interp(trace.arrival, (at := np.arange(200.0)) - 0.7 * np.sin(day * at) / day, at)
    columns = single_server(0.5, 0) | {"arrival": arrival, "scheduled": arrival, "finish": arrival + 30}
    result: Any = SimpleNamespace(table=SimpleNamespace(columns=columns))
    served: Any = SimpleNamespace(simulate_whole=lambda *_: result)
    assert measure(served, criteria("e2el=40s"), trace, 10.0)[0].holds
    # Waits of a day whose peak is over, though its last quarter waits longest.
    waits = 6 * np.clip(np.sin(np.pi * np.linspace(-1, 0.95, len(arrival))), 0, None)
    result.table.columns = columns | {"scheduled": arrival + waits, "finish": arrival + waits + 1}
    assert measure(served, criteria("e2el=40s"), trace, 10.0)[0].holds
    # Arrivals that end before the server is full: no wait would show an overload.
    result.table.columns = columns | {"finish": arrival + 90}
    assert not measure(served, criteria("e2el=100s"), trace, 10.0)[0].stable
    # A bursty load of 1.1, which `stable` takes for chance.
    result.table.columns = single_server(1.1, 2, cv=2.0)
    assert not measure(served, criteria("e2el=40s"), trace, 0.55)[0].stable


def test_an_interval_is_students_of_the_logs() -> None:
    found = interval([math.exp(x) for x in (1.0, 2.0, 3.0)])
    # t at 97.5 % with two degrees of freedom is 4.302653; the standard error is 1 / sqrt(3).
    half = 4.302653 / math.sqrt(3)
    assert [math.log(v) for v in (found.value, found.low, found.high)] == pytest.approx([2.0, 2.0 - half, 2.0 + half])
    assert interval([5.0]).high == math.inf
