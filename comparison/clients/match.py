"""Match a client's requests to those of a trace or an engine's log."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.errors import DsimError
from ...profiler.samples import Floats, Ints
from ...traces import Trace
from .client_file import ClientLog

NEIGHBOURS = 0.05  # s: closer requests may be sent in another order


@dataclass(frozen=True, eq=False)
class Requested:
    """Requests to match, in order of arrival, where they are no trace."""

    name: str
    arrival: Floats  # s
    input_length: Ints
    output_length: Ints


def match(log: ClientLog, trace: Requested | Trace) -> Ints:
    """The trace's row of each client request: by its time in the file, else by order.

    Lengths decide between requests within NEIGHBOURS. DsimError if the file cannot be of this trace.
    """
    _check_number(log, trace)
    requests = log.requests
    rows = np.arange(len(requests))
    if len(requests) < len(trace.arrival) and not np.isnan(requests.due).any():
        rows = _by_time(log, trace)
    # [requests, 2]
    lengths, in_trace = _lengths(requests), _lengths(trace)[rows]
    new_group = np.diff(trace.arrival[rows]) > NEIGHBOURS
    for members in np.split(np.arange(len(requests)), np.flatnonzero(new_group) + 1):
        if (in_trace[members] != lengths[members]).any():
            # By the prompt's length first: a failed request has no output.
            order, in_order = (np.lexsort(side[members].T[::-1]) for side in (lengths, in_trace))
            rows[members[order]] = rows[members[in_order]]
    return rows


def _check_number(log: ClientLog, requested: Requested | Trace) -> None:
    num, limit = len(log.requests), len(requested.arrival)
    if num > limit:
        raise DsimError(f"{log.path}: holds {num} requests, {requested.name} holds {limit}: expected at most as many")


def _lengths(requests: Any) -> Ints:
    """[requests, 2]"""
    return np.stack([requests.input_length, requests.output_length], axis=1)


def _by_time(log: ClientLog, trace: Requested | Trace) -> Ints:
    """Rows at the requests' times; equal times in order."""
    rows = np.zeros(len(log.requests), np.int64)
    previous = -1
    for i, due in enumerate(log.requests.due.tolist()):
        row = max(previous + 1, int(np.searchsorted(trace.arrival, due - 1e-3)))
        if row >= len(trace.arrival) or abs(trace.arrival[row] - due) > 1e-3:
            raise DsimError(f"{log.path}: a request is of {due:g} s, and {trace.name} has none (left) at that time")
        rows[i] = previous = row
    return rows


def places(client: ClientLog, log: Requested) -> Ints:
    """The log's row of each client request, consecutive among other traffic.

    Lengths decide where they begin, then gaps. DsimError if the log has fewer requests.
    """
    _check_number(client, log)
    order = np.argsort(client.requests.sent, kind="stable")
    ordered = client.requests[order]
    num = len(ordered)
    # windows: [begins, 2, requests]; times: [begins, requests]
    windows = np.lib.stride_tricks.sliding_window_view(_lengths(log), num, axis=0)
    times = np.lib.stride_tricks.sliding_window_view(log.arrival, num)
    late = times - times[:, :1] - (ordered.sent - ordered.sent[0])
    wrong = np.abs(windows - _lengths(ordered).T)[:, :, ordered.error == ""].sum(axis=(1, 2))
    begin = int(np.lexsort((np.abs(late).sum(axis=1), wrong))[0])
    span = slice(begin, begin + num)
    arrival = log.arrival[span] - log.arrival[begin]
    rows = np.empty(num, np.int64)
    rows[order] = begin + match(
        replace(client, requests=ordered), Requested(log.name, arrival, log.input_length[span], log.output_length[span])
    )
    return rows
