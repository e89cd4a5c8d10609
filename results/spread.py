"""Predictions under profiles drawn from a profile's uncertainty: intervals, and the causes that move them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spread:
    """A value with its interval. None: unknown, or infinite."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Effect:
    """A cause's effect: the metric at one standard deviation below and above."""

    cause: str
    why: str
    assumed: bool
    low: float
    high: float

    @property
    def swing(self) -> float:
        return abs(self.high - self.low)


@dataclass(frozen=True)
class Uncertain:
    """A prediction's intervals; `ratios` compare under the same draws, so that errors that both share cancel."""

    num: int
    level: float  # of the intervals
    metric: str  # decides; effects are on it
    higher: bool  # is better
    intervals: dict[str, dict[str, Spread]]  # by policy and metric
    effects: dict[str, tuple[Effect, ...]]  # by policy, largest first; infinite ones are left out
    answer: str = ""  # in words; empty: no recommendation
    survives: float | None = None  # share of draws
    best: str = ""  # the policy that `ratios` are of
    ratios: dict[str, dict[str, Spread]] = field(default_factory=dict)  # best over another policy: by it and metric
