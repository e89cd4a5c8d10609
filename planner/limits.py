"""The limit of a replica: the pool that requests wait for, or else the largest part of its busy time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.latency import LatencyModel
from ..profiler.fit import key_times, layer_times
from ..profiler.profile import gb
from ..profiler.samples import FEATURES, captured, padded, sequences
from ..sim.setting import Setting
from .memory import PAGES, ROWS, TOKENS, WINDOWED, largest, parts

COMPUTE, KV_MEMORY, ACTIVATION, HOST = "compute", "KV memory", "activation budget", "host overhead"

FULL = 0.9  # of the KV pool: requests that wait then wait for pages
WAITED = 0.25  # of the busy time with requests waiting for a pool: the pool limits
THRASH = 0.01  # preemptions a request


# A feature's share that an eviction took off, by its column in the journal.
EVICTED = {
    "tokens": "evicted", "head_rows": "evicted", "sum_q_kv": "evicted_q_kv", "sum_kv": "evicted_kv",
    "sampled_rows": "evicted_sampled",
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A limit, and for a pool the setting that makes it as large as it is."""

    name: str  # one of the four above
    setting: str = ""
    binds: str = ""  # of a pool: the largest part of memory, or the setting that bounds it (memory.py)
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of a replica's memory, by content


@dataclass
class Shares:
    """Where the time in steps goes, summed over a run's steps. Times in seconds."""

    setting: Setting
    busy: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    kv: float = 0.0  # byte seconds that rows' keys and values take
    windowed: float = 0.0  # ... of them in layers with a window

    def append(self, steps: Mapping[str, npt.NDArray[Any]], _lists: Mapping[str, Any]) -> None:
        """Count a batch of the journal's steps."""
        took, prefill = steps["latency"], steps["prefill"]
        # The rest of a step's time is the launch floor and the host.
        device = np.minimum(device_time(self.setting.profile.latency, steps), took)
        waiting = steps["waiting"] > 0
        full = waiting & (steps["pages"] >= FULL * self.setting.limits.num_pages)
        crowded = waiting & (steps["running"] >= self.setting.limits.max_batch) & ~full
        # The token budget cut these prefills: a larger one would save their fixed cost.
        cut = prefill & (waiting & ~full & ~crowded | (steps["num_forwards"] > 1))
        fixed = np.clip(took - token_time(self.setting.profile.latency, steps), 0.0, None)
        self.busy += float(took.sum())
        windowed = float((took * steps["window_kv"]).sum()) * self.setting.limits.window_bytes
        self.windowed += windowed
        self.kv += float((took * steps["sum_kv"]).sum()) * self.setting.limits.kv_bytes + windowed
        for name, amount in (
            ("decode", device[~prefill]),
            ("prefill", device[prefill]),
            ("host", took - device),
            ("waiting for pages", took[full]),
            ("waiting for rows", took[crowded]),
            ("cut prefills", fixed[cut]),
        ):
            self.sums[name] = self.sums.get(name, 0.0) + float(amount.sum())

    @property
    def in_windows(self) -> float:
        """The share of the pages held that layers with a window hold: they take theirs from the same pool by need."""
        return self.windowed / self.kv if self.kv > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Of the busy time: on the device in decode and in prefill, on the host, and waiting for each of the pools."""
        return {name: total / self.busy if self.busy > 0 else 0.0 for name, total in self.sums.items()}


def limited_by(shares: Mapping[str, float], preemptions: float, setting: Setting, in_windows: float = 0.0) -> Limit:
    """The resource that limits: the pool that requests wait for most, or else where most of the busy time goes.

    preemptions: a request. in_windows: of Shares.
    """
    policy, limits = setting.policy, setting.limits
    memory = parts(setting, in_windows)
    pages, rows, tokens = (shares[name] for name in ("waiting for pages", "waiting for rows", "cut prefills"))
    if preemptions > THRASH or (pages > WAITED and pages >= max(rows, tokens)):
        pool = {name: memory.get(name, 0) for name in (PAGES, WINDOWED)}
        part = largest(pool if policy.memory.num_pages is not None else memory)
        return Limit(KV_MEMORY, f"num_pages={limits.num_pages}", part, memory)
    if rows > WAITED and rows >= tokens:
        return Limit(ACTIVATION, _rows_setting(setting), ROWS, memory)
    if tokens > WAITED:
        budget = limits.max_prefill_tokens or policy.batching.max_prefill_tokens
        return Limit(ACTIVATION, f"max_prefill_tokens={budget}", TOKENS, memory)
    device = shares["decode"] + shares["prefill"]
    return Limit(COMPUTE if device >= shares["host"] else HOST, memory=memory)


def device_time(model: LatencyModel, steps: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """The device's part of each step's latency (s): `LatencyModel.step` without launch and host terms."""
    columns = dict(steps) | {"prefill_tokens": np.where(steps["prefill"], steps["tokens"], 0)}
    planned = np.column_stack([columns[name] for name in FEATURES]).astype(np.float64)
    gone = np.zeros_like(planned)
    for name, evicted in EVICTED.items():
        gone[:, FEATURES.index(name)] = steps[evicted]
    evicting = steps["evicting"]
    whole = np.where(evicting[:, None], planned, padded(planned, model.graph_tokens))
    left = whole - gone
    early = np.where(evicting, model.early, 1.0)
    graphs = captured(planned, model.graph_tokens) & ~evicting
    layers = early * layer_times(model, whole, graphs) + (1.0 - early) * layer_times(model, left, graphs)
    layers += model.sequence * sequences(planned, model.graph_tokens)
    head, sampled = (left[:, FEATURES.index(name)] for name in ("head_rows", "sampled_rows"))
    total: npt.NDArray[np.float64] = layers + model.head * head + model.sample * sampled
    return total


def token_time(model: LatencyModel, steps: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """The time of each step's tokens and rows in a step so large that its fixed costs vanish (s)."""
    late = 1.0 - model.early  # share of the layers without the evicted tokens
    seen = {
        "sum_q_kv": steps["sum_q_kv"] - late * steps["evicted_q_kv"],
        "sum_kv": steps["sum_kv"] - late * steps["evicted_kv"],
        "window_q_kv": steps["window_q_kv"],
        "window_kv": steps["window_kv"],
        "batch": steps["batch"],
    }
    others: npt.NDArray[np.float64] = (
        key_times(model, seen, steps["prefill"])
        + model.sequence * steps["batch"]
        + model.head * (steps["head_rows"] - steps["evicted"])
        + model.sample * (steps["sampled_rows"] - steps["evicted_sampled"])
    )
    return model.slope * (steps["tokens"] - late * steps["evicted"]) + others + model.host_request * steps["batch"]


def _rows_setting(setting: Setting) -> str:
    """Where the bound on running sequences comes from."""
    policy, profile, limits = setting.policy, setting.profile, setting.limits
    batching = policy.batching
    if batching.max_batch is not None:
        return f"max_batch={limits.max_batch}"
    if limits.max_batch == profile.default_max_batch:
        return f"max_batch={limits.max_batch}, the profile's default"
    usual = batching.batch_on(profile.device, profile.default_max_batch, policy.block_length)
    if limits.max_batch < usual:
        row = gb(setting.memory.workspace_bytes)
        return f"max_batch={limits.max_batch}: {usual} rows of {row} would take more than half of the memory"
    if usual * policy.block_length < batching.max_prefill_tokens:
        return f"max_batch={limits.max_batch}, the engine's default"
    return (
        f"max_batch={limits.max_batch}, which is max_prefill_tokens={batching.max_prefill_tokens} "
        f"over block_length={policy.block_length}"
    )
