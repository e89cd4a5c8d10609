"""A plan's fleet under drawn profiles: intervals hold the luck of a replay and what the profile does not know."""

import dataclasses
from dataclasses import replace

import pytest

from dsim.planner.backend import Pool
from dsim.planner.plan_replays import Posed
from dsim.planner.uncertain_fleet import uncertain_fleet
from dsim.profiler.profile import Fit, load
from dsim.profiler.uncertainty import DEVICE

from ..worlds import SECOND

PROFILE = load("a100-sdar-8b")
ESTIMATED = dataclasses.replace(PROFILE, name="second", latency=SECOND, family="autoregressive")
# Measured, with no error of which anything is known: nothing is left to draw but the luck.
KNOWN = dataclasses.replace(ESTIMATED, origin="measured", commits=(), fit=Fit((1.0, 8192.0), 0.0, {}, None))
# One step of a second a request: a replica of one row serves 1 req/s.
QUEUE = Posed(
    "azure-conv", arrival="poisson", lengths="fixed:1,1", slos=("ttft=10s", "p90:e2el=8s"), policy="ar,max_batch=1",
    rate=1.4, replicas=2, given_profile=ESTIMATED,
)  # fmt: skip
MISSES = "requests that miss ttft=10s (%)"


def test_a_fleet_survives_the_draws_that_leave_its_slos_met() -> None:
    ample = uncertain_fleet(replace(QUEUE, rate=0.5), 6, attainment=0.9, num_requests=200, pool=Pool(jobs=1))
    assert ample.survives == 1.0
    assert ample.answer == "2 replicas of ar,max_batch=1 meet the SLOs at 0.5 req/s"
    none = uncertain_fleet(replace(QUEUE, rate=3.0), 6, attainment=0.9, num_requests=200, pool=Pool(jobs=1))
    assert none.survives == 0.0
    [values] = ample.intervals.values()
    assert list(values) == ["p90:e2el (ms)", MISSES]
    # A step is a second, and waiting for one is rare at a quarter of what the fleet serves.
    assert 1000 <= values["p90:e2el (ms)"].value < 3000
    assert values[MISSES].value == 0.0


def test_the_intervals_hold_the_profile_s_doubt_and_the_luck() -> None:
    doubt = uncertain_fleet(QUEUE, 8, attainment=0.9, num_requests=200, pool=Pool(jobs=1))
    # The scenario says what else could be drawn: its front end, and that answers end at an EOS.
    known = replace(QUEUE, given_profile=KNOWN, frontend=0.0, eos=True)
    luck = uncertain_fleet(known, 8, attainment=0.9, num_requests=200, pool=Pool(jobs=1))
    [causes], [none] = doubt.effects.values(), luck.effects.values()
    assert {cause.cause for cause in causes} >= {DEVICE}
    assert none == ()  # nothing of the profile is drawn
    wide, narrow = (next(iter(found.intervals.values()))["p90:e2el (ms)"] for found in (doubt, luck))
    assert narrow.low < narrow.high
    assert wide.high - wide.low > narrow.high - narrow.low
    assert wide.value == pytest.approx(narrow.value)  # as predicted: the first replication, no draw
