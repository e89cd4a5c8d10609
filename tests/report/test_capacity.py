"""The page of a capacity: what its curve's few replications say beside the interval of all."""

from typing import Any

import pytest

from dsim.report.capacity import _cliff, _verdict


@pytest.mark.parametrize(
    ("rate", "holds", "stable", "said"),
    [
        (1.4, True, True, "meets all"), (1.8, False, True, "missed in its replays"),
        (1.8, False, False, "missed in its replays"),
        (1.95, False, True, "at the limit"), (2.2, False, True, "violated"), (2.2, False, False, "unstable"),
        (2.2, True, True, "met in its replays"),
    ],
)  # fmt: skip
def test_a_rates_verdict_never_contradicts_the_interval(rate: float, holds: bool, stable: bool, said: str) -> None:
    name = "99% meet ttft=2s"
    found: dict[str, Any] = {
        "rate": {"value": 1.97, "low": 1.9, "high": 2.05}, "bounds": {name: 0.99},
        "share_criteria": [name],
    }  # fmt: skip
    assert _verdict(found, {"rate": rate, "values": {name: 0.98}, "holds": holds, "stable": stable}) == said


def test_a_bound_whose_tenth_moves_the_capacity_by_over_a_quarter_stands_at_a_cliff() -> None:
    names = ("slo", "rate", "side")
    bounds = (("p90:tpot_chunk=45ms", 0.37, "below"), ("p90:tpot_chunk=55ms", 1.6, ""))
    others = [dict(zip(names, bound, strict=True)) for bound in bounds]
    found: dict[str, Any] = {"rate": {"value": 1.5}, "other_bounds": others}
    assert _cliff(found) == "below 0.370 req/s at p90:tpot_chunk=45ms, 1.60 req/s at p90:tpot_chunk=55ms"
    assert _cliff(found | {"other_bounds": others[1:]}) == ""
