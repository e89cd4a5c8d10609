"""The fewest replicas of each pool: the cheapest fleet that surely meets the SLOs at a rate.

A fleet that is too small rules out all with no more replicas in any pool. Short replays find each pool's fewest
replicas while the others have plenty; larger fleets are then tried by cost, with a race's replications (race.py).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..results.world import World
from ..sim.fleet import PoolSpec
from .backend import Pool
from .capacity import MAX_REPLICAS_TRIED, PILOT, Capacity, CapacitySearch, Run, at_rate, check_rate
from .memo import Memo
from .race import FIRST, LIMIT, MOST, verdict
from .replicate import Reading

PILOT_PER_REPLICA = 100  # requests of a short replay

Counts = tuple[int, ...]  # replicas, by pool


def fewest_of_each_pool(
    world: World, rate: float, *, max_replicas: int = MAX_REPLICAS_TRIED, jobs: int | None = None,
    ray: str | None = None, **options: Any,
) -> Capacity:  # fmt: skip
    """The fewest GPUs in the world's pools with a capacity of at least `rate` (req/s), by its interval's low end.

    The world's counts are a first guess. jobs, ray: see `Pool`. options: of Run.
    """
    check_rate(rate, max_replicas)
    options = {"memo": Memo(), **options}
    with Pool(jobs, ray) as pool:
        gpus = [float(setting.profile.device.count) for _, setting in world.each_pool()]
        run_of = cache(lambda counts: Run(with_counts(world, counts), pool, target=rate, **options))
        fleets = FleetSearch(run_of, gpus, rate, max_replicas)
        counts = fleets.cheapest(tuple(min(spec.count, max_replicas) for spec in PoolSpec.parse_all(world.pools)))
        return run_of(counts).finish()


def with_counts(world: World, counts: Sequence[int]) -> World:
    specs = PoolSpec.parse_all(world.pools)
    return replace(world, pools=tuple(str(replace(s, count=n)) for s, n in zip(specs, counts, strict=True)))


def severity_of(reading: Reading) -> float:
    """Worst log distance beyond a bound; LIMIT if the queue grows without end."""
    return LIMIT if not reading.stable else float(np.clip(max(reading.severities), -LIMIT, LIMIT))


@dataclass
class FleetSearch:
    """The cheapest counts, at most `limit` per pool, whose runs meet the SLOs at a rate. prices: of a replica, by pool.

    `run_of` returns the same run for the same counts.
    """

    run_of: Callable[[Counts], Run]
    prices: Sequence[float]
    rate: float
    limit: int
    readings: dict[Counts, list[Reading]] = field(default_factory=dict)  # of fleets raced
    _short: dict[Counts, bool] = field(default_factory=dict)
    _too_few: list[Counts] = field(default_factory=list)  # too small, or of a capacity that is not surely enough

    def cheapest(self, start: Counts) -> Counts:
        """start: a guess. DsimError if `limit` per pool are too few."""
        ample = start
        while not self._meets_shortly(ample):
            if min(ample) == self.limit:
                raise DsimError(
                    f"{self.limit} replicas of each pool do not meet the SLOs at {self.rate:g} req/s, expected fewer "
                    "to do: allow more, or relax the SLOs"
                )
            ample = tuple(min(2 * n, self.limit) for n in ample)
        least = tuple(self._fewest(ample, k) for k in range(len(ample)))
        counts = next(filter(self._is_enough, self._by_cost(least)), None)
        if counts is None:
            raise DsimError(f"no fleet of up to {self.limit} replicas of a pool surely meets the SLOs")
        # Short replays may have misjudged the fewest.
        while True:
            smaller = (_fewer(counts, k) for k, num in enumerate(counts) if num > 1)
            enough = next(filter(self._is_enough, smaller), None)
            if enough is None:
                return counts
            counts = enough

    def _is_enough(self, counts: Counts) -> bool:
        if counts in self._too_few:
            return False
        if self._meets(counts) and self.run_of(counts).start().low >= self.rate:
            return True
        self._too_few.append(counts)
        return False

    def _cost(self, counts: Counts) -> float:
        return sum(n * price for n, price in zip(counts, self.prices, strict=True))

    def _by_cost(self, least: Counts) -> Iterator[Counts]:
        """Possible fleets by cost, then by replicas of the first pool."""
        heap, pushed = [(self._cost(least), least)], {least}
        while heap:
            _, counts = heapq.heappop(heap)
            if not any(all(n <= m for n, m in zip(counts, few, strict=True)) for few in self._too_few):
                yield counts
            for k in range(len(counts)):
                larger = _fewer(counts, k, -1)
                if larger not in pushed and max(larger) <= self.limit:
                    pushed.add(larger)
                    heapq.heappush(heap, (self._cost(larger), larger))

    def _fewest(self, ample: Counts, k: int) -> int:
        """A pool's fewest replicas by short replays, others having plenty."""
        low, high = 0, ample[k]
        while high - low > 1:
            middle = (low + high) // 2
            if self._meets_shortly(_fewer(ample, k, ample[k] - middle)):
                high = middle
            else:
                low = middle
        return high

    def _replay(self, counts: Counts, search: CapacitySearch, indices: Iterable[int]) -> Iterator[Reading]:
        for answer in self.run_of(counts).answers(at_rate, [(self.rate, index) for index in indices], search):
            yield Reading(**answer)

    def _meets_shortly(self, counts: Counts) -> bool:
        """Whether a short replay meets the SLOs."""
        if counts not in self._short:
            search = self.run_of(counts).search
            num = max(search.shortened().num_requests, PILOT_PER_REPLICA * sum(counts))
            short = search.shortened(min(search.num_requests, num))
            [reading] = self._replay(counts, short, [PILOT])
            self._short[counts] = reading.holds
        return self._short[counts]

    def _meets(self, counts: Counts) -> bool:
        search, readings, num = self.run_of(counts).search, self.readings.setdefault(counts, []), 1
        while True:
            readings.extend(self._replay(counts, search, range(len(readings), num)))
            meets = verdict([severity_of(reading) for reading in readings], MOST)
            if meets is not None:
                return meets
            num = max(FIRST, len(readings) + 1)


def _fewer(counts: Counts, k: int, num: int = 1) -> Counts:
    """With `num` replicas less of pool k."""
    return (*counts[:k], counts[k] - num, *counts[k + 1 :])
