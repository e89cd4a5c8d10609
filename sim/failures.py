"""Failures: replicas that die and return, slow replicas, a lost zone."""

import heapq
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from ..engine.errors import PolicyError, quoted
from .clock import DECISION, Clock

REQUESTS = ("retry", "lost")  # a dead replica's: sent again from the start, or cancelled
_PURPOSE = 0xFA11  # key of the draws
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
# Fields of each kind, by the field that names it: required, then optional ones.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mtbf": (("repair",), ("pool", "requests")),
    "replica": (("at", "for"), ("requests",)),
    "zone": (("zones", "at", "for"), ("requests",)),
    "slow": (("share",), ("at", "for", "pool")),
}
_EXAMPLES = "mtbf=6h,repair=10m or at=30m,replica=3,for=10m or zone=2,zones=3,at=30m,for=20m or slow=2,share=0.1"


@dataclass(frozen=True)
class Failure:
    """A cause of failures. A replica that returns gets its old place, from 0 on."""

    kind: str  # mtbf, replica, zone or slow
    mtbf: float = math.inf  # s, mean of an exponential time until it dies
    repair: float = 0.0  # s down before it starts again
    at: float = 0.0  # s, begin of the outage or slow stretch
    length: float = math.inf  # s (`for`)
    replica: int = 0  # place
    zone: int = 1  # lost, from 1
    zones: int = 1  # replicas are dealt to them in turn
    slow: float = 1.0  # factor on each step's time
    share: float = 0.0  # probability that a replica is slow
    pool: str = ""  # empty: all
    requests: str = "retry"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `field=value,...`, or raise PolicyError."""
        asker = f"failure {quoted(text)}"
        found: dict[str, str] = {}
        for item in text.split(","):
            name, equals, value = item.partition("=")
            if not equals or not value:
                raise PolicyError(f"{asker}: {quoted(item)} is no field=value, expected such as {_EXAMPLES}")
            if name in found:
                raise PolicyError(f"{asker}: {name} is given twice, as {quoted(found[name])} and {quoted(value)}")
            found[name] = value
        kinds = [kind for kind in _KINDS if kind in found]
        if len(kinds) != 1:
            given = " and ".join(kinds) or "none of them"
            raise PolicyError(f"{asker}: {given} is given, expected one of {', '.join(_KINDS)}")
        kind = kinds[0]
        needs, may = _KINDS[kind]
        known = (kind, *needs, *may)
        for name in found:
            if name not in known:
                raise PolicyError(f"{asker}: {quoted(name)} is no field of it, expected {', '.join(known)}")
        for name in needs:
            if name not in found:
                raise PolicyError(f"{asker}: {name} is missing, expected {', '.join((kind, *needs))}")
        return cls(kind, **{_FIELDS.get(n, n): _value(n, v, asker) for n, v in found.items()})._checked(asker)  # type: ignore[arg-type]

    def _checked(self, asker: str) -> Self:
        if self.zone > self.zones:
            raise PolicyError(f"{asker}: zone is {self.zone} and zones is {self.zones}, expected a zone of them")
        if self.kind == "slow" and math.isfinite(self.at + self.length) != bool(self.at or self.length < math.inf):
            raise PolicyError(f"{asker}: at is {self.at:g} s and for is missing, expected both or none")
        return self

    def hits(self, place: int, pool: str) -> bool:
        """Whether it may affect the replica at a place."""
        if self.kind == "replica":
            return place == self.replica
        if self.kind == "zone":
            return place % self.zones == self.zone - 1
        return self.pool in ("", pool)


_FIELDS = {"for": "length"}
_TIMES = ("mtbf", "repair", "at", "for")
_LEAST = {"replica": 0, "zone": 1, "zones": 1}


def _value(name: str, text: str, asker: str) -> float | int | str:
    """A field's value; PolicyError if invalid."""
    if name == "requests":
        if text not in REQUESTS:
            raise PolicyError(f"{asker}: requests is {quoted(text)}, expected one of {', '.join(REQUESTS)}")
        return text
    if name == "pool":
        return text
    if name in _LEAST:
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < _LEAST[name]:
            raise PolicyError(f"{asker}: {name} is {quoted(text)}, expected a whole number of at least {_LEAST[name]}")
        return int(text)
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)(ms|s|m|h|d)?" if name in _TIMES else r"([0-9.]+)()", text)
    try:
        value = float(found[1]) * _SECONDS[found[2] or ""] if found else math.nan
    except ValueError:
        value = math.nan
    if name in _TIMES:
        positive = name in ("mtbf", "for")
        if not (0 <= value < math.inf and (value > 0 or not positive)):
            wanted = "a time above 0" if positive else "a time of at least 0"
            raise PolicyError(f"{asker}: {name} is {quoted(text)}, expected {wanted}, such as 90s, 10m or 6h")
    elif name == "share" and not 0 < value <= 1:
        raise PolicyError(f"{asker}: share is {quoted(text)}, expected above 0 and at most 1")
    elif name == "slow" and not (0 < value < math.inf):
        raise PolicyError(f"{asker}: slow is {quoted(text)}, expected a factor above 0")
    return value


class Outage(NamedTuple):
    """A replica's downtime."""

    start: float  # s
    end: float  # s, when the place took requests again; infinity: not in the run
    pool: str
    place: int
    replica: int  # its number in the journal


class Failed(NamedTuple):
    """Effects of failures on a run."""

    outages: tuple[Outage, ...] = ()
    retried: int = 0  # resent requests, each time counted
    lost: int = 0  # requests


class Failing:
    """Failures during a run: when replicas die, how long places are down, how slow each is.

    die: called with places of replicas that die now, and whether their requests are lost. pace: called when the factor
    of a running replica may have changed.
    """

    def __init__(
        self, env: Clock, failures: Sequence[Failure], seed: int, die: Callable[[list[int], bool], None],
        pace: Callable[[], None],
    ) -> None:  # fmt: skip
        self._env, self._failures, self._seed = env, tuple(failures), seed
        self._die, self._pace = die, pace
        self._times: list[float] = []  # a heap of next events
        self._pools: dict[int, str] = {}  # by place, of running replicas
        self._until: dict[int, float] = {}  # s, by place, ends of outages
        self._lives: dict[int, int] = {}  # by place, how often a replica came up
        for failure in self._failures:
            if failure.kind in ("replica", "zone"):
                self._call(failure.at, lambda failure=failure: self._strike(failure))  # type: ignore[misc]
            elif failure.kind == "slow" and failure.length < math.inf:
                for time in (failure.at, failure.at + failure.length):
                    self._call(time, pace)

    @property
    def next_time(self) -> float:
        """When a failure may next affect a replica (s), after now: a step sees its moment's failures."""
        while self._times and self._times[0] <= self._env.now:
            heapq.heappop(self._times)
        return self._times[0] if self._times else math.inf

    def expect(self, time: float) -> None:
        """Note that a replica may come up then, and die soon after."""
        heapq.heappush(self._times, time)

    def up(self, place: int, pool: str) -> None:
        """Note that a place's replica takes requests from now on."""
        life = self._lives[place] = self._lives.get(place, 0) + 1
        self._pools[place] = pool
        for number, failure in enumerate(self._failures):
            if failure.kind == "mtbf" and failure.hits(place, pool):
                random = np.random.default_rng([self._seed, _PURPOSE, number, place, life])
                self._call(
                    self._env.now + random.exponential(failure.mtbf),
                    lambda failure=failure: self._wear_out(failure, place, life),  # type: ignore[misc]
                )

    def gone(self, place: int) -> None:
        """Note that a place has no replica."""
        self._pools.pop(place, None)

    def down_until(self, place: int, pool: str) -> float:
        """End of a place's outages (s); in the past if none."""
        now, found = self._env.now, [self._until.get(place, 0.0)]
        for failure in self._failures:
            end = failure.at + failure.length
            if failure.kind == "zone" and failure.at <= now < end and failure.hits(place, pool):
                found.append(end)
        return max(found)

    def factor(self, place: int, pool: str) -> float:
        """Factor on the time of a step that begins now on a place's replica."""
        factor = 1.0
        for number, failure in enumerate(self._failures):
            begun = failure.at <= self._env.now < failure.at + failure.length
            if failure.kind == "slow" and begun and failure.hits(place, pool):
                random = np.random.default_rng([self._seed, _PURPOSE, number, place])
                factor *= failure.slow if random.random() < failure.share else 1.0
        return factor

    def _call(self, time: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._times, time)
        self._env.call(time, then, DECISION)

    def _wear_out(self, failure: Failure, place: int, life: int) -> None:
        if self._lives[place] == life and place in self._pools:
            self._lose([place], self._env.now + failure.repair, failure)

    def _strike(self, failure: Failure) -> None:
        end = failure.at + failure.length
        if failure.kind == "replica":
            self._lose([failure.replica], end, failure)
        else:
            known = sorted(self._pools.keys() | self._until.keys())
            self._lose([place for place in known if failure.hits(place, "")], end, failure)

    def _lose(self, places: Sequence[int], end: float, failure: Failure) -> None:
        self.expect(end)
        for place in places:
            self._until[place] = max(end, self._until.get(place, 0.0))
        self._die([place for place in places if place in self._pools], failure.requests == "lost")
