"""The journal: every step's plan and outcome, in columns that the twin and a device write alike.

requests.parquet: a row a request; steps.parquet: a row a step. Times are s since the run's start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .histogram import CountHistogram, TimeHistogram
from .jit import rule
from .records import F8, I2, I4, I8, U1, Bool, Record, Table, columns_of, dtype_of, table
from .request import Request
from .state import PREFILL_STEP, ROWS, UNFINISHED, AnyPolicy, Asked, Replica, RequestRow, read_only
from .step import StepOutcome, StepPlan, features_left

STATUSES = ("completed", "rejected", "unfinished", "cancelled")

# Sums of a step and the columns of their evicted part.
EVICTED = {"tokens": "evicted", "sum_q_kv": "evicted_q_kv", "sum_kv": "evicted_kv", "sampled_rows": "evicted_sampled"}

# In no journal, or only in those of runs where requests move.
_APART = ("slo_class", "arrived", "reserved", "found")
REQUEST_COLUMNS = {name: kind for name, kind in columns_of(RequestRow) if name not in _APART}

CACHED_COLUMNS = {"cached_tokens": "int32"}  # prompt tokens in the cache at first admission

# With links between pools: one replica may prefill a request, another decode it. Times in s; NaN: did not happen.
MOVE_COLUMNS = {
    "prefill_replica": "int16",  # -1: none, `replica` did all
    "prefill_tokens": "int32",  # prompt tokens computed there
    "prefill_scheduled": "float64",  # start of the prefill
    "prefill_finish": "float64",
    "reserved": "float64",  # pages of `replica` were reserved
    "pages_reserved": "int32",
    "transfer_start": "float64",
    "released": "float64",  # `prefill_replica` freed the pages kept for sending
    "pages_kept": "int32",
    "submitted": "float64",  # handed to `replica`, as its KV arrived
    "arrived": "int32",  # prompt tokens whose KV arrived then; 0: none, or the lease ran out
}
# If a decoding pool has a prefix cache.
SENT_COLUMNS = {
    "sent": "int32"  # tokens of `arrived` sent over the link; the rest was cached
}


class StepRow(Record):
    """A row of steps.parquet, in the order of begin on each replica."""

    replica: I2
    step: I4  # from 0 on each replica
    start: F8
    latency: F8
    device: F8  # s of the latency that the device was busy; NaN: not measured
    prefill: Bool  # else a decode step
    batch: I4  # rows computed
    chunk: I4  # most positions a row may compute; 0 in prefill
    tokens: I4  # query positions
    sum_q_kv: I8
    sum_kv: I8
    head_rows: I4
    sampled_rows: I4
    num_forwards: I4
    committed: I4  # positions committed
    waiting: I4  # requests waiting at its begin
    running: I4  # requests running at its begin
    pages: I4  # KV pages held while it ran
    submitted: I4  # requests submitted before it was planned
    finished: I4  # requests that ended with it
    preempted: I4  # requests sent back to the queue as it began, by the next step's decision if decided ahead
    continues: Bool  # the host planned it with the step before
    evicting: Bool  # the second layer may evict
    evicted: I4  # evicted part of `tokens` and `head_rows`; next, of the other sums
    evicted_q_kv: I8
    evicted_kv: I8
    evicted_sampled: I4
    window_q_kv: I8  # as sum_q_kv and sum_kv, in layers with a window; 0: none
    window_kv: I8
    draft_tokens: I4  # positions of the draft forward behind it; 0: none
    threshold: F8  # of a decode step that chose it; NaN: did not


CHOICE_COLUMNS = {"threshold": "float64"}  # in files of runs whose policies choose one each step
STEP_COLUMNS = {name: kind for name, kind in columns_of(StepRow) if name not in CHOICE_COLUMNS}
MORE_COLUMNS = CACHED_COLUMNS | MOVE_COLUMNS | SENT_COLUMNS | CHOICE_COLUMNS


class RowOfStep(Record):
    requests: I4
    phases: U1
    num_tokens: I4


# Bit masks of a row's positions: bit p of word p // 64 is position p.
WORDS = ("window", "commits", "evictions")  # computed; committed; evicted of the window
WINDOW, COMMITS, EVICTIONS = range(len(WORDS))
STEP_LISTS = dict(columns_of(RowOfStep)) | dict.fromkeys(WORDS, "uint64")


@dataclass
class StepTotals:
    """Totals of a run's steps, in constant memory."""

    step_latency: TimeHistogram = field(default_factory=TimeHistogram)  # decode steps
    itl: TimeHistogram = field(default_factory=TimeHistogram)  # gaps between a request's emissions
    host: TimeHistogram = field(default_factory=TimeHistogram)  # latency less the device's time, where measured
    batch: CountHistogram = field(default_factory=CountHistogram)  # rows of decode steps
    chunk: CountHistogram = field(default_factory=CountHistogram)  # of decode steps
    num_decode_steps: int = 0
    num_prefill_steps: int = 0
    prefill_time: float = 0.0  # s
    decode_time: float = 0.0  # s
    end: float = 0.0  # s, of the last step
    tokens: int = 0  # positions of decode steps, without prefilling rows
    evicted: int = 0  # of `tokens`, in the second layer
    committed: int = 0  # in decode steps, by rows that do not prefill
    forwards: int = 0  # rows of decode steps that do not prefill
    prefill_tokens: int = 0
    preemptions: int = 0
    page_time: float = 0.0  # pages held x latency, over all steps (page-seconds)
    num_pages: int = 0  # summed over replicas
    max_waiting: int = 0
    prefix_queries: int = 0  # prompt tokens looked up at first admissions
    prefix_hits: int = 0  # ... and found

    def merge(self, other: "StepTotals") -> None:
        for name, value in vars(other).items():
            total = getattr(self, name)
            if name in ("max_waiting", "end"):
                setattr(self, name, max(total, value))
            elif isinstance(value, int | float):
                setattr(self, name, total + value)
            else:  # a histogram
                total.merge(value)


# Not in the records: the trace's arrays are used without a copy.
APART = ("request", "arrival", *Asked._fields)
# Larger fields first, to avoid padding.
REQUEST = np.dtype(
    sorted(
        ((name, kind) for name, kind in columns_of(RequestRow) if name not in APART),
        key=lambda column: -np.dtype(column[1]).itemsize,
    ),
    align=True,
)
STEP, ROW = dtype_of(StepRow), dtype_of(RowOfStep)


class RequestTable:
    """Every request's outcome, written by the engine, and the lengths it asked for.

    arrival, asked: a trace's columns, read without a copy; without them `enter` fills the table's own.
    """

    def __init__(self, num_requests: int, arrival: Any = None, asked: Asked | None = None) -> None:
        self.rows = np.zeros(num_requests, REQUEST)
        self._fields = {name: self.rows[name] for name in REQUEST.names or ()}
        for name, column in self._fields.items():
            if REQUEST_COLUMNS.get(name) == "float64":
                column[:] = np.nan
        self._fields["replica"][:] = -1
        self._fields["status"][:] = UNFINISHED
        self._known = arrival is not None, asked is not None
        self._arrival = np.full(num_requests, np.nan) if arrival is None else arrival
        self._asked = Asked(*np.zeros((len(Asked._fields), num_requests), np.int64)) if asked is None else asked

    @property
    def columns(self) -> "dict[str, npt.NDArray[Any]]":
        return {name: self[name] for name in REQUEST_COLUMNS}

    def __getitem__(self, name: str) -> "npt.NDArray[Any]":
        if name in self._fields:
            return self._fields[name]
        if name == "request":
            return np.arange(len(self.rows), dtype=np.int32)
        return self._arrival if name == "arrival" else getattr(self._asked, name).astype(REQUEST_COLUMNS[name])

    @property
    def asked(self) -> Asked:
        """Read-only."""
        return Asked(*(read_only(column) for column in self._asked))

    @property
    def arrival(self) -> "npt.NDArray[np.float64]":
        """s, read-only."""
        return read_only(self._arrival)

    def enter(self, request: Request, replica: int) -> None:
        i = request.index
        self._fields["replica"][i] = replica
        arrival_known, asked_known = self._known
        if not arrival_known:
            self._arrival[i] = request.arrival
        if not asked_known:
            self._asked.input_length[i] = request.input_length
            self._asked.output_length[i] = request.output_length
            self._asked.max_tokens[i] = request.limit
            self._asked.estimate[i] = request.expected


def pack(marks: "npt.NDArray[np.bool_]") -> "npt.NDArray[np.uint64]":
    """[rows, width] marks as [rows, words] bit masks."""
    rows, width = marks.shape
    words = max(1, -(-width // 64))
    padded = np.zeros((rows, words * 64), np.bool_)
    padded[:, :width] = marks
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").reshape(rows, words)


def unpack(words: "npt.NDArray[np.uint64]", width: int) -> "npt.NDArray[np.bool_]":
    """Inverse of `pack`."""
    rows = len(words)
    octets = np.ascontiguousarray(words, "<u8").view(np.uint8).reshape(rows, -1)
    return np.unpackbits(octets, axis=1, bitorder="little", count=width).astype(np.bool_)


Append = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


class Filled(Record):
    steps: I8
    rows: I8


class Journal(NamedTuple):
    """Room for steps, filled by rules; empty where no journal is kept."""

    steps: Table[StepRow]  # [steps]
    rows: Table[RowOfStep]  # [rows] step after step
    words: npt.NDArray[np.uint64]  # [rows, 3, words] of WORDS
    filled: Table[Filled]  # [1]


def _journal(steps: int, rows: int, words: int) -> Journal:
    return Journal(
        table(np.zeros(steps, STEP)), table(np.zeros(rows, ROW)), np.zeros((rows, len(WORDS), words), np.uint64),
        table(np.zeros(1, dtype_of(Filled))),
    )  # fmt: skip


NO_JOURNAL = _journal(0, 0, 1)


@rule
def record_step(replica: Replica, policy: AnyPolicy, journal: Journal) -> bool:
    """Record the step in flight with its outcome; False, without effect, if the journal is full."""
    if len(journal.steps) == 0:
        return True
    counters, filled = replica.counters, journal.filled[0]
    if filled.steps == len(journal.steps) or filled.rows + counters.num_rows > len(journal.rows):
        return False
    committed = 0
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence = replica.sequences[slot]
        row = journal.rows[filled.rows + i]
        row.requests = sequence.request
        row.phases = sequence.phase
        row.num_tokens = sequence.num_tokens
        words = journal.words[filled.rows + i]
        words[:] = 0
        for p in range(replica.window.shape[1]):
            bit = np.uint64(1) << np.uint64(p % 64)
            if replica.window[slot, p]:
                words[WINDOW, p // 64] |= bit
                if counters.evicting and not replica.retained[slot, p]:
                    words[EVICTIONS, p // 64] |= bit
            if replica.committed[slot, p]:
                words[COMMITS, p // 64] |= bit
                committed += 1
    step = journal.steps[filled.steps]
    step.replica = replica.fixed.replica
    step.step = counters.num_steps - 1
    step.start = counters.now
    step.latency = counters.latency
    step.device = np.nan
    step.prefill = counters.kind == PREFILL_STEP
    step.batch = counters.batch
    step.chunk = counters.chunk
    step.tokens = counters.tokens
    step.sum_q_kv = counters.sum_q_kv
    step.sum_kv = counters.sum_kv
    step.head_rows = counters.head_rows
    step.sampled_rows = counters.sampled_rows
    step.num_forwards = counters.num_forwards
    step.committed = committed
    step.waiting = counters.waiting
    step.running = counters.running
    step.pages = counters.pages
    step.submitted = counters.submitted_then
    step.finished = 0
    step.preempted = counters.num_preempted
    step.continues = counters.continues
    step.evicting = counters.evicting
    step.evicted = counters.tokens - counters.left_tokens if counters.evicting else 0
    step.evicted_q_kv = counters.sum_q_kv - counters.left_q_kv if counters.evicting else 0
    step.evicted_kv = counters.sum_kv - counters.left_kv if counters.evicting else 0
    step.evicted_sampled = counters.sampled_rows - counters.left_sampled if counters.evicting else 0
    step.window_q_kv = counters.window_q_kv
    step.window_kv = counters.window_kv
    step.draft_tokens = counters.draft_tokens
    step.threshold = np.nan if step.prefill else policy.thresholds[counters.threshold]
    filled.steps += 1
    filled.rows += counters.num_rows
    return True


class StepRecorder:
    """Collects steps and appends them in batches, in constant memory."""

    def __init__(self, append: Append, width: int, batch: int = 4096) -> None:
        self._append = append
        self._words = max(1, -(-width // 64))
        self.journal = _journal(batch, 16 * batch, self._words)

    def record(self, replica: int, plan: StepPlan, outcome: StepOutcome, done: npt.NDArray[np.int32]) -> None:
        n = len(plan.requests)
        self.make_room(n)
        j: Any = self.journal
        i, first = (int(n) for n in j.filled[0])
        values = plan.features._asdict() | {name: getattr(plan, name) for name in STEP_COLUMNS if hasattr(plan, name)}
        values |= {
            "replica": replica,
            "start": plan.now,
            "latency": outcome.latency,
            "device": outcome.device,
            "committed": outcome.committed.sum(),
            "finished": len(done),
            "preempted": len(plan.preempted),
            "continues": plan.features.continues,
            "evicting": plan.evicting is not None,
            "threshold": np.nan,
        }
        evicted = np.zeros_like(plan.window)
        if outcome.retained is not None:
            late, evicted = features_left(plan, outcome.retained), plan.window & ~outcome.retained
            for name, column in EVICTED.items():
                values[column] = values[name] - getattr(late, name)
        if plan.threshold is not None and not plan.prefill:
            values["threshold"] = plan.threshold
        for name in STEP.names or ():
            j.steps[name][i] = values.get(name, 0)
        rows = slice(first, first + n)
        for name in ROW.names or ():
            j.rows[name][rows] = getattr(plan, name)
        for k, marks in enumerate((plan.window, outcome.committed, evicted)):
            j.words[rows, k] = pack(marks)
        j.filled[0] = (i + 1, first + n)

    def make_room(self, rows: int) -> None:
        """Flush or enlarge the journal if a step of `rows` rows does not fit."""
        j: Any = self.journal
        if j.filled[0].steps == len(j.steps) or j.filled[0].rows + rows > len(j.rows):
            self.flush()
        if rows > len(j.rows):
            self.journal = _journal(len(j.steps), 2 * rows, self._words)

    def flush(self) -> None:
        j: Any = self.journal
        n, rows = (int(n) for n in j.filled[0])
        if not n:
            return
        offsets = np.concatenate([[0], np.cumsum(j.steps["batch"][:n])]).astype(np.int32)
        lists = {}
        for name in STEP_LISTS:
            if name in WORDS:
                lists[name] = (j.words[:rows, WORDS.index(name)].reshape(-1).copy(), offsets * np.int32(self._words))
            else:
                lists[name] = (j.rows[name][:rows].copy(), offsets)
        j.filled[0] = (0, 0)  # a batch that fails is not written again
        self._append({name: j.steps[name][:n].copy() for name in STEP.names or ()}, lists)
