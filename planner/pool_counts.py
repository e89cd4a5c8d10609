"""A fleet's capacity or size; of pools, the fewest replicas of each: with one less it would not surely meet the SLOs.

Short replays find each pool's fewest replicas while the others have plenty; searches of the capacity then decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..results.world import World, replicas_of
from ..sim.pools import PoolSpec
from .backend import Pool
from .capacity import MAX_REPLICAS_TRIED, PILOT, Capacity, Run, at_rate, capacity, check_rate, fewest_replicas
from .memo import Memo
from .race import LIMIT
from .replicate import Reading

PILOT_PER_REPLICA = 100  # requests of a short replay

Counts = tuple[int, ...]  # replicas, by pool
Test = Callable[[Counts], bool]  # whether a fleet is enough


def sized(world: World, rate: float | None, replicas: int | None, max_replicas: int | None, **options: Any) -> Capacity:
    """A fleet's capacity, or for a rate (req/s) the fewest replicas.

    replicas: by default the policy file's, or 1. options: of Run.
    """
    if rate is None:
        if max_replicas is not None:
            raise DsimError(f"max replicas is {max_replicas}, expected a rate with it")
        if not world.pools:
            world = replace(world, replicas=replicas_of([world.policy], replicas))
        return capacity(world, **options)
    if replicas is not None:
        raise DsimError(f"rate is {rate:g} and replicas is {replicas}, expected one: a rate asks for the replicas")
    if max_replicas is None:
        max_replicas = MAX_REPLICAS_TRIED
    if world.pools:
        return fewest_of_each_pool(world, rate, max_replicas=max_replicas, **options)
    return fewest_replicas(world, rate, max_replicas=max_replicas, **options)


def fewest_of_each_pool(
    world: World, rate: float, *, max_replicas: int = MAX_REPLICAS_TRIED, **options: Any
) -> Capacity:
    """The fewest replicas of the world's pools with a capacity of at least `rate` (req/s), by its interval's low end.

    The world's counts are a first guess. options: of `capacity`.
    """
    check_rate(rate, max_replicas)
    options = {"memo": Memo(), **options}
    with Pool(options.pop("jobs", None), options.pop("ray", None)) as pool:
        gpus = [setting.profile.device.count for _, setting in world.each_pool()]
        run_of = cache(lambda counts: Run(with_counts(world, counts), pool, target=rate, **options))

        def meets_shortly(counts: Counts) -> bool:
            search = run_of(counts).search
            num = max(search.shortened().num_requests, PILOT_PER_REPLICA * sum(counts))
            short = search.shortened(min(search.num_requests, num))
            return all(Reading(**answer).holds for answer in run_of(counts).answers(at_rate, [(rate, PILOT)], short))

        start = tuple(min(spec.count, max_replicas) for spec in PoolSpec.parse_all(world.pools))
        is_enough = cache(lambda counts: bool(run_of(counts).start().low >= rate))
        return run_of(smallest(start, gpus, max_replicas, cache(meets_shortly), is_enough)).finish()


def smallest(start: Counts, prices: Sequence[float], limit: int, meets_shortly: Test, is_enough: Test) -> Counts:
    """Counts that are enough, while with one replica less of any pool they are not. prices: of a replica, by pool.

    start: a guess. DsimError if `limit` per pool are too few.
    """
    dearest_first = sorted(range(len(start)), key=lambda k: -prices[k])
    counts = _grown(start, limit, meets_shortly)
    for k in dearest_first:
        low, high = 0, counts[k]
        while high - low > 1:
            middle = (low + high) // 2
            if meets_shortly(_with(counts, k, middle)):
                high = middle
            else:
                low = middle
        counts = _with(counts, k, high)
    counts = _grown(counts, limit, is_enough)
    for k in dearest_first:
        while counts[k] > 1 and is_enough(_with(counts, k, counts[k] - 1)):
            counts = _with(counts, k, counts[k] - 1)
    return counts


def _grown(counts: Counts, limit: int, test: Test) -> Counts:
    """With a quarter more of each pool until the fleet passes."""
    while not test(counts):
        if min(counts) == limit:
            raise DsimError(f"{limit} replicas of each pool are not enough: allow more, or relax the SLOs")
        counts = tuple(min(n + max(1, n // 4), limit) for n in counts)
    return counts


def with_counts(world: World, counts: Sequence[int]) -> World:
    specs = PoolSpec.parse_all(world.pools)
    return replace(world, pools=tuple(str(replace(s, count=n)) for s, n in zip(specs, counts, strict=True)))


def severity_of(reading: Reading) -> float:
    """Worst log distance beyond a bound; LIMIT if the queue grows without end."""
    if not reading.stable:
        return LIMIT
    return float(np.clip(reading.severity, -LIMIT, LIMIT))


def _with(counts: Counts, k: int, num: int) -> Counts:
    """With `num` replicas of pool k."""
    return (*counts[:k], num, *counts[k + 1 :])
