"""Windows: stretches of samples without a restart that are long enough to be judged; and their arrivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from ..engine import chance
from ..traces import Trace
from .sources.sample import MAX_REQUESTS, MEAN_GAUGES, Buckets, Floats, Sample

SECONDS, REQUESTS = 300.0, 200  # a window lasts until both are reached
SPEED = "dsim_speed"  # the setting of a simulated server that runs faster than real time
LATE = 3.0  # intervals: a longer gap begins a new stretch
RUN_IN, LEAST_RUN_IN = 10.0, 30.0  # length of a replay's run-in: in mean stays of a request; at least, s
DRAW = 217  # purpose of draws, apart from the engine's
MAX_TOKENS = 1_000_000
TAIL = 1e-3  # share of a histogram's values at the far end of its first and last bucket


@dataclass(frozen=True)
class Scrape:
    """The samples of all servers at one moment; None for a server that did not answer."""

    time: float  # s since 1970
    samples: tuple[Sample | None, ...]

    def follows(self, before: "Scrape", interval: float) -> str:
        """Why this scrape does not continue the stretch of `before`; empty if it does."""
        for i, (now, then) in enumerate(zip(self.samples, before.samples, strict=True)):
            if (now is None) != (then is None):
                return f"server {i + 1} does not answer, or answers again"
            if now is None or then is None:
                continue
            if not now.follows(then):
                return f"server {i + 1} was restarted"
            if now.num_arrived - then.num_arrived > MAX_REQUESTS:
                return f"server {i + 1} counts more than {MAX_REQUESTS} requests in a reading"
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
                gauges[name] = sum(sample.gauges[name] for sample in samples)
                if name in MEAN_GAUGES:
                    gauges[name] /= len(samples)
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
        return self._mean("input_length", "prompt_tokens")

    @property
    def output_length(self) -> float:
        """Mean answer (tokens)."""
        return self._mean("output_length", "generation_tokens")

    @property
    def run_in(self) -> "Window":
        """The end of the window, long enough that a replay of the next window no longer depends on its start."""
        stays = sum(sample.num_open for sample in self.samples) / len(self.samples) / max(self.rate, 1e-9)
        begin = self.end - max(LEAST_RUN_IN, RUN_IN * stays)
        return Window(tuple(s for s in self.samples[:-2] if s.time >= begin) + self.samples[-2:])

    def _mean(self, name: str, counter: str) -> float:
        """By the histogram, else by the counter."""
        buckets = self.histogram(name)
        if buckets is not None and buckets.num:
            return buckets.mean
        tokens, requests = self.added(counter), self.added("requests")
        if tokens is None or not requests:
            return math.nan
        return tokens / requests


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
        return None if len(self._samples) < 2 else Window(tuple(self._samples))

    def add(self, scrape: Scrape) -> Window | None:
        """The window that this scrape completes, if any."""
        reason = scrape.follows(self._last, self._interval) if self._last is not None else ""
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


def _lengths(buckets: Buckets | None, mean: float, uniform: Floats) -> Floats:
    values = _quantiles(buckets, uniform) if buckets is not None and buckets.num else -np.log1p(-uniform)
    if len(values) and math.isfinite(mean):
        values = values * mean / max(values.mean(), 1e-12)
    return np.round(values).clip(1, MAX_TOKENS)


def _quantiles(buckets: Buckets, uniform: Floats) -> Floats:
    """Values at these shares of a histogram; between two bucket ends they are log-normal."""
    from scipy.special import ndtri  # imported here: it takes long

    ends = np.log(np.maximum((1.0, *buckets.ends, 2 * buckets.ends[-1]), 1.0))
    cumulative = np.array((0.0, *buckets.counts)) / buckets.num
    rises = np.diff(cumulative) > 0
    inner = np.append(rises, False) | np.append(False, rises)  # the ends of buckets with values
    scores = ndtri(np.clip(cumulative[inner], TAIL, 1 - TAIL))
    return np.asarray(np.exp(np.interp(ndtri(uniform), scores, ends[inner])), np.float64)


def trace_of(requests: Arrivals) -> Trace:
    """A trace that begins with the first request."""
    time, prompts, answers = (requests[column] for column in COLUMNS)
    return Trace("followed traffic", time - time[:1], prompts.astype(np.int64), answers.astype(np.int64))


def trace_after(before: Arrivals | None, arrivals: Arrivals, run_in: float, backlog: int) -> tuple[Trace, float]:
    """A window's trace after its run-in, and when in it the window begins (s).

    run_in: the length of the window before (s); 0: there was none. backlog: requests in flight when the trace begins;
    this number of its first requests arrives at once.
    """
    requests = arrivals.copy()
    requests.time += run_in
    if before is not None:
        requests = np.concatenate([before, requests])
    early = requests[np.arange(backlog * bool(len(requests))) % max(1, len(requests))]
    early["time"] = 0.0
    requests = np.concatenate([early, requests])
    requests = requests[np.argsort(requests["time"], kind="stable")]
    return trace_of(requests), run_in - float(requests["time"][0])
