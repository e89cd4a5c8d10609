"""Make a synthetic trace, or change a trace's arrivals, rate or lengths."""

import os
from dataclasses import replace

import numpy as np

from ..engine.errors import TraceError
from .arrivals import process_of, renewal
from .lengths import LENGTHS, Extras, draw_lengths, without_limit
from .load import load
from .shipped import SHIPPED
from .trace import MAX_REQUESTS, Ints, Trace, TraceNotes, check_rate

MAX_SEED = 2**63


def synth(
    arrival: str = "poisson",
    rate: float = 1.0,
    *,
    lengths: str | Trace = "sharegpt",
    num_requests: int = 1000,
    seed: int = 0,
) -> Trace:
    """A synthetic trace.

    arrival: a process, as `poisson` or `gamma,cv=2`. rate: req/s. The same arguments give the same trace.
    """
    arrival, cv = process_of(arrival)
    check(seed, num_requests)
    if arrival == "trace":
        raise TraceError("arrival is trace, expected an arrival process: a synthetic trace has no times")
    check_rate(rate)
    times = renewal(arrival, num_requests, rate, cv, seed)
    source = getattr(lengths, "name", lengths)
    if arrival == "gamma":
        source = f"cv={cv:g},{source}"
    name = f"{arrival}({rate:g}/s,{source},seed={seed})"
    notes = TraceNotes(path=name, format="synthetic", num_rows=len(times))
    num_input, num_output, extras = lengths_of(lengths, len(times), seed)
    return Trace(name, times, num_input, num_output, extras=extras, notes=notes)


def prepare(
    trace: Trace,
    *,
    arrival: str = "trace",
    rate: float | None = None,
    num_requests: int | None = None,
    seed: int = 0,
    lengths: str | Trace | None = None,
) -> Trace:
    """A trace's first requests for a replay, with its times and lengths or others; beyond its end it begins again.

    `rate` rescales its own times (arrival "trace"); an arrival process has the trace's rate by default. `lengths`
    replaces all optional columns.
    """
    arrival, cv = process_of(arrival)
    check(seed, num_requests)
    ready = first(trace, num_requests) if num_requests is not None else trace
    if arrival == "trace" and rate is not None:
        ready = ready.scaled_to_rate(rate)
    elif arrival != "trace":
        if rate is None and not trace.duration > 0:
            raise TraceError(f"{trace.name} has no rate, expected a --rate for {arrival} arrivals")
        if rate is None:
            rate = trace.rate
        ready = ready.take(np.arange(len(ready)), renewal(arrival, len(ready), rate, cv, seed))
    if lengths is None:
        return ready
    num_input, num_output, extras = lengths_of(lengths, len(ready), seed)
    return replace(ready, input_length=num_input, output_length=num_output, extras=extras)


def first(trace: Trace, num_requests: int) -> Trace:
    """The first requests, and beyond the trace's end from its beginning; TraceError for one request."""
    if num_requests <= len(trace) or len(trace) == 1:
        return trace.head(num_requests)
    return trace.in_order(np.arange(num_requests) % len(trace))


def lengths_of(lengths: str | Trace, num_requests: int, seed: int) -> tuple[Ints, Ints, Extras]:
    """By name, form, trace or its path; text may end in `,max_tokens=N`."""
    limit = None
    if isinstance(lengths, str):
        lengths, limit = without_limit(lengths)
        if lengths not in LENGTHS and (lengths in SHIPPED or os.path.exists(lengths)):
            lengths = load(lengths)
    return draw_lengths(lengths, num_requests, seed, limit)


def check(seed: int, num_requests: int | None) -> None:
    """TraceError for a seed or number out of range."""
    if not 0 <= seed < MAX_SEED:
        raise TraceError(f"seed is {seed}, expected 0 to 2^63 - 1")
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise TraceError(f"number of requests is {num_requests}, expected 1 to {MAX_REQUESTS}")
