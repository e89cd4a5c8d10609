"""The journal: what every step planned and what came of it, as columns that either driver writes and any tool reads.

requests.parquet holds one row a request, steps.parquet one row a step. Times are seconds since the start of the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .histogram import CountHistogram, TimeHistogram
from .leap import LEAP_COLUMNS, Steps
from .step import StepOutcome, StepPlan, features_left

STATUSES = ("completed", "rejected", "unfinished")

# One row a request, in the trace's order. NaN where the event never happened, -1 where no replica was chosen.
REQUEST_COLUMNS: dict[str, str] = {
    "request": "int32",  # index in the trace
    "replica": "int16",
    "status": "uint8",  # index into STATUSES
    "arrival": "float64",
    "input_length": "int32",
    "output_length": "int32",  # tokens asked for
    "scheduled": "float64",  # start of its first prefill
    "first_commit": "float64",  # end of the step that first committed one of its positions
    "first_block": "float64",  # first whole block ready
    "first_emission": "float64",
    "last_emission": "float64",
    "finish": "float64",
    "num_first": "int32",  # tokens in the first emission
    "num_tokens": "int32",  # tokens returned
    "num_emissions": "int32",
    "num_forwards": "int32",  # decode forwards it took part in
    "num_committed": "int32",  # positions committed, prefill's and the trimmed tail's included
    "num_computed": "int64",  # token positions that went through all layers in decode steps
    "num_preemptions": "int32",
}

# One row a step, in the order in which steps began on each replica.
STEP_COLUMNS: dict[str, str] = {
    "replica": "int16",
    "step": "int32",  # from 0 on each replica
    "start": "float64",
    "latency": "float64",
    "device": "float64",  # of the latency, time in which the device was at work; NaN where nobody measured it
    "prefill": "bool",  # a prefill step; otherwise a decode step
    "batch": "int32",  # rows computed
    "chunk": "int32",  # most positions a row may compute (decode steps; 0 in prefill)
    "tokens": "int32",  # query positions
    "sum_q_kv": "int64",
    "sum_kv": "int64",
    "head_rows": "int32",
    "sampled_rows": "int32",
    "num_forwards": "int32",
    "committed": "int32",  # positions committed
    "waiting": "int32",  # requests waiting when the step began
    "running": "int32",  # requests holding pages when the step began
    "pages": "int32",  # KV pages held while the step ran
    "submitted": "int32",  # requests submitted to this replica before the step was planned
    "finished": "int32",  # requests that ended with the step
    "preempted": "int32",  # requests preempted to make room for the step
    "evicting": "bool",  # positions could be evicted in the second layer
    "evicted": "int32",  # of `tokens` and `head_rows`, those that were; then of sum_q_kv, sum_kv and sampled_rows
    "evicted_q_kv": "int64",
    "evicted_kv": "int64",
    "evicted_sampled": "int32",
}
# Per row of a step: who, and bit masks over the positions of its block (bit p of word p // 64 is position p).
STEP_LISTS: dict[str, str] = {
    "requests": "int32",
    "phases": "uint8",
    "num_tokens": "int32",
    "window": "uint64",  # positions computed: `words` words a row
    "commits": "uint64",  # positions committed: `words` words a row
    "evictions": "uint64",  # positions of the window that were evicted: `words` words a row
}


@dataclass
class StepTotals:
    """What a run's steps add up to, in constant memory. Prefill steps count only where it says so."""

    step_latency: TimeHistogram = field(default_factory=TimeHistogram)  # decode steps
    itl: TimeHistogram = field(default_factory=TimeHistogram)  # gaps between a request's emissions
    host: TimeHistogram = field(default_factory=TimeHistogram)  # latency less the device's time, where it was measured
    batch: CountHistogram = field(default_factory=CountHistogram)  # rows of decode steps
    chunk: CountHistogram = field(default_factory=CountHistogram)  # chunk of decode steps
    num_decode_steps: int = 0
    num_prefill_steps: int = 0
    prefill_time: float = 0.0  # s
    decode_time: float = 0.0  # s
    tokens: int = 0  # positions computed in decode steps
    evicted: int = 0  # of `tokens`, those evicted in the second layer
    committed: int = 0  # positions committed in decode steps
    forwards: int = 0  # rows of decode steps: a sequence's forwards
    prefill_tokens: int = 0
    preemptions: int = 0
    page_time: float = 0.0  # sum over steps of pages held x latency (page-seconds)
    num_pages: int = 0  # the pool, summed over replicas
    max_waiting: int = 0

    def merge(self, other: "StepTotals") -> None:
        """Add another replica's totals to these."""
        for name in ("step_latency", "itl", "host", "batch", "chunk"):
            getattr(self, name).merge(getattr(other, name))
        for name in (
            "num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time", "tokens", "evicted", "committed",
            "forwards", "prefill_tokens", "preemptions", "page_time", "num_pages",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_waiting = max(self.max_waiting, other.max_waiting)


class RequestTable:
    """What became of every request of a run: one array a column of REQUEST_COLUMNS, written by the engine."""

    def __init__(self, num_requests: int) -> None:
        self.columns: dict[str, npt.NDArray[Any]] = {}
        for name, kind in REQUEST_COLUMNS.items():
            fill = np.nan if kind == "float64" else 0
            self.columns[name] = np.full(num_requests, fill, dtype=kind)
        self.columns["request"][:] = np.arange(num_requests)
        self.columns["replica"][:] = -1
        self.columns["status"][:] = STATUSES.index("unfinished")

    def __getitem__(self, name: str) -> "npt.NDArray[Any]":
        return self.columns[name]


def pack(marks: "npt.NDArray[np.bool_]") -> "npt.NDArray[np.uint64]":
    """Bit masks of rows of marks, [rows, width] to [rows, words]: bit p of word p // 64 is column p."""
    rows, width = marks.shape
    words = max(1, -(-width // 64))
    padded = np.zeros((rows, words * 64), np.bool_)
    padded[:, :width] = marks
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").reshape(rows, words)


def unpack(words: "npt.NDArray[np.uint64]", width: int) -> "npt.NDArray[np.bool_]":
    """The inverse of `pack` for rows of `width` columns."""
    rows = len(words)
    octets = np.ascontiguousarray(words, "<u8").view(np.uint8).reshape(rows, -1)
    return np.unpackbits(octets, axis=1, bitorder="little", count=width).astype(np.bool_)


Append = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


class StepRecorder:
    """Writes the journal: collects steps and hands them on in batches, so that a run's length costs no memory."""

    def __init__(self, append: Append, width: int, batch: int = 4096) -> None:
        self._append = append
        self._batch = batch
        self._words = max(1, -(-width // 64))
        self._columns = {name: np.zeros(batch, kind) for name, kind in STEP_COLUMNS.items()}
        self._offsets = np.zeros(batch + 1, np.int64)
        self._count = 0
        self._lists: dict[str, npt.NDArray[Any]] = {}
        self._grow(16 * batch)

    def record(self, replica: int, plan: StepPlan, outcome: StepOutcome, done: npt.NDArray[np.int32]) -> None:
        """Take down a step that has been committed."""
        f, n = plan.features, len(plan.requests)
        if self._count == self._batch:
            self.flush()
        i, at = self._count, int(self._offsets[self._count])
        if at + n > len(self._lists["requests"]):
            self._grow(2 * (at + n))
        gone, evicted = (0, 0, 0, 0), np.zeros_like(plan.window)
        if outcome.retained is not None:
            left, evicted = features_left(plan, outcome.retained), plan.window & ~outcome.retained
            gone = tuple(getattr(f, of) - getattr(left, of) for of in ("tokens", "sum_q_kv", "sum_kv", "sampled_rows"))
        values = (
            replica, plan.step, plan.now, outcome.latency, outcome.device, plan.prefill,
            f.batch, plan.chunk, f.tokens, f.sum_q_kv,
            f.sum_kv, f.head_rows, f.sampled_rows, f.num_forwards, outcome.committed.sum(), plan.waiting, plan.running,
            plan.pages, plan.submitted, len(done), len(plan.preempted),
            plan.evicting is not None, *gone,
        )  # fmt: skip
        for column, value in zip(self._columns.values(), values, strict=True):
            column[i] = value
        rows = (plan.requests, plan.phases, plan.num_tokens, pack(plan.window), pack(outcome.committed), pack(evicted))
        for column, values_of_rows in zip(self._lists.values(), rows, strict=True):
            column[at : at + n] = values_of_rows
        self._offsets[i + 1] = at + n
        self._count += 1

    def room(self, rows: int) -> Steps:
        """Where a leap of at least one step of so many rows writes."""
        if self._count == self._batch:
            self.flush()
        i, at = self._count, int(self._offsets[self._count])
        if at + rows > len(self._lists["requests"]):
            self._grow(2 * (at + rows))
        free = self._batch - i
        lists = (values[at:] for values in self._lists.values())
        return Steps(np.zeros((free, 2)), np.zeros((free, len(LEAP_COLUMNS)), np.int64), *lists)

    def leapt(
        self, steps: Steps, num_steps: int, rows: int, replica: int, first: int, waiting: int, running: int,
        submitted: int, done: int,
    ) -> None:  # fmt: skip
        """Take down a leap of `num_steps` steps of `rows` rows, the first being `first`; `done` end with the last."""
        i, end = self._count, self._count + num_steps
        c = self._columns
        known = {
            "replica": replica, "step": np.arange(first, first + num_steps), "prefill": False, "batch": rows,
            "num_forwards": 1, "waiting": waiting, "running": running, "submitted": submitted, "finished": 0,
            "preempted": 0, "device": np.nan,
            "start": steps.reals[:num_steps, 0], "latency": steps.reals[:num_steps, 1],
        }  # fmt: skip
        for k, name in enumerate(LEAP_COLUMNS):
            known[name] = steps.wholes[:num_steps, k]
        for name, value in known.items():
            c[name][i:end] = value
        if num_steps:
            c["finished"][end - 1] = done
        self._offsets[i + 1 : end + 1] = self._offsets[i] + rows * np.arange(1, num_steps + 1)
        self._count = end

    def flush(self) -> None:
        """Hand on what has been collected."""
        n = self._count
        if not n:
            return
        rows = int(self._offsets[n])
        offsets = self._offsets[: n + 1].astype(np.int32)
        lists = {}
        for name, values in self._lists.items():
            words = self._words if values.ndim == 2 else 1
            lists[name] = (values[:rows].reshape(-1).copy(), offsets * words)
        self._append({name: column[:n].copy() for name, column in self._columns.items()}, lists)
        self._count = 0

    def _grow(self, rows: int) -> None:
        for name, kind in STEP_LISTS.items():
            shape = (rows, self._words) if kind == "uint64" else (rows,)
            new = np.zeros(shape, kind)
            if name in self._lists:
                new[: len(self._lists[name])] = self._lists[name]
            self._lists[name] = new
