"""A step log's requests: arrivals, emissions, and each canvas's steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.jit import plain
from ..engine.latency import window_pairs
from ..engine.plain import Choice, Range
from ..files.schema import FileObject
from .samples import Bools, Floats, Ints

TOKENS, ROW_TOKENS = Range(0, 10**12), Range(1, 10**12)  # per request and row, small enough for sums
SINCE = Range(-1e9)  # s; negative if received before the log was opened
PHASES = ("prefill", "decode", "denoise", "flush")
_window_pairs = plain(window_pairs)


FEW_CANVASES = 30  # with fewer, a spread is unreliable
NO_LIMIT = np.iinfo(np.int64).max


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

    def __len__(self) -> int:
        return len(self.number)


def blocks_done(steps: LoggedSteps, num_lines: int, block_length: int) -> Floats:
    """Blocks that each step of the log completes [num_lines], by the tokens that rows emit.

    A flush emits the block that its request's previous row completed. All 0 if blocks are emitted in parts.
    """
    found = np.zeros(num_lines)
    row_step = np.repeat(np.arange(len(steps)), np.diff(steps.offsets))
    order = np.lexsort((row_step, steps.request))
    before = np.empty(len(order), np.int64)  # the request's previous row, or the row itself if it is the first
    same = np.append(False, np.diff(steps.request[order]) == 0)
    before[order] = np.where(same, np.roll(order, 1), order)
    emits = np.flatnonzero(steps.emitted > 0)
    requests, emissions = np.unique(steps.request[emits], return_counts=True)
    tokens = np.bincount(np.searchsorted(requests, steps.request[emits]), steps.emitted[emits], len(requests))
    if block_length == 1 or (emissions > tokens // block_length + 2).any():
        return found
    flushed = steps.phase[emits] == PHASES.index("flush")
    rows = np.where(flushed, before[emits], emits)
    np.add.at(found, steps.line[row_step[rows]], 1.0)
    return found


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


class Requests:
    """Requests, updated line by line. window: of windowed layers, in tokens; 0: none."""

    def __init__(self, window: int, block_length: int) -> None:
        self._window, self._one = window, block_length == 1
        self._rows: dict[int, dict[str, float]] = {}
        self._gaps: list[float] = []
        self._denoised: dict[int, int] = {}  # by request: its current canvas's steps so far
        self._canvases: list[tuple[int, int, bool]] = []
        self._limits: dict[int, int] = {}  # by request: steps that a canvas may take
        self._starts: list[float] = []
        self._steps: list[tuple[int, ...]] = []
        self._step_rows: list[tuple[int, int, int, int]] = []
        self._ends = [0]

    def open(self, s: FileObject, request: int, input_length: int) -> None:
        row = {"input_length": float(input_length), "num_first": 0.0, "num_tokens": 0.0, "num_emissions": 0.0}
        for name in ("received", "arrival"):
            if not s.is_null(name):
                row[name] = s.number(name, SINCE)
        if not s.is_null("output_length"):
            row["output_length"] = float(s.integer("output_length", TOKENS))
        if not s.is_null("diffusion_max_steps"):
            self._limits[request] = s.integer("diffusion_max_steps", ROW_TOKENS)
        self._rows[request] = row

    def step(self, s: FileObject, start: float, end: float, batch: int, line: int) -> tuple[int, int]:
        """Add a step's rows; returns its query-key pairs and keys in windowed layers."""
        if self._starts and start < self._starts[-1]:
            raise s.error("start", start, f"at least {self._starts[-1]:g}, that of the step before")
        known = [0 if s.is_null(name) else s.integer(name) for name in ("waiting", "pages")]
        self._starts.append(start)
        self._steps.append((s.integer("step"), line, *known))
        self._ends.append(self._ends[-1] + batch)
        for name in ("row_tokens", "row_keys", "emitted", "phases"):
            if not isinstance(s.values[name], list | None):  # one value for all rows
                s.values[name] = [s.values[name]] * batch
        for name in ("requests", "row_tokens", "row_keys", "emitted", "phases"):
            s.items(name, batch)
        phases = s.get("phases", list[str], Choice(PHASES))
        requests, emissions = s.get("requests", list[int]), s.get("emitted", list[int], TOKENS)
        row_tokens, row_keys = (s.get(name, list[int], ROW_TOKENS) for name in ("row_tokens", "row_keys"))
        window_q_kv = window_kv = 0
        rows = zip(phases, requests, row_tokens, row_keys, emissions, strict=True)
        for i, (phase, request, tokens, keys, emitted) in enumerate(rows):
            if keys < tokens:
                raise s.error(f"row_keys[{i}]", keys, f"at least row_tokens[{i}], {tokens}")
            if self._window:
                window_q_kv += _window_pairs(tokens, keys, self._window, self._one or phase in ("prefill", "flush"))
                window_kv += min(keys, self._window + tokens)
            row = self._rows.get(request)
            if row is None:
                raise s.error(f"requests[{i}]", request, "one that a request line has named before")
            row.setdefault("scheduled", start)
            self._step_rows.append((request, PHASES.index(phase), tokens, emitted))
            if phase in ("denoise", "flush"):
                self._denoised[request] = self._denoised.get(request, 0) + 1
            elif phase == "prefill":  # preempted: it restarts its canvas
                self._denoised.pop(request, None)
            if not emitted:
                continue
            if end < (since := row.get("last_emission", row.get("arrival", end))):
                raise s.error("end", end, f"at least {since:g}, when request {request} came or emitted before")
            if "last_emission" in row:
                self._gaps.append(end - row["last_emission"])
            else:
                row["first_emission"], row["num_first"] = end, float(emitted)
            if request in self._denoised:
                self._canvases.append((request, self._denoised.pop(request), phase == "flush"))
            row["last_emission"] = end
            row["num_tokens"] += emitted
            row["num_emissions"] += 1
        return window_q_kv, window_kv

    def finish(self, s: FileObject) -> None:
        request = s.integer("request")
        if request not in self._rows:
            raise s.error("request", request, "one that a request line has named before")
        self._rows[request]["finish"] = s.number("time")

    def read(self) -> Logged:
        rows = sorted(self._rows.items(), key=lambda item: (item[1].get("arrival", 0.0), item[0]))
        times = ("arrival", "scheduled", "first_emission", "last_emission", "finish")
        counts = ("input_length", "output_length", "num_first", "num_tokens", "num_emissions")
        columns: dict[str, Any] = {
            name: np.array([row.get(name, np.nan) for _, row in rows], np.float64) for name in (*times, *counts)
        }
        asked = columns["output_length"]
        columns["output_length"] = np.where(np.isnan(asked), columns["num_tokens"], asked)
        columns |= {name: columns[name].astype(np.int64) for name in counts}
        request, num_steps, flushed = np.array(self._canvases, np.int64).reshape(-1, 3).T
        limit = np.array([self._limits.get(i, NO_LIMIT) for i in request.tolist()]) if self._limits else None
        return Logged(
            request=np.array([request for request, _ in rows], np.int64),
            **columns,
            gaps=np.array(self._gaps),
            canvases=Canvases(request, num_steps, flushed.astype(np.bool_), limit),
        )

    def steps(self) -> LoggedSteps:
        """Steps that named their rows."""
        number, line, waiting, pages = np.array(self._steps, np.int64).reshape(-1, 4).T
        request, phase, tokens, emitted = np.array(self._step_rows, np.int64).reshape(-1, 4).T
        return LoggedSteps(
            number, line, np.array(self._starts), waiting, pages, np.array(self._ends), request,
            phase.astype(np.uint8), tokens, emitted,
        )  # fmt: skip
