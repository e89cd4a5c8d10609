"""The fewest replicas of each pool whose capacity is at least a rate."""

import math
from dataclasses import replace

from ..engine.errors import DsimError
from ..results.scenario import MAX_REPLICAS, Scenario
from .backend import Pool
from .capacity import (
    MAX_REPLICAS_TRIED,
    MOST,
    Capacity,
    CapacitySearch,
    Interrupted,
    Progress,
    Run,
    check_options,
    search_of,
    shown,
)
from .capacity import finish as finish_of
from .memo import Memo
from .pool_counts import Counts, PoolCounts, fewest_of_pools, specs_of, with_counts


def fewest_of_each_pool(
    scenario: Scenario,
    rate: float,
    *,
    max_replicas: int = MAX_REPLICAS_TRIED,
    precision: float = 0.02,
    confidence: float = 0.95,
    attainment: float = 0.99,
    num_requests: int | None = None,
    block: int | None = None,
    max_replications: int = MOST,
    gpu_hour: float | None = None,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    curve: bool = True,
    progress: Progress | None = None,
    memo: Memo | None = None,
) -> Capacity:
    """The fewest GPUs in the scenario's pools that sustain `rate` (req/s), by the low end of their interval.

    The scenario's counts are a first guess. Each pool's `one_less` is what a fleet with one replica less of it does at
    the rate.
    """
    check_options(precision, confidence, attainment, num_requests, block, max_replications, gpu_hour)
    if not 0 < rate < math.inf:
        raise DsimError(f"rate is {rate} req/s, expected above 0 and finite")
    if not 1 <= max_replicas <= MAX_REPLICAS:
        raise DsimError(f"max replicas is {max_replicas}, expected 1 to {MAX_REPLICAS}")
    store = memo or Memo()
    runs: dict[Counts, Run] = {}
    counting = in_runs = 0  # replays
    with Pool(backend, jobs, address) as pool:

        def search(counts: Counts) -> CapacitySearch:
            return search_of(with_counts(scenario, counts), precision, attainment, num_requests, block)

        def surely(counts: Counts) -> bool:
            nonlocal in_runs
            before = counting + in_runs
            run = Run(search(counts), pool, store, precision, confidence, max_replications, progress, rate, before)
            in_runs += run.num_replays - before
            runs[counts] = run
            return run.interval.low >= rate

        def tell(counts: Counts, done: int) -> None:
            nonlocal counting
            counting = done
            if progress is not None:
                progress(counting + in_runs, None, sum(counts))

        specs = specs_of(scenario)
        start = tuple(min(spec.count, max_replicas) for spec in specs)
        gpus = [float(setting.profile.device.count) for _, setting in scenario.each_pool()]
        try:
            counted = fewest_of_pools(
                search, start, gpus, rate, max_replicas, pool, store, surely=surely, progress=tell
            )
        except KeyboardInterrupt:
            raise Interrupted(None) from None
        assert counted is not None
        chosen = runs[counted.counts]
        chosen.num_replays = counted.num_replays + in_runs
        chosen.target = None
        chosen.sharpen()
        return _with_one_less(finish_of(chosen, gpu_hour, curve, rate), counted, chosen)


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
