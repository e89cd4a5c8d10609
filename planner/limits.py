"""What limits a replica: a pool that requests wait for, else the largest part of its busy time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..engine.latency import LatencyModel, step_times
from ..profiler.samples import KINDS_OF_STEPS, kinds_of
from ..results.metrics import Columns, Floats
from ..results.run import counters_of
from ..sim.pools import Fleet
from ..sim.setting import Setting

COMPUTE, KV_MEMORY, ACTIVATION, HOST = "compute", "KV memory", "activation budget", "host overhead"

FULL = 0.9  # of the KV pool; above it, requests wait for pages
WAITED = 0.25  # share of busy time spent waiting for a pool that limits
BEYOND = "beyond the prices"  # steps of more tokens than any that a price was read from
THRASH = 0.01  # preemptions per request
DOUBTED = 0.1  # share of busy time in a kind of steps from which the profile's doubt is stated


@dataclass(frozen=True)
class Limit:
    """A limit, and what sets a pool's size."""

    name: str
    setting: str = ""


@dataclass
class Shares:
    """Where step time goes (s), summed over a run."""

    setting: Setting
    busy: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    kinds: Floats = field(default_factory=lambda: np.zeros(len(KINDS_OF_STEPS)))  # s

    def append(self, steps: Columns, _lists: Mapping[str, Any]) -> None:
        took, prefill = steps["latency"], steps["prefill"]
        model, features = self.setting.profile.latency, counters_of(steps)
        # The rest: launch floor and host.
        device = np.minimum(device_time(model, features), took)
        waiting = steps["waiting"] > 0
        full = waiting & (steps["pages"] >= FULL * self.setting.limits.num_pages)
        crowded = waiting & (steps["running"] >= self.setting.limits.max_batch) & ~full
        # The token budget cut these prefills; a larger one saves their fixed cost.
        cut = prefill & (waiting & ~full & ~crowded | (steps["num_forwards"] > 1))
        large = ~prefill & (steps["tokens"] > self.setting.profile.fit.domain[1])
        by_token = replace(
            model, knots=((0.0, 0.0),), graph_tokens=0, launch=0.0, host_step=0.0, eviction=0.0, overlap=False
        )
        fixed = np.clip(took - step_times(by_token, features), 0.0, None)  # without the time of tokens
        self.busy += float(took.sum())
        kinds = kinds_of(prefill, steps["tokens"], steps["batch"])
        self.kinds += np.bincount(kinds, took, len(KINDS_OF_STEPS))
        for name, amount in (
            ("decode", device[~prefill]),
            ("prefill", device[prefill]),
            ("host", took - device),
            ("waiting for pages", took[full]),
            ("waiting for rows", took[crowded]),
            ("cut prefills", fixed[cut]),
            (BEYOND, took[large]),
        ):
            self.sums[name] = self.sums.get(name, 0.0) + float(amount.sum())

    def doubted(self) -> list[str]:
        """Failed checks of the profile, and the kinds of steps that it doubts, from DOUBTED of the busy time on."""
        errors = {error.kind: error for error in self.setting.profile.fit.judged_by}
        doubts = [
            f"{100 * share:.0f} % in {kind}: {errors[kind].off if kind in errors else 'never judged'}"
            for kind, share in zip(KINDS_OF_STEPS, self.kinds / max(self.busy, 1e-9), strict=True)
            if share >= DOUBTED and (kind not in errors or errors[kind].doubted)
        ]
        profile, busy = self.setting.profile, f"{self.setting.policy.name}'s busy time"
        if not errors or not doubts:
            return profile.failure
        return [*profile.failure, f"{profile.name} doubts parts of {busy}, {', '.join(doubts)}"]

    def shares(self) -> dict[str, float]:
        """Shares of busy time: device in decode and prefill, host, waiting for each pool."""
        return {name: total / (self.busy or 1.0) for name, total in self.sums.items()}  # an idle run's sums are 0


class PoolShares:
    """Shares by pool, for fixed counts; replicas are numbered by pool."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self.pools = fleet, fleet.pools
        self.by_pool = [Shares(pool.setting) for pool in fleet.pools]
        self._ends = np.cumsum([pool.count for pool in fleet.pools])

    def append(self, steps: Columns, lists: Mapping[str, Any]) -> None:
        if len(self.by_pool) == 1:
            self.by_pool[0].append(steps, lists)
            return
        pool = np.searchsorted(self._ends, steps["replica"], side="right")
        for k, shares in enumerate(self.by_pool):
            rows = pool == k
            shares.append({name: column[rows] for name, column in steps.items()}, lists)

    def limits(self, preemptions: float) -> list[Limit]:
        """By pool. preemptions: per request, in decoding pools."""
        limits = []
        for pool, shares in zip(self.pools, self.by_pool, strict=True):
            decodes = not self._fleet.prefills(pool)
            limits.append(limited_by(shares.shares(), preemptions * decodes, pool.setting))
        return limits

    def doubted(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line for shares in self.by_pool for line in shares.doubted()))

    def busy(self, k: int, end: float) -> float:
        """A pool's busy share of a run of `end` s."""
        return self.by_pool[k].busy / max(end * self.pools[k].count, 1e-9)

    def busiest(self, end: float) -> int:
        return max(range(len(self.pools)), key=lambda k: self.busy(k, end))


def limited_by(shares: Mapping[str, float], preemptions: float, setting: Setting) -> Limit:
    """preemptions: per request."""
    policy, limits = setting.policy, setting.limits
    pages, rows, tokens = (shares[name] for name in ("waiting for pages", "waiting for rows", "cut prefills"))
    if preemptions > THRASH or (pages > WAITED and pages >= max(rows, tokens)):
        return Limit(KV_MEMORY, f"num_pages={limits.num_pages}")
    if rows > WAITED and rows >= tokens:
        return Limit(ACTIVATION, f"max_batch={limits.max_batch}")
    if tokens > WAITED:
        budget = limits.max_prefill_tokens or policy.batching.max_prefill_tokens
        return Limit(ACTIVATION, f"max_prefill_tokens={budget}")
    device = shares["decode"] + shares["prefill"]
    return Limit(COMPUTE if device >= shares["host"] else HOST)


def device_time(model: LatencyModel, features: Columns) -> Floats:
    """s by step."""
    return step_times(replace(model, launch=0.0, host_step=0.0, host_request=0.0, eviction=0.0), features)
