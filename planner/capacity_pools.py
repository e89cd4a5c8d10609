"""The fewest replicas of each pool for a rate."""

from dataclasses import replace
from typing import Any

from ..results.scenario import Scenario
from ..sim.fleet import PoolSpec
from .capacity import MAX_REPLICAS_TRIED, Capacity, CapacityOptions, CapacitySearch, Interrupted, Run, check_rate, shown
from .capacity import finish as finish_of
from .pool_counts import Counts, PoolCounts, fewest_of_pools, with_counts


def fewest_of_each_pool(
    scenario: Scenario, rate: float, *, max_replicas: int = MAX_REPLICAS_TRIED, **how: Any
) -> Capacity:
    """The fewest GPUs in the scenario's pools with a capacity of at least `rate` (req/s), by its interval's low end.

    The scenario's counts are a first guess. how: fields of CapacityOptions.
    """
    options = CapacityOptions(**how)
    check_rate(rate, max_replicas)
    runs: dict[Counts, Run] = {}
    counting = in_runs = 0  # replays
    with options.pool() as pool:

        def search(counts: Counts) -> CapacitySearch:
            return options.search(with_counts(scenario, counts))

        def surely(counts: Counts) -> bool:
            nonlocal in_runs
            before = counting + in_runs
            run = Run(search(counts), pool, options, rate, before)
            in_runs += run.num_replays - before
            runs[counts] = run
            return run.interval.low >= rate

        def tell(counts: Counts, done: int) -> None:
            nonlocal counting
            counting = done
            if options.progress is not None:
                options.progress(counting + in_runs, None, sum(counts))

        specs = PoolSpec.parse_all(scenario.pools)
        start = tuple(min(spec.count, max_replicas) for spec in specs)
        gpus = [float(setting.profile.device.count) for _, setting in scenario.each_pool()]
        try:
            counted = fewest_of_pools(
                search, start, gpus, rate, max_replicas, pool, options.memo, surely=surely, progress=tell
            )
        except KeyboardInterrupt:
            raise Interrupted(None) from None
        chosen = runs[counted.counts]
        chosen.num_replays = counted.num_replays + in_runs
        return _with_one_less(finish_of(chosen, rate), counted, chosen)


def _with_one_less(found: Capacity, counted: PoolCounts, chosen: Run) -> Capacity:
    criteria = chosen.search.criteria
    pools = []
    for k, part in enumerate(found.pools):
        fewer = tuple(n - (i == k) for i, n in enumerate(counted.counts))
        readings = counted.fewer.get(fewer, ())
        less = {
            c.text: shown(c, sum(r.values[i] for r in readings) / len(readings))
            for i, c in enumerate(criteria) if readings
        }  # fmt: skip
        pools.append(replace(part, one_less=less))
    return replace(found, pools=tuple(pools))
