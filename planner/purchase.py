"""Growth of traffic, and the life of a plan's fleet."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.errors import DsimError
from .plan_result import Fleet, Growth

PERIODS = {"year": 1.0, "month": 12.0, "week": 365.25 / 7}  # in a year
MOST_GROWTH = 10.0  # each period
MOST_YEARS = 10.0
QUARTERS = 4  # of a horizon


@dataclass(frozen=True)
class Horizon:
    """Traffic that grows; each quarter buys the GPUs that it needs."""

    growth: str  # 30%/year, or per month or week; compound
    years: float = 1.0

    def __post_init__(self) -> None:
        parsed_growth(self.growth)
        if not 0 < self.years <= MOST_YEARS:
            raise DsimError(f"horizon is {self.years:g} years, expected above 0 and at most {MOST_YEARS:g}")

    @property
    def yearly(self) -> float:
        """Factor of the traffic."""
        share, per = parsed_growth(self.growth)
        return math.pow(1 + share, PERIODS[per])

    @property
    def dates(self) -> list[float]:
        """Today, each quarter of the horizon, and its end, in years."""
        return [self.years * k / QUARTERS for k in range(QUARTERS + 1)]

    def mean(self, replicas: Sequence[int]) -> float:
        """Paid on average, by the replicas that each date needs; between two dates the mean of both."""
        return sum((a + b) / 2 for a, b in itertools.pairwise(replicas)) / QUARTERS


def growth_of(horizon: Horizon, fleet: Fleet) -> Growth:
    """How long the fleet lasts."""
    share, per = parsed_growth(horizon.growth)
    room = fleet.headroom
    assert room is not None
    low, high = (math.log(1 + max(end, 0.0)) / math.log(horizon.yearly) for end in (room.low, room.high))
    return Growth(text=horizon.growth, share=share, per=per, low=low, high=high, horizon=horizon.years)


def parsed_growth(text: str) -> tuple[float, str]:
    """Share of the traffic, and period."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?%/({'|'.join(PERIODS)})", text.strip())
    share = 0.0 if match is None else float(match[1]) / 100
    if match is None or not 0 < share <= MOST_GROWTH:
        raise DsimError(
            f"growth is {text}, expected a percentage above 0 and up to {100 * MOST_GROWTH:g} for each "
            f"{', '.join(PERIODS)}, such as 30%/year".replace(", week", " or week")
        )
    return share, match[2]
