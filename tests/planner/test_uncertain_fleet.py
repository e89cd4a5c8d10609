"""A plan's fleet under drawn profiles: intervals hold the luck of a replay and what the profile does not know."""

from dataclasses import replace
from typing import Any

import pytest

from dsim.planner.backend import Pool
from dsim.planner.plan_result import Fleet, Planned
from dsim.planner.quality import Quality
from dsim.planner.uncertain_fleet import COST, REPLICAS, rivals, uncertain_fleets
from dsim.profiler.profile import Fit, load
from dsim.profiler.uncertainty import MEMORY
from dsim.report.ensemble_page import decided
from dsim.results.spread import Spread, Uncertain
from dsim.results.world import World

from ..report.fabricate import setup
from ..worlds import SECOND

ESTIMATED = replace(load("a100-sdar-8b"), name="second", latency=SECOND, family="autoregressive")
# Measured, with no error of which anything is known: nothing is left to draw but the luck.
KNOWN = replace(ESTIMATED, origin="measured", commits=(), fit=Fit((1.0, 8192.0), 0.0, {}, None))
# One step of a second a request: a replica of one row serves 1 req/s.
QUEUE = World(
    "azure-conv", arrival="poisson", lengths="fixed:1,1", slos=("ttft=10s", "p90:e2el=8s"), policy="ar,max_batch=1",
    rate=1.4, replicas=2, profile_object=ESTIMATED,
)  # fmt: skip
MISSES = "requests that miss ttft=10s (%)"


def drawn(*fleets: World, num: int = 6) -> Uncertain:
    named = {f"2 replicas on {world.file_profile().name}": world for world in fleets}
    weights = [2.0 * world.file_profile().device.count for world in fleets]
    return uncertain_fleets(named, weights, num, attainment=0.9, num_requests=200, spare=1, pool=Pool(jobs=1))


def test_a_fleet_survives_the_draws_that_leave_its_slos_met() -> None:
    ample = drawn(replace(QUEUE, rate=0.5))
    assert (ample.survives, ample.answer) == (1.0, "2 replicas on second meet the SLOs at 0.5 req/s")
    [values] = ample.intervals.values()
    assert list(values) == ["p90:e2el (ms)", MISSES, REPLICAS, COST]
    # A step is a second, and waiting for one is rare at a quarter of what the fleet serves.
    assert 1000 <= values["p90:e2el (ms)"].value < 3000
    assert values[MISSES].value == 0.0
    assert (values[REPLICAS], values[COST]) == (Spread(2.0, 1.0, 1.0), Spread(6.0, 4.0, 4.0))  # with the spare one
    few = drawn(replace(QUEUE, rate=3.0))
    assert few.survives == 0.0
    assert next(iter(few.intervals.values()))[REPLICAS].low >= 3.0
    none = drawn(replace(QUEUE, rate=30.0))
    assert next(iter(none.intervals.values()))[REPLICAS] == Spread(2.0, None, None)  # beyond four times as many


def test_what_two_fleets_share_cancels_in_the_ratio_of_their_costs() -> None:
    # Alike but for the number of GPUs, or for the card.
    wide = replace(ESTIMATED, fit=replace(ESTIMATED.fit, relative_uncertainty=0.5))
    shared = replace(wide, name="shared", device=replace(wide.device, count=2))
    card = replace(wide, name="card", device=replace(wide.device, name="card"))
    found = drawn(*(replace(QUEUE, profile_object=profile) for profile in (wide, shared, card)))
    assert found.best == "2 replicas on second"
    alike, apart = found.ratios.values()
    assert alike == {COST: Spread(0.5, 0.5, 0.5)}
    assert apart[COST].value == 1.0
    assert apart[COST].low < apart[COST].high
    assert list(found.effects) == [found.best]
    said = decided("", found)
    assert said.startswith(f"The {COST} of {found.best} is 0.50 times (0.50 to 0.50) that of 2 replicas on shared and ")


def test_the_rivals_are_the_runner_up_and_the_cheapest_fleet_of_another_gpu() -> None:
    def row(policy: str, device: str, replicas: int | None, **more: Any) -> Fleet:
        names = {"policy": policy, "place": "", "profile": device, "device": device, "model": "", "implementation": ""}
        values = {"estimated": True, "quality": Quality(None, ""), "gpus_per_replica": 1, "price": 2.0}
        return Fleet(**names, **values, replicas=replicas, **more)  # type: ignore[arg-type]

    best, second = row("a", "H100", 2), row("b", "H100", 3)
    about, least = row("c", "A100", None, about=9), row("d", "B200", None, least=5)
    left_out = (row("e", "H20", None), about, least)
    planned = Planned(
        rate=1.0, ranking=(best, second), left_out=left_out, tied=(), risks=(), criteria=(), bounds={},
        share_criteria=(), plan_toml="", priced=True, num_replays=0, num_requests=0, block=0, setup=setup(),
    )  # fmt: skip
    assert list(rivals(planned)) == ["2 replicas of a", "3 replicas of b", "5 replicas of d"]
    assert list(rivals(replace(planned, ranking=(best,)))) == ["2 replicas of a", "5 replicas of d"]


def test_the_intervals_hold_the_profile_s_doubt_and_the_luck() -> None:
    doubt = drawn(QUEUE, num=8)
    # The world says what else could be drawn: its front end, and that answers end at an EOS.
    luck = drawn(replace(QUEUE, profile_object=KNOWN, frontend=0.0, eos=True), num=8)
    [causes], [none] = doubt.effects.values(), luck.effects.values()
    assert {cause.cause for cause in causes} >= {MEMORY}
    assert none == ()  # nothing of the profile is drawn
    wide, narrow = (next(iter(found.intervals.values()))["p90:e2el (ms)"] for found in (doubt, luck))
    assert narrow.low < narrow.high
    assert wide.high - wide.low > narrow.high - narrow.low
    assert wide.value == pytest.approx(narrow.value)  # as predicted: the first replication, no draw
