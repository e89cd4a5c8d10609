"""A race of fleets: the fewest replicas of each candidate that meet the SLOs, with replays where the answer is open.

As in Maron and Moore (1994) and F-Race (Birattari et al., 2002), all candidates see the same replications in turn, and
a fleet is decided once its interval lies on one side of the SLOs. Feasibility comes first and cost second, as in
Andradottir and Kim (Fully sequential procedures for comparing constrained systems via simulation, 2010): a candidate
that can be neither first nor second is dropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .fewest import Fewest
from .replicate import student

FIRST = 3  # replications before an interval is looked at
MOST = 8  # replications of a fleet
CLEAR = math.log(2)  # severity: twice a bound, or twice the allowed misses, needs no second replay
LIMIT = math.log(1000)  # the severity if the queue grows without end
CONFIDENCE = 0.95
NORMAL = 1.96  # standard deviations of half such an interval
STRIDE = 1.5  # factor by which steps away from the first guess grow


@dataclass(frozen=True)
class Entry:
    """A replay that a race asks for."""

    candidate: int
    replicas: int
    index: int  # of the replication


Severities = Callable[[Sequence[Entry]], Sequence[float]]  # of the worst SLO in each replay; LIMIT: the queue grows


@dataclass(kw_only=True)
class Lane(Fewest):
    """A candidate in the race."""

    candidate: int
    price: float  # of a replica
    spare: int = 0  # standby replicas, which cost the same
    severities: dict[int, list[float]] = field(default_factory=dict)  # by replicas, in the order of replications
    dropped: bool = False  # it can be neither first nor second

    def cost(self, replicas: int) -> float:
        """The cost of a fleet of this size, with the spare replicas."""
        return self.price * (replicas + self.spare)

    @property
    def settled(self) -> list[float]:
        """The severities of the fleet of `high` replicas."""
        return self.severities[self.high or 0]

    @property
    def open(self) -> bool:
        """Whether there is anything left to find out."""
        return not self.dropped and super().open


def race(
    prices: Sequence[float],
    starts: Sequence[int],
    most: int,
    severities: Severities,
    *,
    drop: bool = True,
    spread: float | None = None,
    patience: int = MOST,
    spare: int = 0,
) -> list[Lane]:
    """For each candidate, find the fewest replicas that meet the SLOs. prices: of a replica; starts: first guesses.

    A fleet is enough if the interval of its severity lies below 0. It is too small if this is still open after
    `patience` replications. Only candidates that may be first or second get more than FIRST. drop: drop the others.
    spread: the known standard deviation between replications; with it one replay may decide. spare: standby replicas.
    """
    lanes = [
        Lane(candidate=i, price=price, at=min(start, most), most=most, stride=STRIDE, spare=spare)
        for i, (price, start) in enumerate(zip(prices, starts, strict=True))
    ]
    while True:
        bar = _second_price(lanes)
        entries: list[Entry] = []
        for lane in lanes:
            while lane.open:
                seen = lane.severities.setdefault(lane.at, [])
                matters = lane.cost(lane.at) <= bar
                said = verdict(seen, patience if matters else FIRST, spread)
                if said is None:
                    wanted = 1 if not seen else len(seen) + 1 if spread is not None else max(FIRST, len(seen) + 1)
                    entries += [Entry(lane.candidate, lane.at, i) for i in range(len(seen), wanted)]
                    break
                lane.decide(said)
                if drop and lane.cost(lane.low + 1) > bar:
                    lane.dropped = lane.replicas is None
        if not entries:
            return lanes
        for entry, severity in zip(entries, severities(entries), strict=True):
            lanes[entry.candidate].severities[entry.replicas].append(severity)


def verdict(severities: Sequence[float], most: int, spread: float | None = None) -> bool | None:
    """Whether a fleet meets the SLOs, by the severities of its replays; None if more replays are needed."""
    n = len(severities)
    if n and severities[0] >= CLEAR:
        return False
    if n < (FIRST if spread is None else 1):
        return None
    mean, half = float(np.mean(severities)), half_width(severities, spread)
    if mean + half <= 0:
        return True
    return False if mean - half > 0 or n >= most else None


def half_width(severities: Sequence[float], spread: float | None = None) -> float:
    """The half-width of the mean's interval: Student's, or the normal one of a known spread if it is narrower."""
    half = student(np.array(severities), CONFIDENCE) if len(severities) >= FIRST else math.inf
    return half if spread is None else min(half, NORMAL * spread / math.sqrt(len(severities)))


def best_of(severities: Sequence[Sequence[float]]) -> list[int]:
    """The fleet with the least mean severity, and the fleets that it does not surely beat.

    Fleets are paired by replication, over the replications that all of them have.
    """
    n = min(map(len, severities))
    values = [np.array(own[:n]) for own in severities]
    leader = min(range(len(values)), key=lambda i: float(values[i].mean()))
    behind = [own - values[leader] for own in values]
    return [i for i, gap in enumerate(behind) if i == leader or gap.mean() - student(gap, CONFIDENCE) <= 0]


def _second_price(lanes: Sequence[Lane]) -> float:
    """The cost of the second cheapest fleet that is known to be enough; infinite while fewer than two are known."""
    known = sorted(lane.cost(lane.high) for lane in lanes if lane.high is not None)
    return known[1] if len(known) > 1 else math.inf
