"""An engine's log next to a client's file: a journal of steps, and the delay between engine and client."""

import numpy as np

from ...engine.errors import DsimError
from ...engine.journal import STEP_COLUMNS, STEP_LISTS, pack
from ...engine.latency import Features
from ...engine.step import Phase
from ...profiler.logged import PHASES
from ...profiler.samples import Bools, Ints
from ...profiler.steplog import StepLog
from ...results.run import Array, Columns
from .match import Requested, places
from .read import ClientLog

Lists = dict[str, tuple[Array, Array]]  # name -> (values, offsets)
_PHASE = {"prefill": Phase.PREFILL, "decode": Phase.DENOISE, "denoise": Phase.DENOISE, "flush": Phase.FLUSH}


def journal_of(log: StepLog, index: Ints, zero: float) -> tuple[Columns, Lists] | None:
    """A log's steps as a journal's columns and lists; None without rows.

    index: the run's number of each logged request by arrival; -1: not in the run, and its steps are left out. zero: s,
    the run's start on the log's clock.
    """
    s, r = log.rows, log.requests
    place = np.full(int(r.request.max(initial=-1)) + 1, -1)
    place[r.request] = index
    who = place[s.request]
    if not len(who):
        return None
    rows = np.diff(s.offsets)
    step_of = np.repeat(np.arange(len(s)), rows)
    known = np.bincount(step_of, who < 0, len(s)) == 0
    if not known.any():
        return None
    kept = known[step_of]
    block = log.header.block_length
    window, commits = _marks(log)
    features = log.steps.features[s.line[known]]
    columns: Columns = {name: np.zeros(int(known.sum()), kind) for name, kind in STEP_COLUMNS.items()}
    values = dict(zip(Features._fields, features.T, strict=True))
    for name in Features._fields:
        if name in columns:
            columns[name][:] = values[name]
    columns["step"][:] = np.arange(len(columns["step"]))
    columns["start"][:] = s.start[known] - zero
    columns["latency"][:] = log.steps.latency[s.line[known]]
    columns["device"][:] = log.steps.device[s.line[known]]
    columns["prefill"][:] = values["prefill_tokens"] == values["tokens"]
    columns["chunk"][:] = np.where(columns["prefill"], 0, block)
    columns["committed"][:] = np.bincount(step_of, commits.sum(axis=1), len(s))[known]
    columns["waiting"][:], columns["pages"][:] = s.waiting[known], s.pages[known]
    columns["running"][:] = rows[known]
    mine = np.flatnonzero(index >= 0)
    columns["submitted"][:] = np.searchsorted(np.sort(r.arrival[mine]), s.start[known], side="right")
    ends = s.start[known] + columns["latency"]
    columns["finished"][:] = np.diff(np.searchsorted(np.sort(r.last_emission[mine]), ends, side="right"), prepend=0)
    offsets = np.concatenate([[0], np.cumsum(rows[known])])
    phases = np.array([_PHASE[name] for name in PHASES], np.uint8)[s.phase[kept]]
    words = pack(window[kept]).shape[1]
    lists: Lists = {
        "requests": (who[kept].astype(STEP_LISTS["requests"]), offsets), "phases": (phases, offsets),
        "num_tokens": (s.tokens[kept].astype(STEP_LISTS["num_tokens"]), offsets),
        **{name: (pack(marks[kept]).reshape(-1), offsets * words)
           for name, marks in (("window", window), ("commits", commits), ("evictions", np.zeros_like(window)))},
    }  # fmt: skip
    return columns, lists


def _marks(log: StepLog) -> tuple[Bools, Bools]:
    """The positions of its block that each row computed and committed.

    Without sequence lines, a block commits whole in its last denoising step before its emission.
    """
    s, block = log.rows, log.header.block_length
    window = np.zeros((len(s.request), block), np.bool_)
    commits = window.copy()
    denoise, flush = PHASES.index("denoise"), PHASES.index("flush")
    if block == 1:
        window[:, 0] = commits[:, 0] = s.emitted > 0
        return window, commits
    window[(s.phase == denoise) | (s.phase == flush)] = True
    if len(log.commits):
        numbers = np.repeat(s.number, np.diff(s.offsets))
        at = {key: i for i, key in enumerate(zip(log.commits.request.tolist(), log.commit_steps.tolist(), strict=True))}
        for row, key in enumerate(zip(s.request.tolist(), numbers.tolist(), strict=True)):
            if key in at:
                window[row], commits[row] = log.commits.window[at[key]], log.commits.committed[at[key]]
        return window, commits
    last: dict[int, int] = {}
    for row, (request, phase, emitted) in enumerate(
        zip(s.request.tolist(), s.phase.tolist(), s.emitted.tolist(), strict=True)
    ):
        if phase == denoise:
            last[request] = row
        if emitted and request in last:
            commits[last.pop(request)] = True
    return window, commits


def frontend_of(log: StepLog, client: ClientLog) -> float:
    """Time outside the engine (s): the median of the requests' ttft at the client minus that at the engine."""
    r = log.requests
    place = places(client, Requested("the log", r.arrival, r.input_length, r.output_length))
    inside = (r.first_emission - r.arrival)[place]
    outside = client.requests.first - client.requests.sent - inside
    if np.isnan(outside).all():
        raise DsimError(f"{client.path}: none of its {len(outside)} requests has its first token in the log")
    return max(0.0, float(np.nanmedian(outside)))
