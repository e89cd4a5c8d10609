"""Windows: stretches of samples without a restart that are long enough to be judged; and their arrivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from ..engine import chance
from ..traces import Trace
from .sources.sample import MEAN_GAUGES, MOST_REQUESTS, Buckets, Floats, Sample

SECONDS, REQUESTS = 300.0, 200  # a window lasts until both are reached
SPEED = "dsim_speed"  # the setting of a simulated server that runs faster than real time
LATE = 3.0  # intervals: a longer gap begins a new stretch
RUN_IN, LEAST_RUN_IN = 10.0, 30.0  # length of a replay's run-in: in mean stays of a request; at least, s
DRAW = 217  # purpose of draws, apart from the engine's
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class Scrape:
    """The samples of all servers at one moment; None for a server that did not answer."""

    time: float  # s since 1970
    samples: tuple[Sample | None, ...]

    def follows(self, before: "Scrape", interval: float) -> str:
        """Why this scrape does not continue the stretch of `before`; empty if it does."""
        for i, (now, then) in enumerate(zip(self.samples, before.samples, strict=True)):
            if (now is None) != (then is None):
                return f"server {i + 1} {'does not answer' if now is None else 'answers again'}"
            if now is None or then is None:
                continue
            if not now.follows(then):
                settings = " with other settings" if now.settings != then.settings else ""
                return f"server {i + 1} was restarted{settings}"
            if now.num_arrived - then.num_arrived > MOST_REQUESTS:
                return f"server {i + 1} counts more than {MOST_REQUESTS} requests in a reading"
        speed = max([1.0, *(float(s.settings.get(SPEED, 1.0)) for s in self.samples if s is not None)])
        if self.time - before.time > LATE * interval * speed:
            return f"no samples for {self.time - before.time:.0f} s"
        return ""

    def together(self) -> Sample | None:
        """The sums over the servers that answered; None if no server did."""
        samples = [sample for sample in self.samples if sample is not None]
        if not samples:
            return None
        counters: dict[str, float] = {}
        for sample in samples:  # SGLang shows a counter from the first count on
            for name, count in sample.counters.items():
                counters[name] = counters.get(name, 0.0) + count
        gauges = {}
        for name in samples[0].gauges:
            if all(name in sample.gauges for sample in samples):
                total = sum(sample.gauges[name] for sample in samples)
                gauges[name] = total / (len(samples) if name in MEAN_GAUGES else 1)
        num_engines = sum(sample.num_engines for sample in samples)
        merged = _merged(samples)
        return replace(
            samples[0], time=self.time, num_engines=num_engines, counters=counters, gauges=gauges, histograms=merged
        )


def _merged(samples: Sequence[Sample]) -> dict[str, Buckets]:
    """The sums of histograms; those whose ends differ are left out."""
    merged = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.histograms):
        histograms = [sample.histograms[name] for sample in samples if name in sample.histograms]
        if all(buckets.ends == histograms[0].ends for buckets in histograms):
            merged[name] = reduce(Buckets.plus, histograms)
    return merged


@dataclass(frozen=True)
class Window:
    """The fleet's samples from one moment to another."""

    samples: tuple[Sample, ...]

    @property
    def begin(self) -> float:
        return self.samples[0].time

    @property
    def end(self) -> float:
        return self.samples[-1].time

    @property
    def duration(self) -> float:
        return self.end - self.begin

    @property
    def replicas(self) -> int:
        return self.samples[0].num_engines

    def added(self, name: str) -> float | None:
        """The growth of a counter, from 0 if it appeared within the window; None if the server lacks it."""
        last = self.samples[-1].counters.get(name)
        return None if last is None else last - self.samples[0].counters.get(name, 0.0)

    def histogram(self, name: str) -> Buckets | None:
        """The values added to a histogram."""
        last = self.samples[-1].histograms.get(name)
        return None if last is None else last.minus(self.samples[0].histograms.get(name))

    def gauge(self, name: str) -> Floats:
        """[samples] A gauge; NaN where it is missing."""
        return np.array([sample.gauges.get(name, math.nan) for sample in self.samples])

    @property
    def times(self) -> Floats:
        """[samples] s since the window's begin."""
        return np.array([sample.time for sample in self.samples]) - self.begin

    @property
    def arrivals(self) -> Floats:
        """[samples] Requests that had arrived since the begin: those finished, running or waiting."""
        counts = np.array([sample.num_arrived for sample in self.samples])
        return np.maximum.accumulate(counts - counts[0])

    @property
    def num_arrivals(self) -> int:
        return round(float(self.arrivals[-1]))

    @property
    def rate(self) -> float:
        """Arrivals (req/s)."""
        return float(self.arrivals[-1]) / self.duration

    @property
    def input_length(self) -> float:
        """Mean prompt (tokens); NaN if the page has none."""
        buckets = self.histogram("input_length")
        return buckets.mean if buckets is not None and buckets.num else self._per_request("prompt_tokens")

    @property
    def output_length(self) -> float:
        """Mean answer (tokens)."""
        buckets = self.histogram("output_length")
        return buckets.mean if buckets is not None and buckets.num else self._per_request("generation_tokens")

    @property
    def run_in(self) -> "Window":
        """The end of the window, long enough that a replay of the next window no longer depends on its start."""
        stays = sum(sample.num_open for sample in self.samples) / len(self.samples) / max(self.rate, 1e-9)
        begin = self.end - max(LEAST_RUN_IN, RUN_IN * stays)
        return Window(tuple(s for s in self.samples[:-2] if s.time >= begin) + self.samples[-2:])

    def _per_request(self, counter: str) -> float:
        tokens, requests = self.added(counter), self.added("requests")
        return tokens / requests if tokens is not None and requests else math.nan


class Cutter:
    """Cuts a run of scrapes into windows."""

    def __init__(self, interval: float, seconds: float = SECONDS, requests: int = REQUESTS) -> None:
        self._interval, self._seconds, self._requests = interval, seconds, requests
        self._last: Scrape | None = None
        self._samples: list[Sample] = []
        self.broken = ""  # why the newest stretch began
        self.stretches = 0

    @property
    def open(self) -> Window | None:
        """The incomplete window; None with fewer than two samples."""
        return Window(tuple(self._samples)) if len(self._samples) > 1 else None

    def add(self, scrape: Scrape) -> Window | None:
        """The window that this scrape completes, if any."""
        reason = "" if self._last is None else scrape.follows(self._last, self._interval)
        self._last = scrape
        sample = scrape.together()
        if reason or sample is None:
            self.broken = reason or "no server answers"
            self.stretches += 1
            self._samples = []
        if sample is None:
            return None
        self._samples.append(sample)
        window = self.open
        if window is None or window.duration < self._seconds or window.num_arrivals < self._requests:
            return None
        self._samples = [sample]  # the next window begins where this one ends
        return window


COLUMNS = ("time", "input_length", "output_length")
ARRIVAL = np.dtype([(name, "f8") for name in COLUMNS])
Arrivals: TypeAlias = Any  # a window's requests: a record array of ARRIVAL, in s since the window's begin


def arrivals_at(time: Floats, input_length: Any, output_length: Any) -> Arrivals:
    """Requests in order of time."""
    arrivals = np.rec.fromarrays([time, input_length, output_length], dtype=ARRIVAL)
    return arrivals[np.argsort(time, kind="stable")]


def drawn_arrivals(window: Window, seed: int) -> Arrivals:
    """Draw a window's arrivals: each interval's number from the counters, lengths from the histograms.

    Without a histogram lengths are exponential.
    """
    counts = np.round(window.arrivals).astype(np.int64)
    new, times = np.diff(counts), window.times
    num = int(counts[-1])
    uniform = chance.uniform(chance.key(seed, DRAW, round(window.begin), np.arange(3 * num)))
    place, prompt, answer = uniform.reshape(3, num)
    gaps = np.repeat(np.diff(times), new)
    time = np.sort(np.repeat(times[:-1], new) + place * gaps)
    prompts = _lengths(window.histogram("input_length"), window.input_length, prompt)
    answers = _lengths(window.histogram("output_length"), window.output_length, answer)
    return arrivals_at(time, prompts, answers)


def with_open(logged: Arrivals, window: Window, seed: int) -> Arrivals:
    """The logged arrivals, plus requests in flight at the window's end, which the log does not hold before they end.

    They are placed in the newest intervals with more arrivals than the log has. Their lengths are drawn from the log's.
    """
    missing = min(round(window.samples[-1].num_open), window.num_arrivals - len(logged))
    if missing <= 0:
        return logged
    times = window.times
    surplus = np.diff(np.round(window.arrivals)) - np.histogram(logged.time, times)[0]
    newest = np.repeat(np.arange(len(surplus))[::-1], np.maximum(surplus, 0).astype(np.int64)[::-1])[:missing]
    place, pick = chance.uniform(chance.key(seed, DRAW, round(window.begin), np.arange(2 * len(newest)))).reshape(2, -1)
    chosen = logged[(pick * len(logged)).astype(np.int64)]
    time = np.concatenate([logged.time, times[newest] + place * np.diff(times)[newest]])
    lengths = (np.concatenate([logged[name], chosen[name]]) for name in COLUMNS[1:])
    return arrivals_at(time, *lengths)


def _lengths(buckets: Buckets | None, mean: float, uniform: Floats) -> Floats:
    if buckets is not None and buckets.num:
        values = _quantiles(buckets, uniform)
    else:
        values = -np.log1p(-uniform)
    if len(values) and math.isfinite(mean):
        values = values * mean / max(values.mean(), 1e-12)
    return np.round(values).clip(1, MOST_TOKENS)


def _quantiles(buckets: Buckets, uniform: Floats) -> Floats:
    """Values at these shares of a histogram.

    Between two bucket ends the values are log-normal; beyond the first and the last end the nearest piece continues.
    """
    normal = NormalDist()
    ends = np.log(np.maximum((*buckets.ends, 2 * buckets.ends[-1]), 1.0))
    cumulative = np.array(buckets.counts) / buckets.num
    first, last = int(np.argmax(cumulative > 0)), int(np.argmax(cumulative >= 1.0))
    lowest, inner = ends[first - 1] if first else 0.0, slice(first, last)
    x, y = ends[inner], cumulative[inner]
    x, y = x[np.append(True, np.diff(x) > 0)[: len(x)]], y[np.append(np.diff(x) > 0, True)[: len(x)]]
    if len(x) < 2:  # too few ends for a shape
        return np.asarray(np.exp(np.interp(uniform, [0.0, *y, 1.0], [lowest, *x, ends[last]])), np.float64)
    # An empty bucket is a jump.
    z = np.array([normal.inv_cdf(share) for share in y]) + 1e-9 * np.arange(len(y))
    score = np.array([normal.inv_cdf(share) for share in np.clip(uniform, 1e-9, 1 - 1e-9)])
    k = np.clip(np.searchsorted(z, score) - 1, 0, len(z) - 2)
    logs = np.clip(x[k] + (score - z[k]) * (np.diff(x) / np.diff(z))[k], lowest, ends[last])
    return np.asarray(np.exp(logs), np.float64)


def trace_of(requests: Arrivals, name: str) -> Trace:
    """A trace that begins with the first request."""
    time, prompts, answers = (requests[column] for column in COLUMNS)
    return Trace(name, time - time[:1], prompts.astype(np.int64), answers.astype(np.int64))


def trace_after(
    before: Arrivals | None, arrivals: Arrivals, run_in: float, backlog: int, name: str
) -> tuple[Trace, float]:  # fmt: skip
    """A window's trace after its run-in, and when in it the window begins (s).

    run_in: the length of the window before (s); 0: there was none. backlog: requests in flight when the trace begins;
    this number of its first requests arrives at once.
    """
    requests = arrivals.copy()
    requests.time += run_in
    if before is not None:
        requests = np.concatenate([before, requests])
    early = requests[np.arange(backlog if len(requests) else 0) % max(1, len(requests))]
    early["time"] = 0.0
    requests = np.concatenate([early, requests])
    requests = requests[np.argsort(requests["time"], kind="stable")]
    return trace_of(requests, name), run_in - float(requests["time"][0])
