"""Optimus (arXiv 2605.24832): each step, the chunk with the most expected commits per second."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import PolicyError
from ..hooks import choose, learn
from ..jit import rule
from ..latency import seconds
from ..part import BATCHING_SPACE, FITTED, MAX_BLOCK, Answers, Policy, Preset, Range
from ..rows.blocks import count_prefixes
from ..state import AnyPolicy, Replica, step_slots
from .chunk import Streaming
from .delayed_cache import DelayedCache
from .lmdeploy_2025 import EVERY_STEP

TINY = 1e-12


@dataclass(frozen=True)
class ElasticChunk(Streaming):
    """c* = argmax over even chunks of N_commit(c) b / T(c, b), each step (Optimus, elastic-chunking.md 6.3).

    It learns f(m), the commits if the m leftmost masks are computed; N_commit(c) solves N = f(c - N), as committed
    tokens take a slot once more.
    """

    max_chunk: Annotated[int, Range(2, MAX_BLOCK), "the largest chunk, at most the block"] = 32
    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32
    num_blocks: Annotated[int, Range(1, 2), "2: out-of-block streaming, the window may reach into the next block"] = 1

    memory: ClassVar[int] = 300  # steps in the running average of commits
    cold_start: ClassVar[int] = 16  # observed steps at the largest chunk before choosing
    sized_by_block = "max_chunk"
    needs_latency = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_chunk > self.block_length:
            raise PolicyError(f"max_chunk is {self.max_chunk}, expected at most the block length {self.block_length}")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"memory": self.memory, "cold_start": self.cold_start}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        # Fixed lengths: one compilation for all settings.
        length = 2 * MAX_BLOCK + 1
        curve = np.ones(length)  # one commit a step to start with
        curve[0] = 0.0
        zeros = np.zeros(length, np.int64)
        return {
            "num_chunks": self.max_chunk // 2,
            "latency": np.zeros(MAX_BLOCK // 2),
            "latency_batch": 0,
            "observed": 0,
            "width": policy.width,
            "curve": curve,
            "slots": np.zeros(length),
            "counts": zeros,
            "sums": zeros,
        }

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), choose: elastic_chunk, learn: learn_curve}


@rule
def elastic_chunk(replica: Replica, policy: AnyPolicy) -> int:
    """The even chunk with most commits per second; ties go to the smallest."""
    counters, record = replica.counters, policy.record
    batch = counters.num_rows
    if record.latency_batch != batch:
        _latencies(replica, policy, batch)
        record.latency_batch = batch
    return _best(policy.fields, record)


@rule
def _latencies(replica: Replica, policy: AnyPolicy, batch: int) -> None:
    """T(c, b) of each chunk without attention (section 5.1); every token is a head row."""
    counters, record = replica.counters, policy.record
    # The planned step's features are not set yet: these use their place.
    counters.sum_q_kv = 0
    counters.sum_kv = 0
    counters.window_q_kv = 0
    counters.window_kv = 0
    counters.batch = batch
    counters.prefill_tokens = 0
    counters.num_forwards = 1
    for i in range(record.num_chunks):
        counters.tokens = 2 * (i + 1) * batch
        counters.head_rows = counters.tokens
        counters.sampled_rows = counters.tokens
        record.latency[i] = seconds(policy.cost.knots, policy.cost.numbers[0], counters)


@rule
def _best(fields: Any, record: Any) -> int:
    curve, slots, size = record.curve, record.slots, record.width
    if record.observed < fields.cold_start:
        return 2 * int(record.num_chunks)
    top = -np.inf
    for k in range(size + 1):
        top = max(top, k + curve[k])
        slots[k] = top
    best = 0
    best_rate = -np.inf
    below = 0
    for k in range(record.num_chunks):
        chunk = 2 * (k + 1)
        # Masks that fill the chunk, interpolated, at most the window.
        while below < size - 1 and slots[below + 1] <= chunk:
            below += 1
        masks = below + (chunk - slots[below]) / max(slots[below + 1] - slots[below], TINY)
        rate = (chunk - min(masks, float(size))) / record.latency[k]
        if rate > best_rate:
            best = chunk
            best_rate = rate
    return best


@rule
def learn_curve(replica: Replica, policy: AnyPolicy, prefill: bool) -> None:
    """Update the curve with a step; a prefill's block counts at the largest chunk (6.4 h)."""
    record = policy.record
    for k in range(record.width + 1):
        record.counts[k] = 0
        record.sums[k] = 0
    for slot in step_slots(replica):
        count_prefixes(replica.status[slot], replica.window[slot], replica.committed[slot], record.counts, record.sums)
    record.observed = _observe(
        record.curve[: record.width + 1], record.counts, record.sums, record.observed, policy.fields.memory
    )


@rule
def _observe(
    curve: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    sums: npt.NDArray[np.int64],
    observed: int,
    memory: int,
) -> int:
    """Add a step: counts[m] rows computed at least m positions, and their first m committed sums[m] in total."""
    size = len(curve) - 1
    top = 0
    for m in range(size, 0, -1):
        if counts[m] != 0:
            top = m
            break
    if top == 0:
        return int(observed)
    before = curve[top]
    # First a plain mean, then an exponential one.
    weight = 1.0 / min(observed + 1, memory)
    for m in range(1, top + 1):
        curve[m] += weight * (sums[m] / counts[m] - curve[m])
    if top < size:
        ratio = curve[top] / before
        for m in range(top + 1, size + 1):
            curve[m] *= ratio
    return int(observed) + 1


PRESETS = {
    "optimus": Preset(
        Policy("optimus", batching=EVERY_STEP, granularity=ElasticChunk(), eviction=DelayedCache()),
        "max_chunk",
        "Optimus: the chunk with the best expected commits per second, chosen every step",
        "Optimus, arXiv 2605.24832 (elastic-chunking.md 6.3)",
        {"max_chunk": [8, 16, 24, 32], "num_blocks": [1, 2], FITTED: True, **BATCHING_SPACE},
    )
}
