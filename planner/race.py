"""A race of fleets: each candidate's fewest replicas that meet the SLOs, with replays only where they matter.

Candidates see the same replications in turn; a fleet is decided once its interval lies on one side of the SLOs (Maron
and Moore, 1994; F-Race, Birattari et al., 2002). Feasibility comes before cost (Andradottir and Kim, Fully sequential
procedures for comparing constrained systems via simulation, 2010): candidates that can be neither first nor second are
dropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .replicate import student

FIRST = 3  # replications before the first interval
MOST = 8  # replications of a fleet
CLEAR = math.log(2)  # severity of twice a bound or the allowed misses: one replay decides
LIMIT = math.log(1000)  # severity of an endlessly growing queue
NORMAL = 1.96  # standard deviations in half an interval
STRIDE = 1.5  # growth of steps away from the first guess


@dataclass(frozen=True)
class Entry:
    """A replay asked for by a race."""

    candidate: int
    replicas: int
    index: int  # replication


Severities = Callable[[Sequence[Entry]], Sequence[float]]  # of the worst SLO, or LIMIT


@dataclass(kw_only=True)
class Fewest:
    """Without a guess, steps grow by `stride` until one size is too small and one enough; then the range is halved."""

    limit: int  # replicas
    trial: int = 1  # to try next
    stride: float = 1.0
    low: int = 0  # most replicas that are too few, or not surely enough
    high: int | None = None  # fewest that are enough
    step: float = 1.0

    @property
    def replicas(self) -> int | None:
        """The answer; None if unknown, or above `limit`."""
        return self.high if self.high is not None and self.high - self.low == 1 else None

    @property
    def open(self) -> bool:
        """Whether sizes are left to try."""
        return self.replicas is None and self.low < self.limit

    def decide(self, enough: bool, guess: int | None = None) -> None:
        """Record whether `trial` is enough, and choose the next size; guess: of the answer."""
        if enough:
            self.high = self.trial
        else:
            self.low = self.trial
        if not self.open:
            return
        if guess is not None or self.high is None:
            highest = self.limit if self.high is None else self.high - 1
            self.trial = min(max(guess or 0, self.low + int(self.step)), highest)
        elif self.low == 0:
            self.trial = max(1, self.high - int(self.step))
        else:
            self.trial = (self.low + self.high) // 2
        self.step *= self.stride


@dataclass(kw_only=True)
class Lane(Fewest):
    candidate: int
    price: float  # of a replica, like each standby
    spare: int = 0  # standby replicas
    severities: dict[int, list[float]] = field(default_factory=dict)  # by replicas, then replication
    dropped: bool = False  # neither first nor second

    def cost(self, replicas: int) -> float:
        """With the spare replicas."""
        return self.price * (replicas + self.spare)

    @property
    def settled(self) -> list[float]:
        """Severities of `high` replicas."""
        return self.severities[self.high or 0]

    @property
    def open(self) -> bool:
        return not self.dropped and super().open


def race(
    prices: Sequence[float],
    starts: Sequence[int],
    limit: int,
    severities: Severities,
    *,
    drop: bool = True,
    spread: float | None = None,
    spare: int = 0,
) -> list[Lane]:
    """Each candidate's fewest replicas that meet the SLOs. prices: of a replica; starts: guesses.

    A fleet is enough if its severity's interval lies below 0, and too small if that is open after MOST
    replications. Only possible firsts and seconds get more than FIRST; drop: leave out the others. spread: known
    standard deviation between replications, with which one replay may decide. spare: standby replicas.
    """
    lanes = [
        Lane(candidate=i, price=price, trial=min(start, limit), limit=limit, stride=STRIDE, spare=spare)
        for i, (price, start) in enumerate(zip(prices, starts, strict=True))
    ]
    while True:
        costs = sorted(lane.cost(lane.high) for lane in lanes if lane.high is not None)
        bar = [*costs, math.inf, math.inf][1]  # the second cheapest that is known to be enough
        entries: list[Entry] = []
        for lane in lanes:
            while lane.open:
                replays = lane.severities.setdefault(lane.trial, [])
                matters = lane.cost(lane.trial) <= bar
                enough = verdict(replays, MOST if matters else FIRST, spread)
                if enough is None:
                    num = 1 if not replays else len(replays) + 1 if spread is not None else max(FIRST, len(replays) + 1)
                    entries += [Entry(lane.candidate, lane.trial, i) for i in range(len(replays), num)]
                    break
                lane.decide(enough)
                if drop and lane.cost(lane.low + 1) > bar:
                    lane.dropped = lane.replicas is None
        if not entries:
            return lanes
        for entry, severity in zip(entries, severities(entries), strict=True):
            lanes[entry.candidate].severities[entry.replicas].append(severity)


def verdict(severities: Sequence[float], limit: int, spread: float | None = None) -> bool | None:
    """Whether a fleet meets the SLOs; None: more replays are needed."""
    n = len(severities)
    if n and severities[0] >= CLEAR:
        return False
    if n < (FIRST if spread is None else 1):
        return None
    mean, half = float(np.mean(severities)), half_width(severities, spread)
    if mean + half <= 0:
        return True
    return False if mean - half > 0 or n >= limit else None


def half_width(severities: Sequence[float], spread: float | None = None) -> float:
    """Student's, or the normal one of a known spread if narrower."""
    half = student(np.array(severities)) if len(severities) >= FIRST else math.inf
    if spread is not None:
        half = min(half, NORMAL * spread / math.sqrt(len(severities)))
    return half


def best_of(severities: Sequence[Sequence[float]]) -> list[int]:
    """The fleet of least mean severity and those it does not surely beat, paired by common replications."""
    n = min(map(len, severities))
    values = [np.array(series[:n]) for series in severities]
    leader = min(range(len(values)), key=lambda i: float(values[i].mean()))
    gaps = [series - values[leader] for series in values]
    return [i for i, gap in enumerate(gaps) if i == leader or gap.mean() - student(gap) <= 0]
