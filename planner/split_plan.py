"""Split or not: a plan's recommended fleet next to the cheapest fleet with a prefill pool."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from ..engine.errors import DsimError
from ..profiler.profile import Profile
from ..results.fleet_file import FleetWords
from ..results.metrics import latencies, no_nan, statistic
from ..results.scenario import Scenario
from ..sim.fleet import PoolSpec
from .backend import Pool
from .capacity import FEWEST, PER_REPLICA, CapacitySearch, search_of
from .contents import Json
from .limits import PoolShares
from .memo import Memo
from .plan_replays import Posed
from .pool_counts import Counts, fewest_of_pools, with_counts
from .replicate import judged, replication

SEEN = ("ttft", "norm_latency")  # by clients, p90
DOUBLE = 2.0  # times the unsplit price, where the search ends


@dataclass(frozen=True)
class Side:
    """A fleet at the plan's rate."""

    pools: tuple[str, ...]  # for `--pool`; empty: not split
    replicas: tuple[int, ...]  # of each pool
    gpus: int
    per_hour: float | None
    p90_ms: dict[str, float | None]  # of SEEN
    busy: tuple[float, ...]  # by pool: share of time spent in steps


@dataclass(frozen=True)
class SplitOrNot:
    """The unsplit fleet, and the cheapest split fleet that surely meets the SLOs."""

    links: tuple[str, ...]
    router: str
    decider: str
    whole: Side
    split: Side | None  # None: none within twice the price
    refused: str = ""  # why the policy cannot be split
    num_requests: int = 0  # of a replay

    @property
    def pays(self) -> bool:
        """Whether the split fleet costs less (without prices: has fewer GPUs)."""
        return self.split is not None and _cost(self.split) < _cost(self.whole) and not self.ties

    @property
    def ties(self) -> bool:
        return self.split is not None and math.isclose(_cost(self.split), _cost(self.whole))

    def fleet_toml(self) -> str:
        """A file for `--fleet`; empty without a split fleet."""
        if self.split is None:
            return ""
        return FleetWords(self.split.pools, self.links, self.router, self.decider).toml()

    def to_json(self) -> Json:
        found: Json = no_nan(asdict(self))
        return found | {"pays": self.pays, "ties": self.ties, "fleet_toml": self.fleet_toml()}


def split_or_not(
    best: Posed, pools: Sequence[str], links: Sequence[str], decider: str, rate: float, replicas: int,
    price: Callable[[Profile], float | None], *, attainment: float, num_requests: int | None, most: int, memo: Memo,
    pool: Pool, progress: Callable[[str, int], object] = lambda doing, replays: None,
) -> SplitOrNot:  # fmt: skip
    """pools: counts are first guesses; by default a prefill and a decode pool of the same policy and profile."""
    best = replace(best, rate=None, num_requests=None, replicas=1)
    whole = replace(best, replicas=replicas)
    num = FEWEST if num_requests is None else num_requests

    def search(scenario: Scenario) -> CapacitySearch:
        many = max(num, PER_REPLICA * scenario.num_replicas)
        return search_of(scenario, 0.02, attainment, many)

    def side(scenario: Scenario) -> Side:
        [seen] = memo.map(pool, partial(_seen, search(scenario)), [rate])
        each = list(scenario.each_pool())
        gpus = [spec.count * own.profile.device.count for spec, own in each]
        prices = [price(own.profile) for _, own in each]
        known = [p for p in prices if p is not None]
        hourly = sum(n * p for n, p in zip(gpus, known, strict=True)) if len(known) == len(prices) else None
        counts = tuple(spec.count for spec, _ in each)
        return Side(scenario.pools, counts, sum(gpus), hourly, seen["p90_ms"], tuple(seen["busy"]))

    base = SplitOrNot(tuple(links), best.router, decider, side(whole), None, num_requests=num)
    same = f"{best.loaded_profile().name},{best.policy}"
    texts = tuple(pools) or (f"prefill:1@{same}", f"decode:{max(1, replicas - 1)}@{same}")
    own = replace(best, pools=texts, links=tuple(links), decider=decider)
    if pools:
        own = replace(own, given_profile=None)
    try:
        own.fleet().check()
    except DsimError as error:
        return replace(base, refused=str(error))
    weights = []
    for _, setting in own.each_pool():
        cost = price(setting.profile)
        weights.append(setting.profile.device.count * (1.0 if cost is None or base.whole.per_hour is None else cost))
    start: Counts = tuple(min(spec.count, most) for spec in PoolSpec.parse_all(own.pools))
    try:
        found = fewest_of_pools(
            lambda counts: search(with_counts(own, counts)), start, weights, rate, most, pool, memo,
            limit=DOUBLE * _cost(base.whole) + 1e-9,
            progress=lambda counts, replays: progress(" + ".join(map(str, counts)), replays),
        )  # fmt: skip
    except DsimError as error:
        return replace(base, refused=str(error))
    return base if found is None else replace(base, split=side(with_counts(own, found.counts)))


def _seen(search: CapacitySearch, memo: Memo, rate: float) -> Json:
    found: Json = memo.replay(lambda: search.asked(0, rate, "split or not"), lambda: _run(search, rate))
    return found


def _run(search: CapacitySearch, rate: float) -> Json:
    own, requests = replication(search.scenario, 0, search.num_requests, search.block)
    shares = PoolShares(own.fleet())
    result = own.simulate_whole(requests.time_scaled(1 / rate), shares.append)
    window = {name: column[judged(len(requests))] for name, column in result.table.columns.items()}
    known = latencies(window)
    p90 = {name: no_nan(1e3 * statistic(known[name], "p90")) for name in SEEN}
    return {"p90_ms": p90, "busy": [shares.busy(k, result.totals.end) for k in range(len(shares.pools))]}


def _cost(side: Side) -> float:
    return float(side.gpus) if side.per_hour is None else side.per_hour
