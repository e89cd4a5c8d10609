"""Compare two runs step by step: plans, latencies, and a profile's prices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ..engine import cache_overhead
from ..engine.latency import Features, LatencyModel, step_times
from ..engine.rows.passes import first_layers
from ..engine.spec import Policy
from ..profiler.samples import Ints as Ints
from ..profiler.samples import step_features
from ..results.metrics import Floats, rows_of
from ..results.run import Array, Columns, Run, counters_of
from .deviation import Errors, errors

Lists = Mapping[str, tuple[Array, Array]]  # (values, offsets)

# Describe a step's computation.
COMPUTED = {"prefill", "evicting", *Features._fields} - {"prefill_tokens"}


@dataclass(frozen=True)
class Journal:
    """A policy's steps and requests in a run."""

    steps: Columns
    lists: Lists
    requests: Columns

    @classmethod
    def of(cls, run: Run, policy: str) -> Self:
        return cls(run.steps(policy), run.step_lists(policy), run.requests(policy))

    def __len__(self) -> int:
        return len(self.steps["latency"])

    def of_replica(self, replica: int) -> "Journal":
        rows = np.flatnonzero(self.steps["replica"] == replica)
        if len(rows) == len(self):
            return self
        lists = {}
        for name, (values, offsets) in self.lists.items():
            lengths = np.diff(offsets)[rows]
            ends = np.concatenate([[0], np.cumsum(lengths)])
            # Indices of the chosen steps' values.
            indices = np.repeat(offsets[rows] - ends[:-1], lengths) + np.arange(ends[-1])
            lists[name] = (values[indices], ends)
        return Journal(rows_of(self.steps, rows), lists, self.requests)


@dataclass(frozen=True)
class Steps:
    """How far two runs planned alike, and errors of the predicting profile's prices of the measured steps."""

    num_same: int  # planned alike before the first difference, over all replicas
    num_measured: int
    same: bool  # these are all
    decode: Errors | None = None  # None: no profile
    prefill: Errors | None = None


def compare_steps(predicted: Journal, measured: Journal, policy: Policy, latency: LatencyModel | None) -> Steps:
    num_same = 0
    for replica in np.union1d(predicted.steps["replica"], measured.steps["replica"]):
        num_same += same_plans(predicted.of_replica(replica), measured.of_replica(replica))
    steps = Steps(num_same, len(measured), num_same == len(predicted) == len(measured))
    if latency is None:
        return steps
    priced, prefill = prices(latency, measured, policy), measured.steps["prefill"].astype(bool)
    decode, prompts = (errors(priced[rows], measured.steps["latency"][rows]) for rows in (~prefill, prefill))
    return replace(steps, decode=decode, prefill=prompts)


def prices(latency: LatencyModel, journal: Journal, policy: Policy) -> Floats:
    """The model's price (s) of each step."""
    if not policy.batching.hides_host:
        latency = latency.exposed()
    counters = counters_of(journal.steps)
    features = step_features(journal.steps, journal.lists, policy.batching.pieces)
    counters["prefill_tokens"] = np.array([step.prefill_tokens for step in features])
    table = cache_overhead.table_of(latency, policy.cache)
    by_row = table.any() or policy.cache.first_layer_whole
    if by_row:
        (rows, offsets), (phases, _), requests = journal.lists["requests"], journal.lists["phases"], journal.requests
        lengths = np.zeros((2, int(requests["request"].max(initial=-1)) + 1), np.int64)
        lengths[:, requests["request"]] = requests["input_length"], requests["max_tokens"]
        prompt, output = lengths[:, rows]
    if policy.cache.first_layer_whole:
        first = first_layers(policy, prompt, prompt + output, offsets)  # [steps, 3]
        first[first[:, 0] <= counters["tokens"]] = 0
        counters |= dict(zip(("first_tokens", "first_q_kv", "first_kv"), first.T, strict=True))
    priced = step_times(latency, counters)
    if not by_row:
        return priced
    overhead = cache_overhead.of_rows(table, phases, prompt, prompt + output, policy.block_length)
    return np.asarray(priced + np.diff(np.concatenate([[0.0], np.cumsum(overhead)])[offsets]), np.float64)


def same_plans(predicted: Journal, measured: Journal) -> int:
    """The first steps of a replica that computed the same positions of the same requests in both runs."""
    num = min(len(predicted), len(measured))
    same = np.ones(num, np.bool_)
    for name in COMPUTED:
        same &= predicted.steps[name][:num] == measured.steps[name][:num]
    pairs = [(predicted.lists[name], measured.lists[name]) for name in ("requests", "window")]
    for (_, p_offsets), (_, m_offsets) in pairs:
        same &= np.diff(p_offsets)[:num] == np.diff(m_offsets)[:num]
    if not same.all():
        num = int(np.argmin(same))
    for (p_values, offsets), (m_values, _) in pairs:
        different = np.flatnonzero(p_values[: offsets[num]] != m_values[: offsets[num]])
        if len(different):
            num = int(np.searchsorted(offsets, different[0], side="right")) - 1
    return num
