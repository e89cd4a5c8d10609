"""Compare two runs step by step: plans, latencies, and a profile's prices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine import cache_overhead
from ..engine.latency import Features, LatencyModel
from ..engine.policy import Policy
from ..engine.rows.passes import first_layers
from ..engine.state import MASKED
from ..profiler.samples import step_features
from ..results.metrics import Floats, rows_of
from ..results.run import Columns
from .errors import Errors, errors, ks_distance

Ints = npt.NDArray[np.int64]
Lists = Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]  # (values, offsets)

# Describe a step's computation.
COMPUTED = (
    "prefill", "batch", "tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "num_forwards", "evicting",
    "window_q_kv", "window_kv",
)  # fmt: skip


@dataclass(frozen=True)
class StepErrors:
    """Decode or prefill steps of two runs."""

    num_measured: int
    paired: Errors | None  # of the same steps; None: plans differ
    priced: Errors | None  # prices against measured latencies; None: no profile
    ks: float
    host: float  # s a measured step beyond the device's time; NaN: unknown


@dataclass(frozen=True)
class Steps:
    num_same: int  # planned alike before the first difference, over all replicas
    same: bool  # these are all
    decode: StepErrors
    prefill: StepErrors


def compare_steps(
    p: Columns, p_lists: Lists, m: Columns, m_lists: Lists, m_requests: Columns, policy: Policy,
    latency: LatencyModel | None,
) -> Steps:  # fmt: skip
    num_same = 0
    for replica in np.union1d(p["replica"], m["replica"]):
        num_same += same_plans(*of_replica(p, p_lists, replica), *of_replica(m, m_lists, replica))
    same = num_same == len(p["step"]) == len(m["step"])
    priced = None if latency is None else prices(latency, m, m_lists, m_requests, policy)
    kinds = []
    for prefill in (False, True):
        mine, theirs = p["prefill"] == prefill, m["prefill"] == prefill
        a, b = p["latency"][mine], m["latency"][theirs]
        paired = None
        if same:
            # Files may interleave replicas differently.
            order = [np.lexsort((steps["step"], steps["replica"])) for steps in (p, m)]
            x, y = (steps["latency"][o] for steps, o in zip((p, m), order, strict=True))
            keep = p["prefill"][order[0]] == prefill
            paired = errors(x[keep], y[keep])
        by_profile = None if priced is None else errors(priced[theirs], b)
        host = b - m["device"][theirs]
        known = host[~np.isnan(host)]
        mean_host = float(known.mean()) if len(known) else math.nan
        kinds.append(StepErrors(len(b), paired, by_profile, ks_distance(a, b), mean_host))
    return Steps(num_same, same, *kinds)


def blocks_ended(status: npt.NDArray[np.uint8], committed: npt.NDArray[np.bool_], length: int) -> int:
    """Blocks of more than one position completed by a step. status, committed: [rows, width]."""
    if length == 1:
        return 0
    masks = (status == MASKED).reshape(len(status), -1, length)
    left = masks & ~committed.reshape(masks.shape)
    return int((masks.any(axis=2) & ~left.any(axis=2)).sum())


def prices(
    latency: LatencyModel, steps: Columns, lists: Lists, requests: Columns, policy: Policy, ended: Ints | None = None
) -> Floats:
    """The model's price (s) of each step. ended: blocks that it completed; None: 0."""
    features, left = step_features(steps, lists, policy.batching.pieces), left_of(steps)
    if not policy.batching.hides_host:
        latency = latency.exposed()
    first: list[Features | None] = [None] * len(features)
    table = cache_overhead.table_of(latency, policy.cache)
    by_row = table.any() or policy.cache.first_layer_whole
    if by_row:
        (rows, offsets), (phases, _) = lists["requests"], lists["phases"]
        lengths = np.zeros((2, int(requests["request"].max(initial=-1)) + 1), np.int64)
        lengths[:, requests["request"]] = requests["input_length"], requests["max_tokens"]
        prompt, output = lengths[:, rows]
    if policy.cache.first_layer_whole:
        whole = first_layers(policy, prompt, prompt + output, offsets).tolist()
        first = [f._replace(tokens=n, sum_q_kv=pairs, sum_kv=keys) if n > f.tokens else None
                 for f, (n, pairs, keys) in zip(features, whole, strict=True)]  # fmt: skip
    priced = np.array([latency.step(*step) for step in zip(features, left, first, strict=True)], np.float64)
    if ended is not None:
        priced += latency.host_block * ended
    if not by_row:
        return priced
    overhead = cache_overhead.of_rows(table, phases, prompt, prompt + output, policy.block_length)
    return np.asarray(priced + np.diff(np.concatenate([[0.0], np.cumsum(overhead)])[offsets]), np.float64)


def left_of(steps: Columns) -> list[Features | None]:
    """Features left after each step's eviction; None without one."""
    left: list[Features | None] = [None] * len(steps["evicting"])
    for i in np.flatnonzero(steps["evicting"]).tolist():
        num, pairs, keys, sampled = (int(steps[f"evicted{of}"][i]) for of in ("", "_q_kv", "_kv", "_sampled"))
        tokens = int(steps["tokens"][i]) - num
        left[i] = Features(
            tokens, int(steps["sum_q_kv"][i]) - pairs, int(steps["sum_kv"][i]) - keys, tokens,
            int(steps["sampled_rows"][i]) - sampled, int(steps["batch"][i]), 0, int(steps["num_forwards"][i]),
        )  # fmt: skip
    return left


def of_replica(steps: Columns, lists: Lists, replica: int) -> tuple[Columns, Lists]:
    rows = np.flatnonzero(steps["replica"] == replica)
    if len(rows) == len(steps["replica"]):
        return steps, lists
    mine = {}
    for name, (values, offsets) in lists.items():
        lengths = np.diff(offsets)[rows]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Indices of the chosen steps' values.
        at = np.repeat(offsets[rows] - ends[:-1], lengths) + np.arange(ends[-1])
        mine[name] = (values[at], ends)
    return rows_of(steps, rows), mine


def same_plans(p: Columns, p_lists: Lists, m: Columns, m_lists: Lists) -> int:
    """The first steps of a replica that computed the same positions of the same requests in both runs."""
    n = min(len(p["step"]), len(m["step"]))
    same = np.ones(n, np.bool_)
    for name in COMPUTED:
        same &= p[name][:n] == m[name][:n]
    for name in ("requests", "window"):
        (_, po), (_, mo) = p_lists[name], m_lists[name]
        same &= np.diff(po)[:n] == np.diff(mo)[:n]
    n = int(np.argmin(same)) if not same.all() else n
    for name in ("requests", "window"):
        (pv, po), (mv, _) = p_lists[name], m_lists[name]
        other = np.flatnonzero(pv[: po[n]] != mv[: po[n]])
        if len(other):
            n = int(np.searchsorted(po, other[0], side="right")) - 1
    return n
