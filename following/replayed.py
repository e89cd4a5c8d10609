"""Replays a window in the twin and reads it at the same moments and under the same names as the server's page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..engine.journal import STATUSES
from ..engine.step import Phase
from ..results.engine_metrics import WITH_HANDLES
from ..results.world import World
from ..sim.pools import Fleet, Pool
from ..sim.setting import Setting
from ..sim.twin import RunRecords, simulate
from ..traces import Trace
from .sources.sample import Buckets, Floats, Sample
from .windows import Window

COMPLETED = STATUSES.index("completed")
FEW_LOADS = 1.5  # least ratio of the most to the fewest running requests for which the pace is fitted as a line
# Steps in order of their ends (s), and the journal's columns of these. device: part of the latency, without host time
# that is not hidden. rows: denoising row forwards.
SAME = ("latency", "running", "pages", "tokens")
READ = {"end": "start", "forwards": "num_forwards", **dict(zip(SAME, SAME, strict=True))}
STEP = np.dtype([(name, "f8") for name in (*READ, "device", "rows")])
Steps: TypeAlias = Any  # an array of STEP


class Recorder:
    """Collects the steps that a run appends."""

    def __init__(self, setting: Setting) -> None:
        latency, policy = setting.profile.latency, setting.policy
        self._host = (latency.host_step, latency.host_request)
        if latency.overlap and policy.batching.hides_host:
            self._host = (0.0, 0.0)
        self._parts: list[Steps] = [np.zeros(0, STEP)]

    def append(self, columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        """Store the columns that the follower reads."""
        steps = np.zeros(len(columns["start"]), STEP)
        for name, column in READ.items():
            steps[name] = columns[column]
        steps["end"] += steps["latency"]
        phases, offsets = lists["phases"]
        decodes = np.concatenate([[0], np.cumsum(np.asarray(phases) != Phase.PREFILL)])
        host = self._host[0] * steps["forwards"] + self._host[1] * np.asarray(columns["batch"])
        steps["device"] = np.maximum(steps["latency"] - host, 0.0)
        steps["rows"] = np.where(columns["prefill"], 0.0, np.diff(decodes[np.asarray(offsets)]))
        self._parts.append(steps)

    def steps(self) -> Steps:
        """The steps of all columns, by their end."""
        steps = np.concatenate(self._parts)
        return steps[np.argsort(steps["end"], kind="stable")]


@dataclass(frozen=True)
class Replay:
    """A replay's samples and steps of one window."""

    window: Window
    steps: Steps


def replayed(world: World, setting: Setting, trace: Trace, begins: float, window: Window, seed: int) -> Replay:
    """Replay a window's trace on a setting behind the world's router; begins: when in it the window begins (s)."""
    recorder = Recorder(setting)
    fleet = Fleet((Pool(setting, window.replicas),), world.routing())
    result = simulate(
        trace, fleet, seed=seed, emit=world.emit, eos=world.ends_at_eos, append=recorder.append, ordered=False
    )
    if result.interrupted:
        raise KeyboardInterrupt
    steps = recorder.steps()
    moments = window.times + begins
    last = window.samples[-1]
    ends = {name: buckets.ends for name, buckets in last.histograms.items()}
    samples = samples_of(result, trace, steps, moments, ends, handles=last.engine == WITH_HANDLES)
    inside = (steps["end"] > moments[0]) & (steps["end"] <= moments[-1])
    return Replay(Window(tuple(samples)), steps[inside])


def samples_of(
    result: RunRecords,
    trace: Trace,
    steps: Steps,
    times: Floats,
    ends: Mapping[str, Sequence[float]],
    handles: bool = False,
) -> list[Sample]:
    """The twin's page at these moments of a run (s); ends: the bucket ends of each histogram.

    A request's tokens count as emitted evenly from its first emission to its last. handles: latencies begin when a
    request has one of its replica's max_batch handles.
    """
    table = result.table
    finish = np.where(table["status"] == COMPLETED, table["finish"], np.inf)
    columns = ("arrival", "scheduled", "first_emission")
    arrival, scheduled, first = (np.nan_to_num(table[name], nan=np.inf) for name in columns)
    begins = handles_of(arrival, finish, table["replica"], result.limits.max_batch) if handles else arrival
    tokens, prompt = table["num_tokens"].astype(np.float64), trace.input_length.astype(np.float64)
    done = np.searchsorted(steps["end"], times, side="right")
    over, begun, came = (_totals(times, events) for events in (finish, scheduled, arrival))
    counters = {
        "requests": over,
        "prompt_tokens": _totals(times, scheduled, prompt),
        "generation_tokens": _handed_out(times, first, np.fmax(table["last_emission"], first), tokens),
    }
    for name, column in (("steps", "rows"), ("forward_seconds", "device"), ("forwards", "forwards")):
        counters[name] = np.append(0.0, np.cumsum(steps[column]))[done]
    usage = np.append(0.0, steps["pages"])[done] / result.limits.num_pages
    gauges = {"running": begun - over, "waiting": came - begun, "kv_usage": usage}
    values = {"input_length": (finish, prompt), "output_length": (finish, tokens)}
    with np.errstate(invalid="ignore"):
        for name, moment in (("ttft", first), ("e2el", finish), ("queue", scheduled)):
            values[name] = (moment, moment - begins)
    histograms = {name: _buckets(*values[name], times, bounds) for name, bounds in ends.items() if name in values}
    return [
        Sample(
            time=now,
            engine="twin",
            counters={name: float(column[i]) for name, column in counters.items()},
            gauges={name: float(column[i]) for name, column in gauges.items()},
            histograms={name: buckets[i] for name, buckets in histograms.items()},
        )
        for i, now in enumerate(times.tolist())
    ]


def handles_of(arrival: Floats, finish: Floats, replica: Any, count: int) -> Floats:
    """When each request has one of its replica's `count` handles, in order of arrival (s)."""
    begins = arrival.copy()
    for rows in (np.flatnonzero(replica == r) for r in np.unique(replica)):
        late = rows[np.argsort(arrival[rows], kind="stable")][count:]
        begins[late] = np.maximum(arrival[late], np.sort(finish[rows])[: len(late)])
    return begins


def _totals(times: Floats, events: Floats, amounts: Floats | None = None) -> Floats:
    """[times] The number of events until then, or the sum of their amounts."""
    order = np.argsort(events, kind="stable")
    counts = np.searchsorted(events[order], times, side="right")
    if amounts is None:
        return counts.astype(np.float64)
    return np.append(0.0, np.cumsum(amounts[order]))[counts]


def _handed_out(times: Floats, first: Floats, last: Floats, tokens: Floats) -> Floats:
    """[times] Tokens emitted, evenly from a request's first emission to its last."""
    begun = np.isfinite(first)
    long = begun & (last > first)
    pace = tokens[long] / (last[long] - first[long])
    total = _totals(times, first[begun & ~long], tokens[begun & ~long])
    for moment, sign in ((first[long], 1.0), (last[long], -1.0)):
        total += sign * (times * _totals(times, moment, pace) - _totals(times, moment, pace * moment))
    return np.maximum.accumulate(np.round(total, 3))  # sums of large numbers may end a thousandth lower


def _buckets(events: Floats, values: Floats, times: Floats, ends: Sequence[float]) -> list[Buckets]:
    """[times] The histogram of the values known by then."""
    mask = events <= times[-1]
    events, values = events[mask], values[mask]
    moment = np.searchsorted(times, events, side="left")
    bucket = np.searchsorted(np.asarray(ends), values, side="left")
    counts = np.zeros((len(times), len(ends) + 1))
    np.add.at(counts, (moment, bucket), 1.0)
    counts = counts.cumsum(axis=0).cumsum(axis=1)
    totals = np.cumsum(np.bincount(moment, values, len(times)))
    bounds = tuple(ends)
    return [Buckets(bounds, tuple(row), float(t)) for row, t in zip(counts.tolist(), totals, strict=True)]


@dataclass(frozen=True)
class Pace:
    """The time of the twin's steps by running requests: base + slope * running (s), and the range where it was seen."""

    base: float
    slope: float
    low: float
    high: float

    def seconds(self, running: Floats) -> Floats:
        """The time of a step with this many running requests."""
        return np.maximum(self.base + self.slope * running, 1e-9)

    def covers(self, running: float) -> bool:
        """Whether the twin had steps with about this many running requests."""
        return self.low - 1.0 <= running <= self.high + 1.0


def pace_of(steps: Sequence[Steps], per_forward: bool) -> Pace | None:
    """The line through the twin's steps; None if there were none.

    per_forward: the time of a batch's forward. Otherwise the time of a denoising step including the prompts' steps
    around it, since a server that counts row forwards shows no more.
    """
    every = np.concatenate(steps)
    load, rows = every["running"], every["rows"]
    time, weight = every["latency"], (rows > 0).astype(np.float64)
    if per_forward:
        time, weight = every["device"], every["forwards"]
    levels, index = np.unique(load[load > 0], return_inverse=True)
    if not len(levels) or not weight[load > 0].sum():
        return None
    seconds, steps_at, rows_at = (np.bincount(index, x[load > 0]) for x in (time, weight, rows))
    if not per_forward:  # a step that serves part of the requests counts as that part of a step
        steps_at = rows_at / levels
    mask = steps_at > 0
    levels, value, weights = levels[mask], (seconds / np.maximum(steps_at, 1e-12))[mask], seconds[mask]
    if len(levels) < 2 or levels[-1] < FEW_LOADS * levels[0]:
        return Pace(float(seconds[mask].sum() / steps_at[mask].sum()), 0.0, float(levels[0]), float(levels[-1]))
    slope, base = np.polyfit(levels, value, 1, w=np.sqrt(weights)).tolist()
    return Pace(base, slope, float(levels[0]), float(levels[-1]))
