"""Estimated lengths: what routers and policies of a user's own are told where a request sets no limit."""

import math

import numpy as np
import pytest

from dsim.planner.replicate import replication
from dsim.results.world import World
from dsim.traces import Trace, load, synth
from dsim.traces.canonical import write
from dsim.traces.estimates import SPREAD, with_estimates

from ..checks import cases


def test_a_guess_is_log_normal_around_the_truth_with_the_spread_that_is_stated() -> None:
    trace = synth("poisson", 1.0, lengths="fixed:10,1000", num_requests=20_000)
    errors = np.log(with_estimates(trace, 0).expected / trace.output_length)
    assert abs(errors.mean()) < 4 * SPREAD / math.sqrt(20_000)
    assert errors.std() == pytest.approx(SPREAD, rel=0.02)
    assert (abs(errors) < SPREAD).mean() == pytest.approx(0.683, abs=0.01)


def test_a_request_is_estimated_alike_whatever_the_rate_and_however_many_follow_it() -> None:
    whole = World("azure-conv", num_requests=50).requests()
    fewer = World("azure-conv", num_requests=20, rate=9.0).requests()
    assert whole.expected[:20].tolist() == fewer.expected.tolist()
    assert (whole.expected != World("azure-conv", num_requests=50, seed=1).requests().expected).mean() > 0.9


def test_a_limit_or_an_estimate_of_the_trace_is_taken_as_it_is() -> None:
    rows = np.full(3, 40)
    extras = {"max_tokens": [64, None, 50], "estimated_length": [None, 33, 90]}
    again = load(write(Trace("t", np.arange(3.0), rows, rows, extras), "t.jsonl"))
    assert with_estimates(again, 0).expected.tolist() == [64, 33, 50]  # no answer is longer than its limit
    assert [again.request(i).expected for i in range(3)] == [64, 33, 90]


@cases("arrival", "trace", "poisson")
def test_a_search_s_replications_are_estimated_too(arrival: str) -> None:
    _, requests = replication(World("azure-conv", arrival=arrival), 0, 100, 10)
    assert 0.3 < np.log(requests.expected / requests.output_length).std() < 0.7
