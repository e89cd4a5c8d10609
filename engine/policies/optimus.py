"""Optimus (arXiv 2605.24832): each step, the chunk with the most expected commits per second."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import PolicyError
from ..hooks import choose, learn
from ..jit import rule
from ..latency import seconds
from ..part import BATCHING_SPACE, FITTED, MAX_BLOCK, Answers, Policy, Preset, Range
from ..rows.blocks import count_prefixes
from ..state import PolicyState, Replica, step_slots
from .chunk import Streaming
from .delayed_cache import DelayedCache
from .lmdeploy import EVERY_STEP


class ElasticFields(Protocol):
    cold_start: int
    hysteresis: float
    memory: int


class ElasticRecord(Protocol):
    chunks: npt.NDArray[Any]
    counts: npt.NDArray[Any]
    curve: npt.NDArray[Any]
    last: int
    latency: npt.NDArray[Any]
    latency_batch: int
    num_chunks: int
    observed: int
    rate: npt.NDArray[Any]
    slots: npt.NDArray[Any]
    sums: npt.NDArray[Any]
    width: int


ElasticState = PolicyState[ElasticFields, Any, ElasticRecord]


TINY = 1e-12


@dataclass(frozen=True)
class ElasticChunk(Streaming):
    """c* = argmax over candidates of N_commit(c) b / T(c, b), each step (Optimus, elastic-chunking.md 6.3).

    It learns f(m), the commits if the m leftmost masks are computed; N_commit(c) solves N = f(c - N), as committed
    tokens take a slot once more.
    """

    max_chunk: Annotated[int, Range(2, MAX_BLOCK), "the largest chunk, at most the block"] = 32
    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32
    candidates: Annotated[tuple[int, ...], "chunks to choose from; empty: every even number up to max_chunk"] = ()
    obs: Annotated[bool, "out-of-block streaming: the window may reach into the next block"] = False
    hysteresis: Annotated[float, Range(0), "relative gain needed to change the chunk"] = 0.0

    memory: ClassVar[int] = 300  # steps in the running average of commits
    cold_start: ClassVar[int] = 16  # observed steps at the largest chunk before choosing
    sized_by_block = "max_chunk"
    needs_latency = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_chunk > self.block_length:
            raise PolicyError(f"max_chunk is {self.max_chunk}, expected at most the block length {self.block_length}")
        for c in self.candidates:
            if not 2 <= c <= self.max_chunk:
                raise PolicyError(f"a candidate chunk is {c}, expected 2 to the largest chunk {self.max_chunk}")

    def chunks(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(set(self.candidates))) or tuple(range(2, self.max_chunk + 1, 2))

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"memory": self.memory, "cold_start": self.cold_start, "hysteresis": float(self.hysteresis)}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        # Fixed lengths: one compilation for all settings.
        length = 2 * MAX_BLOCK + 1
        chunks = np.zeros(MAX_BLOCK, np.int64)
        chunks[: len(self.chunks())] = self.chunks()
        curve = np.ones(length)  # one commit a step to start with
        curve[0] = 0.0
        zeros = np.zeros(length, np.int64)
        return {
            "chunks": chunks, "num_chunks": len(self.chunks()), "latency": np.zeros(MAX_BLOCK), "latency_batch": 0,
            "last": 0, "observed": 0, "width": policy.width, "curve": curve, "slots": np.zeros(length),
            "rate": np.zeros(MAX_BLOCK), "counts": zeros, "sums": zeros,
        }  # fmt: skip

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), choose: elastic_chunk, learn: learn_curve}


@rule
def elastic_chunk(replica: Replica, policy: ElasticState) -> int:
    """The candidate with most commits per second; ties go to the smallest."""
    counters, record = replica.counters, policy.record
    batch = counters.num_rows
    if record.latency_batch != batch:
        _latencies(replica, policy, batch)
        record.latency_batch = batch
    record.last = _best(policy.fields, record)
    return int(record.last)


@rule
def _latencies(replica: Replica, policy: ElasticState, batch: int) -> None:
    """T(c, b) of each candidate without attention (section 5.1); every token is a head row."""
    counters, record = replica.counters, policy.record
    # The planned step's features are not set yet: candidates use their place.
    counters.sum_q_kv = 0
    counters.sum_kv = 0
    counters.window_q_kv = 0
    counters.window_kv = 0
    counters.batch = batch
    counters.prefill_tokens = 0
    counters.num_forwards = 1
    for i in range(record.num_chunks):
        counters.tokens = record.chunks[i] * batch
        counters.head_rows = counters.tokens
        counters.sampled_rows = counters.tokens
        record.latency[i] = seconds(policy.cost.knots, policy.cost.numbers[0], counters)


@rule
def _best(fields: ElasticFields, record: ElasticRecord) -> int:
    chunks, curve, slots, rate = record.chunks, record.curve, record.slots, record.rate
    n, size = record.num_chunks, record.width
    if record.observed < fields.cold_start:
        return int(chunks[n - 1])
    top = -np.inf
    for k in range(size + 1):
        top = max(top, k + curve[k])
        slots[k] = top
    best = 0
    below = 0
    for k in range(n):
        chunk = chunks[k]
        # Masks that fill the chunk, interpolated, at most the window.
        while below < size - 1 and slots[below + 1] <= chunk:
            below += 1
        masks = below + (chunk - slots[below]) / max(slots[below + 1] - slots[below], TINY)
        rate[k] = (chunk - min(masks, float(size))) / record.latency[k]
        if rate[k] > rate[best]:
            best = k
    if fields.hysteresis > 0.0 and record.last > 0:
        last = 0
        while chunks[last] < record.last:
            last += 1
        if rate[best] <= rate[last] * (1 + fields.hysteresis):
            return int(record.last)
    return int(chunks[best])


@rule
def learn_curve(replica: Replica, policy: ElasticState, prefill: bool) -> None:
    """Update the curve with a step; a prefill's block counts at the largest chunk (6.4 h)."""
    record = policy.record
    for k in range(record.width + 1):
        record.counts[k] = 0
        record.sums[k] = 0
    for slot in step_slots(replica):
        count_prefixes(
            replica.status[slot],
            replica.window[slot],
            replica.committed[slot],
            record.counts,
            record.sums,
        )
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
        {
            "max_chunk": [8, 16, 24, 32], "obs": [False, True], "hysteresis": [0.0, 0.02, 0.05, 0.1], FITTED: True,
            **BATCHING_SPACE,
        },
    )
}  # fmt: skip
