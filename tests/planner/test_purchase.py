"""Growth, by a headroom that is known; and what spare replicas do to a race."""

import numpy as np
import pytest

from dsim.planner.plan_result import Fleet, Horizon, growth_of, parsed_growth
from dsim.planner.quality import Quality
from dsim.planner.race import Entry, race
from dsim.planner.replicate import Interval

from ..checks import cases, refused

FLEET = Fleet(
    policy="optimus", place="", profile="p", device="A100-80GB", model="SDAR-8B", implementation="i", estimated=True,
    quality=Quality(1.0, "published"), gpus_per_replica=1, price=None, replicas=4, headroom=Interval(0.2, 0.1, 0.3),
)  # fmt: skip


def test_a_fleet_lasts_until_compound_growth_has_used_its_headroom() -> None:
    found = growth_of(Horizon("10%/year"), FLEET)
    assert found.low == pytest.approx(1.0)  # 1.1 times as much after one year
    assert 1.1**found.high == pytest.approx(1.3)
    assert growth_of(Horizon("2 %/month"), FLEET).low == pytest.approx(np.log(1.1) / np.log(1.02) / 12)
    none = growth_of(Horizon("10%/week"), Fleet(**{**vars(FLEET), "headroom": Interval(-0.1, -0.2, 0.0)}))
    assert (none.low, none.high) == (0.0, 0.0)


def test_what_grows_is_paid_from_when_it_is_needed() -> None:
    horizon = Horizon("44%/year", 2.0)
    assert horizon.dates == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert horizon.mean([2, 2, 3, 3, 4]) == (2 + 2.5 + 3 + 3.5) / 4
    with refused("horizon is 11 years, expected above 0 and at most 10"):
        Horizon("44%/year", 11)


@cases("text", "30", "30%", "0%/year", "-5%/year", "30%/day", "1001%/year", "nan%/year", "30/year")
def test_a_growth_that_is_none_is_refused_with_what_was_expected(text: str) -> None:
    with refused(r"growth is .*, expected a percentage above 0 .* such as 30%/year"):
        parsed_growth(text)


def test_a_spare_is_charged_in_the_race_and_stays_out_of_what_is_judged() -> None:
    # By price alone the first is cheaper (4 x 2 against 1 x 9): with a spare of each it is not (10 against 18).
    seen: list[int] = []

    def severities(entries: list[Entry]) -> list[float]:
        seen.extend(entry.replicas for entry in entries)
        return [-1.0 if entry.replicas >= (4, 1)[entry.candidate] else 1.0 for entry in entries]

    plain = race((2.0, 9.0), (4, 1), 8, severities)  # type: ignore[arg-type]
    spared = race((2.0, 9.0), (4, 1), 8, severities, spare=1)  # type: ignore[arg-type]
    assert [lane.replicas for lane in plain] == [lane.replicas for lane in spared] == [4, 1]
    assert [lane.cost(lane.replicas or 0) for lane in plain] == [8.0, 9.0]
    assert [lane.cost(lane.replicas or 0) for lane in spared] == [10.0, 18.0]
    assert max(seen) == 4
