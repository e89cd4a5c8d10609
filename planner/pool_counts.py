"""The fewest replicas of each pool: the cheapest fleet that surely meets the SLOs at a rate.

A fleet that is too small rules out all with no more replicas in any pool. Short replays find each pool's fewest
replicas while the others have plenty; larger fleets are then tried by cost, with a race's replications (race.py).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..engine.errors import DsimError
from ..results.scenario import Scenario
from ..sim.fleet import PoolSpec
from .backend import Pool
from .capacity import PILOT, CapacitySearch
from .memo import Memo
from .race import FIRST, LIMIT, MOST, verdict
from .replicate import Reading

PILOT_PER_REPLICA = 100  # requests of a short replay

Counts = tuple[int, ...]  # replicas, by pool
Progress = Callable[[Counts, int], object]  # fleet, replays done


@dataclass(frozen=True)
class PoolCounts:
    counts: Counts
    fewer: dict[Counts, tuple[Reading, ...]]  # fleets one replica smaller
    num_replays: int


def with_counts(scenario: Scenario, counts: Sequence[int]) -> Scenario:
    specs = PoolSpec.parse_all(scenario.pools)
    return replace(scenario, pools=tuple(str(replace(s, count=n)) for s, n in zip(specs, counts, strict=True)))


def severity_of(reading: Reading) -> float:
    """Worst log distance beyond a bound; LIMIT if the queue grows without end."""
    return LIMIT if not reading.stable else float(np.clip(max(reading.severities), -LIMIT, LIMIT))


def fewest_of_pools(
    search_of: Callable[[Counts], CapacitySearch], start: Counts, prices: Sequence[float], rate: float, most: int,
    pool: Pool, memo: Memo, *, surely: Callable[[Counts], bool] = lambda counts: True,
    progress: Progress = lambda counts, replays: None,
) -> PoolCounts:  # fmt: skip
    """The cheapest counts, at most `most` per pool, that meet the SLOs at a rate.

    start: a guess. prices: of a replica, by pool. surely: a last test. DsimError if `most` per pool are too few.
    """
    return _Search(search_of, prices, rate, most, pool, memo, progress)(start, surely)


class _Search:
    def __init__(
        self, search_of: Callable[[Counts], CapacitySearch], prices: Sequence[float], rate: float, most: int,
        pool: Pool, memo: Memo, progress: Progress,
    ) -> None:  # fmt: skip
        self._search_of, self._prices, self._rate, self._most = search_of, prices, rate, most
        self._pool, self._memo, self._progress = pool, memo, progress
        self._short: dict[Counts, bool] = {}
        self._readings: dict[Counts, list[Reading]] = {}
        self._too_few: list[Counts] = []  # too small, or refused by `surely`
        self._num_replays = 0

    def __call__(self, start: Counts, surely: Callable[[Counts], bool]) -> PoolCounts:
        ample = start
        while not self._about(ample):
            if min(ample) == self._most:
                raise DsimError(
                    f"{self._most} replicas of each pool do not meet the SLOs at {self._rate:g} req/s, expected fewer "
                    "to do: allow more, or relax the SLOs"
                )
            ample = tuple(min(2 * n, self._most) for n in ample)
        least = tuple(self._fewest(ample, k) for k in range(len(ample)))
        counts = next((one for one in self._by_cost(least) if self._is(one, surely)), None)
        if counts is None:
            raise DsimError(f"no fleet of up to {self._most} replicas of a pool surely meets the SLOs")
        # Short replays may have misjudged the fewest.
        while (other := next((one for one in _one_less(counts) if self._is(one, surely)), None)) is not None:
            counts = other
        fewer = {one: tuple(self._readings[one]) for one in _one_less(counts)}
        return PoolCounts(counts, fewer, self._num_replays)

    def _is(self, counts: Counts, surely: Callable[[Counts], bool]) -> bool:
        if counts in self._too_few:
            return False
        if self._enough(counts) and surely(counts):
            return True
        self._too_few.append(counts)
        return False

    def _cost(self, counts: Counts) -> float:
        return sum(n * price for n, price in zip(counts, self._prices, strict=True))

    def _by_cost(self, least: Counts) -> Iterator[Counts]:
        """Possible fleets by cost, then by replicas of the first pool."""
        heap, seen = [(self._cost(least), least)], {least}
        while heap:
            _, counts = heapq.heappop(heap)
            if not any(all(n <= m for n, m in zip(counts, few, strict=True)) for few in self._too_few):
                yield counts
            for k in range(len(counts)):
                more = tuple(n + (i == k) for i, n in enumerate(counts))
                if more not in seen and max(more) <= self._most:
                    seen.add(more)
                    heapq.heappush(heap, (self._cost(more), more))

    def _fewest(self, ample: Counts, k: int) -> int:
        """A pool's fewest replicas by short replays, others having plenty."""
        low, high = 0, ample[k]
        while high - low > 1:
            middle = (low + high) // 2
            if self._about(tuple(middle if i == k else n for i, n in enumerate(ample))):
                high = middle
            else:
                low = middle
        return high

    def _about(self, counts: Counts) -> bool:
        """Whether a short replay meets the SLOs."""
        if counts not in self._short:
            self._progress(counts, self._num_replays)
            own = self._search_of(counts)
            fewer = max(own.shortened().num_requests, PILOT_PER_REPLICA * sum(counts))
            short = own.shortened(min(own.num_requests, fewer))
            [reading] = self._memo.map(self._pool, partial(_read, short, self._rate), [PILOT])
            self._num_replays += 1
            self._short[counts] = reading.holds
        return self._short[counts]

    def _enough(self, counts: Counts) -> bool:
        self._replay(counts, 1)
        while (said := verdict([severity_of(reading) for reading in self._readings[counts]], MOST)) is None:
            self._replay(counts, max(FIRST, len(self._readings[counts]) + 1))
        return said

    def _replay(self, counts: Counts, many: int) -> None:
        """Replay up to `many` replications."""
        own = self._readings.setdefault(counts, [])
        self._progress(counts, self._num_replays)
        new = range(len(own), many)
        for reading in self._memo.map(self._pool, partial(_read, self._search_of(counts), self._rate), new):
            own.append(reading)
            self._num_replays += 1
            self._progress(counts, self._num_replays)


def _one_less(counts: Counts) -> list[Counts]:
    """Fleets with one replica less of a pool that has several."""
    return [tuple(n - (i == k) for i, n in enumerate(counts)) for k, many in enumerate(counts) if many > 1]


def _read(search: CapacitySearch, rate: float, memo: Memo, index: int) -> Reading:
    return search.requests(index, memo)(rate)
