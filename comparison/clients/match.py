"""Match a client's requests to those of a trace or an engine's log."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...engine.errors import DsimError
from ...results.metrics import Floats
from .read import ClientLog

NEIGHBOURS = 0.05  # s: closer requests may be sent in another order


@dataclass(frozen=True, eq=False)
class Requested:
    """Requests to match, in order of arrival."""

    name: str
    arrival: Floats  # s
    input_length: npt.NDArray[np.int64]
    output_length: npt.NDArray[np.int64]


def match(log: ClientLog, trace: Requested) -> npt.NDArray[np.int64]:
    """The trace's row of each client request: by its time in the file, else by order.

    Lengths decide between requests within NEIGHBOURS. DsimError if the file cannot be of this trace.
    """
    found, n = log.requests, len(trace.arrival)
    if len(found) > n:
        raise DsimError(f"{log.path}: holds {len(found)} requests, {trace.name} holds {n}: expected at most as many")
    due = found.due
    rows = np.arange(len(found))
    if len(found) < n and not np.isnan(due).any():
        rows = _by_time(log, trace, due)
    asked = np.stack([trace.input_length, trace.output_length])[:, rows]
    got = np.stack([found.input_length, found.output_length])
    known = found.error == ""  # failed requests have no token counts
    group = np.concatenate([[0], np.cumsum(np.diff(trace.arrival[rows]) > NEIGHBOURS)])
    for members in np.split(np.arange(len(found)), np.flatnonzero(np.diff(group)) + 1):
        if len(members) > 1 and (asked[:, members] != got[:, members]).any():
            rows[members] = rows[members][_assign(asked[:, members], got[:, members], known[members])]
    return rows


def _by_time(log: ClientLog, trace: Requested, due: Floats) -> npt.NDArray[np.int64]:
    """Rows at these times; equal times in order."""
    rows = np.zeros(len(due), np.int64)
    taken = -1
    for i, when in enumerate(due.tolist()):
        row = max(taken + 1, int(np.searchsorted(trace.arrival, when - 1e-3)))
        if row >= len(trace.arrival) or abs(trace.arrival[row] - when) > 1e-3:
            raise DsimError(f"{log.path}: a request is of {when:g} s, and {trace.name} has none (left) at that time")
        rows[i] = taken = row
    return rows


def _assign(
    asked: npt.NDArray[np.int64], got: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Assign requests by the least sum of length differences."""
    # SciPy loads slowly.
    from scipy.optimize import linear_sum_assignment

    cost = np.abs(asked[:, None, :] - got[:, :, None]).sum(axis=0).astype(np.float64)  # [got, asked]
    cost[~known] = 0.0
    n = len(known)
    cost += 1e-6 * np.abs(np.arange(n)[:, None] - np.arange(n))  # ties keep the order
    chosen: npt.NDArray[np.int64] = linear_sum_assignment(cost)[1]
    return chosen


def places(client: ClientLog, log: Requested) -> npt.NDArray[np.int64]:
    """The log's row of each client request, consecutive among other traffic.

    Lengths decide where they begin, then gaps. DsimError if the log has fewer requests.
    """
    order = np.argsort(client.requests.sent, kind="stable")
    sent = client.requests[order]
    n = len(sent)
    if n > len(log.arrival):
        raise DsimError(
            f"{client.path}: holds {n} requests, {log.name} holds {len(log.arrival)}: expected at most as many"
        )
    got = np.stack([sent.input_length, sent.output_length])
    known = sent.error == ""
    lengths = np.stack([log.input_length, log.output_length], axis=1)
    # windows: [begins, 2, n]; times: [begins, n]
    windows = np.lib.stride_tricks.sliding_window_view(lengths, n, axis=0)
    times = np.lib.stride_tricks.sliding_window_view(log.arrival, n)
    off = times - times[:, :1] - (sent.sent - sent.sent[0])
    wrong = np.abs(windows - got)[:, :, known].sum(axis=(1, 2))
    begin = int(np.lexsort((np.abs(off).sum(axis=1), wrong))[0])
    arrival = log.arrival[begin : begin + n]
    part = Requested(log.name, arrival - arrival[0], *lengths[begin : begin + n].T)
    found = np.empty(n, np.int64)
    found[order] = begin + match(replace(client, requests=sent), part)
    return found
