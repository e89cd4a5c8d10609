"""The page of a capacity: what its curve's few replications say beside the interval of all."""

from dataclasses import replace

from dsim.planner.capacity import AtBound, Capacity, Point
from dsim.planner.replicate import Interval
from dsim.report.capacity_page import _cliff, _verdict

from ..checks import cases
from .fabricate import setup

NAME = "99% meet ttft=2s"
CAPACITY = Capacity(
    rate=Interval(1.97, 1.9, 2.05), replicas=1, binding_slo=NAME, limited_by="compute", curve=(), num_replays=9,
    policy="optimus", setup=setup(), binding_share=1.0, limiting_setting="",
    shares={"decode": 1.0}, bounds={NAME: 0.99}, share_criteria=(NAME,), replications=(1.9, 2.05), num_requests=100,
    block=25, precision=0.02, confidence=0.95, rejected=0.0, latency_ms={"ttft": None},
)  # fmt: skip


@cases(
    "rate holds stable verdict",
    (1.4, True, True, "meets all"), (1.8, False, True, "missed in its replays"),
    (1.8, False, False, "missed in its replays"),
    (1.95, False, True, "at the limit"), (2.2, False, True, "violated"), (2.2, False, False, "unstable"),
    (2.2, True, True, "met in its replays"),
)  # fmt: skip
def test_a_rates_verdict_never_contradicts_the_interval(rate: float, holds: bool, stable: bool, verdict: str) -> None:
    assert _verdict(CAPACITY, Point(rate, {NAME: 0.98}, stable, holds)) == verdict


def test_a_bound_whose_tenth_moves_the_capacity_by_over_a_quarter_stands_at_a_cliff() -> None:
    bounds = (AtBound("p90:tpot_chunk=45ms", 0.37, "below"), AtBound("p90:tpot_chunk=55ms", 1.6, ""))
    text = "below 0.370 req/s at p90:tpot_chunk=45ms, 1.60 req/s at p90:tpot_chunk=55ms"
    assert _cliff(replace(CAPACITY, other_bounds=bounds)) == text
    assert _cliff(replace(CAPACITY, other_bounds=bounds[1:])) == ""
