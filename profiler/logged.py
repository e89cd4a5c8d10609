"""The lines of a step log, and its requests: arrivals, emissions, commits, and each canvas's steps."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ..engine.errors import ProfileError
from ..engine.jit import plain
from ..engine.latency import window_pairs
from ..engine.plain import Choice, Range
from ..files.read import shown
from .commit_log import CommitLog
from .samples import Bools, Floats, Ints

PHASES = ("prefill", "decode", "denoise", "flush")
ROW_LISTS = ("phases", "row_tokens", "row_keys", "emitted")  # of a step; one value is that of all rows
FEW_CANVASES = 30  # with fewer, a spread is unreliable
NO_LIMIT = np.iinfo(np.int64).max
# Small enough for sums, and for a journal's columns.
Tokens = Annotated[int, Range(0, 10**12)]
RowTokens = Annotated[int, Range(1, 10**12)]
NumRows = Annotated[int, Range(0, 2**31 - 1)]
SomeRows = Annotated[int, Range(1, 2**31 - 1)]
Pairs = Annotated[int, Range(0, 2**62)]  # query-key pairs and keys per step
Time = Annotated[float, Range(-1e9)]  # s; negative if received before the log was opened
_window_pairs = plain(window_pairs)


@dataclass(frozen=True)
class StepLine:
    """A step (docs/steplog.md); None: derived, or unknown."""

    step: int
    latency: Annotated[float, Range(0, 3600, above=True)]  # s: a longer step is a time in another unit
    batch: SomeRows
    tokens: SomeRows
    sum_kv: Pairs
    device: float | None = None  # s
    sum_q_kv: Pairs | None = None
    prefill_tokens: int = 0
    head_rows: NumRows | None = None
    sampled_rows: NumRows | None = None
    num_forwards: SomeRows = 1
    start: float | None = None  # s
    requests: tuple[int, ...] | None = None  # of each row, like the next four
    phases: tuple[Annotated[str, Choice(PHASES)], ...] | None = None
    row_tokens: tuple[RowTokens, ...] | None = None
    row_keys: tuple[RowTokens, ...] | None = None
    emitted: tuple[Tokens, ...] | None = None
    graph: bool | None = None
    waiting: int | None = None
    running: int | None = None
    pages: int | None = None
    discipline: Any = None  # answers of a policy in the engine


@dataclass(frozen=True)
class RequestLine:
    request: int
    input_length: Tokens
    id: Any = None
    output_length: Tokens | None = None
    received: Time | None = None
    arrival: Time | None = None
    hash_ids: Any = None
    block_size: Any = None
    diffusion_max_steps: RowTokens | None = None
    estimated_length: Any = None
    deadline: Any = None
    slo_class: Any = None


@dataclass(frozen=True)
class SequenceLine:
    request: int
    step: int
    block_start: int
    committed: tuple[int, ...]  # positions in the block, as in `computed`
    computed: tuple[int, ...] | None = None  # None: all


@dataclass(frozen=True)
class FinishLine:
    request: int
    time: float  # s


@dataclass(frozen=True, eq=False)
class Canvases:
    """An entry for each emitted canvas, in a request's order."""

    request: Ints
    num_steps: Ints  # denoise and flush rows, up to the emitting one
    flushed: Bools  # the emitting row is a flush
    limit: Ints | None = None  # steps that its request allows, NO_LIMIT where it sets none; None: no request sets one


@dataclass(frozen=True, eq=False)
class LoggedSteps:
    """Steps whose rows are in the log, in order; a step's rows are consecutive."""

    number: Ints  # as in the log
    line: Ints  # index into the log's steps
    start: Floats
    waiting: Ints  # 0 if not in the log; so is `pages`
    pages: Ints
    offsets: Ints  # [steps + 1] start of each step's rows
    request: Ints  # per row, like the next three; phase: index into PHASES
    phase: npt.NDArray[np.uint8]
    tokens: Ints
    emitted: Ints
    discipline: tuple[Any, ...]  # per step: answers of a policy in the engine, or None

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True, eq=False)
class Logged:
    """An entry per request, by arrival. Times: s since the log was opened; NaN: not in the log."""

    request: Ints
    input_length: Ints
    output_length: Ints  # tokens asked for; if unknown, emitted
    arrival: Floats  # at the engine
    scheduled: Floats  # start of its first step
    first_emission: Floats
    last_emission: Floats
    finish: Floats  # NaN: unfinished at the log's end
    num_first: Ints
    num_tokens: Ints
    num_emissions: Ints
    gaps: Floats  # s between a request's emissions, all requests
    canvases: Canvases

    def __len__(self) -> int:
        return len(self.request)


@dataclass
class _Request:
    """A request so far, with the fields of Logged; NaN: not yet."""

    request: int
    input_length: int
    requested_length: int | None  # output tokens
    arrival: float
    max_steps: int | None  # of a canvas
    masks: Bools  # of its current block
    block_start: int = -1
    scheduled: float = math.nan
    first_emission: float = math.nan
    last_emission: float = math.nan
    finish: float = math.nan
    num_first: int = 0
    num_tokens: int = 0
    num_emissions: int = 0
    num_denoised: int = 0  # steps of its current canvas

    @property
    def output_length(self) -> int:
        return self.num_tokens if self.requested_length is None else self.requested_length


class Requests:
    """Requests, updated line by line. window: of windowed layers, in tokens; 0: none."""

    def __init__(self, window: int, block_length: int) -> None:
        self._window, self._block = window, block_length
        self._requests: dict[int, _Request] = {}
        self._gaps: list[float] = []
        self._canvases: list[tuple[int, int, bool, int]] = []
        self._starts: list[float] = []
        self._steps: list[tuple[int, ...]] = []
        self._answers: list[Any] = []
        self._step_rows: list[tuple[int, int, int, int]] = []
        self._ends = [0]
        self._commits: list[tuple[int, int, int]] = []
        self._marks: list[Bools] = []  # per row of `_commits`: masks, computed, committed

    def open(self, place: str, line: RequestLine) -> None:
        if line.request in self._requests:
            raise ProfileError(f"{place}: request {line.request} is given twice, expected one line a request")
        self._requests[line.request] = _Request(
            request=line.request, input_length=line.input_length, requested_length=line.output_length,
            arrival=math.nan if line.arrival is None else line.arrival, max_steps=line.diffusion_max_steps,
            masks=np.zeros(self._block, np.bool_),
        )  # fmt: skip

    def step(self, place: str, line: StepLine, index: int) -> tuple[int, int]:
        """Add a step's rows; returns its query-key pairs and keys in windowed layers."""
        if line.start is None:
            raise fault(place, "start", None, "a number")
        if self._starts and line.start < self._starts[-1]:
            raise fault(place, "start", line.start, f"at least {self._starts[-1]:g}, that of the step before")
        self._starts.append(line.start)
        self._steps.append((line.step, index, line.waiting or 0, line.pages or 0))
        self._answers.append(line.discipline)
        self._ends.append(self._ends[-1] + line.batch)
        columns = [getattr(line, name) for name in ("requests", *ROW_LISTS)]
        for name, column in zip(("requests", *ROW_LISTS), columns, strict=True):
            if column is None or len(column) != line.batch:
                num = "no" if column is None else len(column)
                raise ProfileError(f"{place}: {name} has {num} values, expected {line.batch}")
        window_q_kv = window_kv = 0
        end = line.start + line.latency
        for i, (number, phase, tokens, keys, emitted) in enumerate(zip(*columns, strict=True)):
            if keys < tokens:
                raise fault(place, f"row_keys[{i}]", keys, f"at least row_tokens[{i}], {tokens}")
            if self._window:
                causal = self._block == 1 or phase in ("prefill", "flush")
                window_q_kv += _window_pairs(tokens, keys, self._window, causal)
                window_kv += min(keys, self._window + tokens)
            request = self._named(place, f"requests[{i}]", number)
            if math.isnan(request.scheduled):
                request.scheduled = line.start
            self._step_rows.append((number, PHASES.index(phase), tokens, emitted))
            if phase in ("denoise", "flush"):
                request.num_denoised += 1
            elif phase == "prefill":  # preempted: it restarts its canvas
                request.num_denoised = 0
            if emitted:
                self._emit(place, request, end, emitted, phase)
        return window_q_kv, window_kv

    def _emit(self, place: str, request: _Request, end: float, tokens: int, phase: str) -> None:
        before = request.last_emission if request.num_emissions else request.arrival
        if end < before:
            expected = f"at least {before:g}, when request {request.request} came or emitted before"
            raise fault(place, "end", end, expected)
        if request.num_emissions:
            self._gaps.append(end - request.last_emission)
        else:
            request.first_emission, request.num_first = end, tokens
        if request.num_denoised:
            limit = NO_LIMIT if request.max_steps is None else request.max_steps
            self._canvases.append((request.request, request.num_denoised, phase == "flush", limit))
        request.num_denoised = 0
        request.last_emission = end
        request.num_tokens += tokens
        request.num_emissions += 1

    def sequence(self, place: str, line: SequenceLine) -> None:
        """Apply a step's commits to a request's block."""
        start, size = line.block_start, self._block
        request = self._named(place, "request", line.request)
        prompt = request.input_length
        if start % size or start < prompt // size * size:
            raise fault(place, "block_start", start, f"a multiple of {size} from {prompt // size * size} on")
        if start != request.block_start:
            before = request.block_start
            if start < before:
                raise fault(place, "block_start", start, f"at least {before}, the block of the line before")
            if request.masks.any():
                num = int(request.masks.sum())
                raise fault(place, "block_start", start, f"{before}, whose block has {num} masks left")
            request.block_start, request.masks = start, np.arange(start, start + size) >= prompt
        masks, committed = request.masks, self._positions(place, "committed", line.committed)
        computed = np.ones(size, np.bool_)
        if line.computed is not None:
            computed = self._positions(place, "computed", line.computed)
        wrong = np.flatnonzero(committed & ~(computed & masks))
        if len(wrong):
            state = "a mask" if computed[wrong[0]] else "computed"
            raise ProfileError(f"{place}: committed holds {wrong[0]}, expected a position that is {state}")
        request.masks = masks & ~committed
        if (computed & masks).any():
            self._commits.append((line.request, start, line.step))
            self._marks.append(np.stack([masks, computed & masks, committed]))

    def finish(self, place: str, line: FinishLine) -> None:
        self._named(place, "request", line.request).finish = line.time

    def read(self) -> Logged:
        requests = sorted(
            self._requests.values(), key=lambda r: (0.0 if math.isnan(r.arrival) else r.arrival, r.request)
        )
        times = ("arrival", "scheduled", "first_emission", "last_emission", "finish")
        counts = ("request", "input_length", "output_length", "num_first", "num_tokens", "num_emissions")
        columns: dict[str, Any] = {
            name: np.array([getattr(request, name) for request in requests], kind)
            for names, kind in ((times, np.float64), (counts, np.int64))
            for name in names
        }
        number, num_steps, flushed, limit = np.array(self._canvases, np.int64).reshape(-1, 4).T
        has_limits = any(request.max_steps is not None for request in requests)
        canvases = Canvases(number, num_steps, flushed.astype(np.bool_), limit if has_limits else None)
        return Logged(**columns, gaps=np.array(self._gaps), canvases=canvases)

    def steps(self) -> LoggedSteps:
        """Steps that named their rows."""
        number, line, waiting, pages = np.array(self._steps, np.int64).reshape(-1, 4).T
        request, phase, tokens, emitted = np.array(self._step_rows, np.int64).reshape(-1, 4).T
        return LoggedSteps(
            number=number,
            line=line,
            start=np.array(self._starts),
            waiting=waiting,
            pages=pages,
            offsets=np.array(self._ends),
            request=request,
            phase=phase.astype(np.uint8),
            tokens=tokens,
            emitted=emitted,
            discipline=tuple(self._answers),
        )

    def commits(self) -> tuple[CommitLog, Ints]:
        """The commits, and each row's step number."""
        request, start, number = np.array(self._commits, np.int64).reshape(-1, 3).T
        marks = np.array(self._marks, np.bool_).reshape(-1, 3, self._block)
        masks = {"masked": marks[:, 0], "window": marks[:, 1], "committed": marks[:, 2]}
        return CommitLog(block_length=self._block, request=request, block_start=start, **masks), number

    def _named(self, place: str, key: str, number: int) -> _Request:
        if number not in self._requests:
            raise fault(place, key, number, "one that a request line has named before")
        return self._requests[number]

    def _positions(self, place: str, key: str, positions: tuple[int, ...]) -> Bools:
        """Mask of the positions of the block, from 0."""
        marks = np.zeros(self._block, np.bool_)
        for i, position in enumerate(positions):
            if position >= self._block:
                raise fault(place, f"{key}[{i}]", position, f"0 to {self._block - 1}")
            marks[position] = True
        return marks


def fault(place: str, key: str, value: object, expected: str) -> ProfileError:
    return ProfileError(f"{place}: {key} is {'missing' if value is None else shown(value)}, expected {expected}")
