"""An engine's log next to a client's file: a journal of steps, and the delay between engine and client."""

from typing import Any

import numpy as np

from ...engine.errors import DsimError
from ...engine.journal import STEP_COLUMNS, STEP_LISTS, pack
from ...engine.latency import Features
from ...engine.step import Phase
from ...profiler.logged import PHASES
from ...profiler.samples import Bools, Ints
from ...profiler.steplog import StepLog
from ...results.run import Array, Columns
from .client_file import ClientLog
from .match import Requested, places

Lists = dict[str, tuple[Array, Array]]  # name -> (values, offsets)
_PHASE = {"prefill": Phase.PREFILL, "decode": Phase.DENOISE, "denoise": Phase.DENOISE, "flush": Phase.FLUSH}


def journal_of(log: StepLog, index: Ints, zero: float) -> tuple[Columns, Lists] | None:
    """A log's steps as a journal's columns and lists; None without rows.

    index: the run's number of each logged request by arrival; -1: not in the run, and its steps are left out. zero: s,
    the run's start on the log's clock.
    """
    s, r = log.rows, log.requests
    numbers = np.full(int(r.request.max(initial=-1)) + 1, -1)
    numbers[r.request] = index
    request = numbers[s.request]
    if not len(request):
        return None
    num_rows = np.diff(s.offsets)
    step_of = np.repeat(np.arange(len(s)), num_rows)
    steps = np.flatnonzero(np.bincount(step_of, request < 0, len(s)) == 0)
    if not len(steps):
        return None
    rows = np.isin(step_of, steps)
    window, commits = _marks(log)
    features = dict(zip(Features._fields, log.steps.features[s.line[steps]].T, strict=True))
    start, latency = s.start[steps] - zero, log.steps.latency[s.line[steps]]
    prefill = features["prefill_tokens"] == features["tokens"]
    in_run = index >= 0
    emitted = np.searchsorted(np.sort(r.last_emission[in_run]), s.start[steps] + latency, side="right")
    values: dict[str, Any] = {
        **features,
        "step": np.arange(len(steps)),
        "start": start,
        "latency": latency,
        "device": log.steps.device[s.line[steps]],
        "prefill": prefill,
        "chunk": np.where(prefill, 0, log.header.block_length),
        "committed": np.bincount(step_of, commits.sum(axis=1), len(s))[steps],
        "waiting": s.waiting[steps],
        "pages": s.pages[steps],
        "running": num_rows[steps],
        "submitted": np.searchsorted(np.sort(r.arrival[in_run]), s.start[steps], side="right"),
        "finished": np.diff(emitted, prepend=0),
    }
    nothing = np.zeros(len(steps))
    columns = {name: np.asarray(values.get(name, nothing)).astype(kind) for name, kind in STEP_COLUMNS.items()}
    offsets = np.concatenate([[0], np.cumsum(num_rows[steps])])
    phases = np.array([_PHASE[name] for name in PHASES], np.uint8)[s.phase[rows]]
    lists: Lists = {
        "requests": (request[rows].astype(STEP_LISTS["requests"]), offsets),
        "phases": (phases, offsets),
        "num_tokens": (s.tokens[rows].astype(STEP_LISTS["num_tokens"]), offsets),
    }
    for name, marks in (("window", window), ("commits", commits), ("evictions", np.zeros_like(window))):
        words = pack(marks[rows])
        lists[name] = (words.reshape(-1), offsets * words.shape[1])
    return columns, lists


def _marks(log: StepLog) -> tuple[Bools, Bools]:
    """The positions of its block that each row computed and committed.

    Without sequence lines, a block commits whole in its last denoising step before its emission.
    """
    s, block = log.rows, log.header.block_length
    window = np.zeros((len(s.request), block), np.bool_)
    commits = window.copy()
    denoise = PHASES.index("denoise")
    if block == 1:
        window[:, 0] = commits[:, 0] = s.emitted > 0
        return window, commits
    window[(s.phase == denoise) | (s.phase == PHASES.index("flush"))] = True
    requests = s.request.tolist()
    if len(log.commits):
        steps = np.repeat(s.number, np.diff(s.offsets)).tolist()
        rows = {key: row for row, key in enumerate(zip(requests, steps, strict=True))}
        keys = zip(log.commits.request.tolist(), log.commit_steps.tolist(), strict=True)
        for line, key in enumerate(keys):
            if key in rows:
                window[rows[key]], commits[rows[key]] = log.commits.window[line], log.commits.committed[line]
        return window, commits
    last: dict[int, int] = {}  # row of a request's last denoising step
    for row, (request, phase, emitted) in enumerate(zip(requests, s.phase.tolist(), s.emitted.tolist(), strict=True)):
        if phase == denoise:
            last[request] = row
        if emitted and request in last:
            commits[last.pop(request)] = True
    return window, commits


def frontend_of(log: StepLog, client: ClientLog) -> float:
    """Time outside the engine (s): the median of the requests' ttft at the client minus that at the engine."""
    r = log.requests
    rows = places(client, Requested("the log", r.arrival, r.input_length, r.output_length))
    inside = (r.first_emission - r.arrival)[rows]
    outside = client.requests.first - client.requests.sent - inside
    if np.isnan(outside).all():
        raise DsimError(f"{client.path}: none of its {len(outside)} requests has its first token in the log")
    return max(0.0, float(np.nanmedian(outside)))
