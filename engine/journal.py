"""The journal: what every step planned and what came of it, as columns that either driver writes and any tool reads.

requests.parquet holds one row a request, steps.parquet one row a step. Times are seconds since the start of the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .histogram import CountHistogram, TimeHistogram
from .jit import rule
from .request import Request
from .state import PREFILL_STEP, ROWS, UNFINISHED, Asked
from .step import StepOutcome, StepPlan, features_left

STATUSES = ("completed", "rejected", "unfinished", "cancelled")

# One row a request, in the trace's order. NaN where the event never happened, -1 where no replica was chosen.
REQUEST_COLUMNS: dict[str, str] = {
    "request": "int32",  # index in the trace
    "replica": "int16",
    "status": "uint8",  # index into STATUSES
    "arrival": "float64",
    "input_length": "int32",
    "output_length": "int32",  # tokens of the answer
    "max_tokens": "int32",  # tokens asked for at most
    "limited": "bool",  # ... by the request itself; otherwise they are the answer's, which no scheduler knows
    "estimate": "int32",  # tokens of the answer that routers and policies of a user's own expected
    "canvas_length": "int32",  # positions of its canvases, where it asks for narrower ones; 0: the policy's
    "priority": "int32",  # that it came with; the lower, the sooner
    "deadline": "float64",  # s after its arrival by which its answer is wanted; NaN: none
    "scheduled": "float64",  # start of its first prefill
    "first_commit": "float64",  # end of the step that first committed one of its positions
    "first_block": "float64",  # first whole block ready
    "first_emission": "float64",
    "last_emission": "float64",
    "finish": "float64",  # of one that was cancelled: when it was
    "num_first": "int32",  # tokens in the first emission
    "num_tokens": "int32",  # tokens returned
    "num_emissions": "int32",
    "num_forwards": "int32",  # decode steps that it took part in without prefilling: 0 where its prefill made all of it
    "num_committed": "int32",  # positions committed, prefill's and the trimmed tail's included
    "num_computed": "int64",  # token positions that went through all layers in decode steps
    "num_preemptions": "int32",
}

# More of them where the policy keeps a prefix cache.
CACHED_COLUMNS = {"cached_tokens": "int32"}  # of the prompt, found in the cache when the request was first let in

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
    "window_q_kv": "int64",  # as sum_q_kv and sum_kv, of the keys that layers with a window see; 0 without such layers
    "window_kv": "int64",
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
    """The totals of a run's steps, in constant memory. Prefill steps count only where it says so."""

    step_latency: TimeHistogram = field(default_factory=TimeHistogram)  # decode steps
    itl: TimeHistogram = field(default_factory=TimeHistogram)  # gaps between a request's emissions
    host: TimeHistogram = field(default_factory=TimeHistogram)  # latency less the device's time, where it was measured
    batch: CountHistogram = field(default_factory=CountHistogram)  # rows of decode steps
    chunk: CountHistogram = field(default_factory=CountHistogram)  # chunk of decode steps
    num_decode_steps: int = 0
    num_prefill_steps: int = 0
    prefill_time: float = 0.0  # s
    decode_time: float = 0.0  # s
    end: float = 0.0  # s, of the last step that is over
    tokens: int = 0  # positions computed in decode steps, without those of rows that prefill
    evicted: int = 0  # of `tokens`, those evicted in the second layer
    committed: int = 0  # positions committed in decode steps, by rows that do not prefill
    forwards: int = 0  # rows of decode steps that do not prefill: a sequence's forwards
    prefill_tokens: int = 0
    preemptions: int = 0
    page_time: float = 0.0  # sum over steps of pages held x latency (page-seconds)
    num_pages: int = 0  # the pool, summed over replicas
    max_waiting: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in a prefix cache, as requests were let in for the first time
    prefix_hits: int = 0  # ... and found

    def merge(self, other: "StepTotals") -> None:
        """Add another replica's totals to these."""
        for name in ("step_latency", "itl", "host", "batch", "chunk"):
            getattr(self, name).merge(getattr(other, name))
        for name in (
            "num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time", "tokens", "evicted", "committed",
            "forwards", "prefill_tokens", "preemptions", "page_time", "num_pages", "prefix_queries", "prefix_hits",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_waiting = max(self.max_waiting, other.max_waiting)
        self.end = max(self.end, other.end)


# A column apart from the records: the trace's own where there is one, so that nothing is copied.
APART = ("request", "arrival", *Asked._fields)
# The others as records, larger fields first so that none is padded.
REQUEST = np.dtype(
    sorted(
        ((name, kind) for name, kind in REQUEST_COLUMNS.items() if name not in APART),
        key=lambda column: -np.dtype(column[1]).itemsize,
    ),
    align=True,
)
STEP = np.dtype(list(STEP_COLUMNS.items()), align=True)
ROW = np.dtype([(name, kind) for name, kind in STEP_LISTS.items() if kind != "uint64"], align=True)
WORDS = tuple(name for name, kind in STEP_LISTS.items() if kind == "uint64")


class RequestTable:
    """The fate of every request of a run: a record a request, written by the engine, and what each asked for.

    arrival and asked: columns of them that are known before, a trace's: they are read, and never copied.
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
        """The columns as they are now, those of REQUEST_COLUMNS."""
        return {name: self[name] for name in REQUEST_COLUMNS}

    def __getitem__(self, name: str) -> "npt.NDArray[Any]":
        if name in self._fields:
            return self._fields[name]
        if name == "request":
            return np.arange(len(self.rows), dtype=np.int32)
        return self._arrival if name == "arrival" else getattr(self._asked, name).astype(REQUEST_COLUMNS[name])

    @property
    def asked(self) -> Asked:
        """What the requests ask for, to be read."""
        return Asked(*(_read_only(column) for column in self._asked))

    @property
    def arrival(self) -> "npt.NDArray[np.float64]":
        """When the requests come (s), to be read."""
        return _read_only(self._arrival)

    def enter(self, request: Request, replica: int) -> None:
        """A request is submitted to a replica."""
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


def _read_only(column: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
    """The same memory, which nobody writes to through it: the one type of array that rules are compiled for."""
    column = column.view()
    column.setflags(write=False)
    return column


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


class Journal(NamedTuple):
    """Room for steps, as rules write them; empty where nobody keeps a journal."""

    steps: Any  # [steps] STEP
    rows: Any  # [rows] ROW, step after step
    words: Any  # [rows, 3, words] uint64: window, commits, evictions
    at: Any  # [1] how many steps and rows there are


_AT = np.dtype([("count", "i8"), ("rows", "i8")])


def _journal(steps: int, rows: int, words: int) -> Journal:
    return Journal(
        np.zeros(steps, STEP), np.zeros(rows, ROW), np.zeros((rows, len(WORDS), words), np.uint64), np.zeros(1, _AT)
    )  # fmt: skip


NO_JOURNAL = _journal(0, 0, 1)


@rule
def record_step(w: Any, j: Any) -> bool:
    """Take down the step in flight, whose outcome is known; False, and nothing done, where it has no room."""
    if len(j.steps) == 0:
        return True
    c, at = w.c[0], j.at[0]
    if at.count == len(j.steps) or at.rows + c.num_rows > len(j.rows):
        return False
    committed = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        row = j.rows[at.rows + i]
        row.requests = q.request
        row.phases = q.phase
        row.num_tokens = q.num_tokens
        words = j.words[at.rows + i]
        words[:] = 0
        for p in range(w.window.shape[1]):
            bit = np.uint64(1) << np.uint64(p % 64)
            if w.window[slot, p]:
                words[0, p // 64] |= bit
                if c.evicting and not w.retained[slot, p]:
                    words[2, p // 64] |= bit
            if w.committed[slot, p]:
                words[1, p // 64] |= bit
                committed += 1
    s = j.steps[at.count]
    s.replica = w.f[0].replica
    s.step = c.num_steps - 1
    s.start = c.now
    s.latency = c.latency
    s.device = np.nan
    s.prefill = c.kind == PREFILL_STEP
    s.batch = c.batch
    s.chunk = c.chunk
    s.tokens = c.tokens
    s.sum_q_kv = c.sum_q_kv
    s.sum_kv = c.sum_kv
    s.head_rows = c.head_rows
    s.sampled_rows = c.sampled_rows
    s.num_forwards = c.num_forwards
    s.committed = committed
    s.waiting = c.waiting
    s.running = c.running
    s.pages = c.pages
    s.submitted = c.submitted_then
    s.finished = 0
    s.preempted = c.num_preempted
    s.evicting = c.evicting
    s.evicted = c.tokens - c.left_tokens if c.evicting else 0
    s.evicted_q_kv = c.sum_q_kv - c.left_q_kv if c.evicting else 0
    s.evicted_kv = c.sum_kv - c.left_kv if c.evicting else 0
    s.evicted_sampled = c.sampled_rows - c.left_sampled if c.evicting else 0
    s.window_q_kv = c.window_q_kv
    s.window_kv = c.window_kv
    at.count += 1
    at.rows += c.num_rows
    return True


class StepRecorder:
    """Writes the journal: collects steps and hands them on in batches, so that a run's length costs no memory."""

    def __init__(self, append: Append, width: int, batch: int = 4096) -> None:
        self._append = append
        self._words = max(1, -(-width // 64))
        self.journal = _journal(batch, 16 * batch, self._words)

    def record(self, replica: int, plan: StepPlan, outcome: StepOutcome, done: npt.NDArray[np.int32]) -> None:
        """Take down a step that has been committed."""
        f, n = plan.features, len(plan.requests)
        self.make_room(n)
        j = self.journal
        i, at = (int(j.at[name][0]) for name in ("count", "rows"))
        gone, evicted = (0, 0, 0, 0), np.zeros_like(plan.window)
        if outcome.retained is not None:
            left, evicted = features_left(plan, outcome.retained), plan.window & ~outcome.retained
            gone = tuple(getattr(f, of) - getattr(left, of) for of in ("tokens", "sum_q_kv", "sum_kv", "sampled_rows"))
        j.steps[i] = (
            replica, plan.step, plan.now, outcome.latency, outcome.device, plan.prefill,
            f.batch, plan.chunk, f.tokens, f.sum_q_kv,
            f.sum_kv, f.head_rows, f.sampled_rows, f.num_forwards, outcome.committed.sum(), plan.waiting, plan.running,
            plan.pages, plan.submitted, len(done), len(plan.preempted),
            plan.evicting is not None, *gone, f.window_q_kv, f.window_kv,
        )  # fmt: skip
        rows = slice(at, at + n)
        for name in ROW.names or ():
            j.rows[name][rows] = getattr(plan, name)
        for k, marks in enumerate((plan.window, outcome.committed, evicted)):
            j.words[rows, k] = pack(marks)
        j.at["count"], j.at["rows"] = i + 1, at + n

    def make_room(self, rows: int) -> None:
        """Hand on what has been collected if a step of so many rows does not fit beside it."""
        j = self.journal
        if j.at["count"][0] == len(j.steps) or j.at["rows"][0] + rows > len(j.rows):
            self.flush()
        if rows > len(j.rows):
            self.journal = _journal(len(j.steps), 2 * rows, self._words)

    def flush(self) -> None:
        """Hand on what has been collected."""
        j = self.journal
        n, rows = (int(j.at[name][0]) for name in ("count", "rows"))
        if not n:
            return
        offsets = np.concatenate([[0], np.cumsum(j.steps["batch"][:n])]).astype(np.int32)
        lists = {}
        for name in STEP_LISTS:
            if name in WORDS:
                lists[name] = (j.words[:rows, WORDS.index(name)].reshape(-1).copy(), offsets * np.int32(self._words))
            else:
                lists[name] = (j.rows[name][:rows].copy(), offsets)
        self._append({name: j.steps[name][:n].copy() for name in STEP_COLUMNS}, lists)
        j.at[0] = (0, 0)
