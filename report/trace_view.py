"""A run as Chrome's trace events (Trace Event Format, Google), for chrome://tracing and ui.perfetto.dev.

A replica is a process: a thread of steps, then lanes; a request takes the lowest free one. Queued requests are
asynchronous events; counters are waiting and running requests and held pages. Times are in µs.
"""

import heapq
import json
import math
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from ..engine.errors import DsimError
from ..results.run import Columns, Run
from .closeup import PHASES, step_rows

Event = dict[str, Any]

STEPS = 0  # lanes follow
STEP_COLUMNS = (
    "replica", "step", "start", "latency", "prefill", "batch", "chunk", "tokens", "committed", "waiting", "running",
    "pages",
)  # fmt: skip
REQUEST_COLUMNS = (
    "request", "replica", "status", "arrival", "scheduled", "first_emission", "finish", "input_length", "num_tokens",
    "num_forwards", "num_preemptions",
)  # fmt: skip
COUNTERS = ("waiting", "running", "pages")


def write_events(file: TextIO, run: Run, begin: float, end: float, rows: bool) -> int:
    """Events between two times (s), a line each; returns their number. rows: also the steps' rows."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    count = 0
    for event in events(run, begin, end, rows):
        file.write(f"{',' if count else ''}\n{json.dumps(event, allow_nan=False)}")
        count += 1
    file.write("\n]}\n")
    return count


def events(run: Run, begin: float = 0.0, end: float = math.inf, rows: bool = False) -> Iterator[Event]:
    for i, policy in enumerate(run.policies):
        requests = run.requests(policy, REQUEST_COLUMNS)
        # A policy's processes are numbered consecutively.
        first = i * (1 + int(max(requests["replica"], default=0)))
        lanes = _lanes(requests)
        for replica in sorted(set(requests["replica"].tolist()) - {-1}):
            name = {"name": f"{policy}, replica {replica}"}
            yield {"ph": "M", "pid": first + replica, "tid": STEPS, "name": "process_name", "args": name}
            mine = {lane for request, lane in lanes.items() if requests["replica"][request] == replica}
            for tid in (STEPS, *sorted(mine)):
                name = {"name": "steps" if tid == STEPS else f"row {tid}"}
                yield {"ph": "M", "pid": first + replica, "tid": tid, "name": "thread_name", "args": name}
        yield from _steps(run, policy, first, begin, end)
        yield from _requests(requests, lanes, first, begin, end)
        if rows:
            numbers = {int(name): i for i, name in enumerate(requests["request"])}
            for row in step_rows(run, policy, [(begin, end)]):
                if numbers.get(row.request) not in lanes:
                    raise DsimError(f"{run.folder}: step {row.step} serves request {row.request}, which never began")
                yield {
                    "ph": "X", "name": PHASES[row.phase][0], "cat": "row", "pid": first + row.replica,
                    "tid": lanes[numbers[row.request]], **_span(row.start, row.end),
                    "args": {"step": row.step, "computed": row.num_tokens, "committed": row.num_committed},
                }  # fmt: skip


def _steps(run: Run, policy: str, first: int, begin: float, end: float) -> Iterator[Event]:
    said: dict[tuple[int, str], int] = {}
    for batch in run.step_batches(policy, STEP_COLUMNS):
        inside = (batch["start"] + batch["latency"] > begin) & (batch["start"] < end)
        for i in np.flatnonzero(inside):
            step = {name: batch[name][i].item() for name in STEP_COLUMNS}
            pid, start = first + step["replica"], step["start"]
            names = ("step", "batch", "tokens", "committed", *(() if step["prefill"] else ("chunk",)))
            yield {
                "ph": "X", "name": "prefill" if step["prefill"] else "decode", "cat": "step", "pid": pid, "tid": STEPS,
                **_span(start, start + step["latency"]), "args": {name: step[name] for name in names},
            }  # fmt: skip
            for name in COUNTERS:
                if said.get((pid, name)) != step[name]:
                    said[pid, name] = step[name]
                    yield {"ph": "C", "name": name, "pid": pid, "ts": _us(start), "args": {name: step[name]}}


def _requests(requests: Columns, lanes: dict[int, int], first: int, begin: float, end: float) -> Iterator[Event]:
    """In the queue, then in its lane to the end."""
    for row, lane in lanes.items():
        r = {name: requests[name][row].item() for name in REQUEST_COLUMNS}
        finish = r["finish"] if not math.isnan(r["finish"]) else end
        if not (finish > begin and r["arrival"] < end and math.isfinite(finish)):
            continue
        pid, name = first + r["replica"], f"request {r['request']}"
        about = {
            "arrived_s": r["arrival"], "prompt": r["input_length"], "tokens": r["num_tokens"],
            "forwards": r["num_forwards"], "preemptions": r["num_preemptions"],
        }  # fmt: skip
        if not math.isnan(r["first_emission"]):
            about["ttft_ms"] = 1e3 * (r["first_emission"] - r["arrival"])
        queued = {"cat": "queue", "id": f"{pid}:{r['request']}", "name": name, "pid": pid, "tid": STEPS}
        yield {"ph": "b", "ts": _us(r["arrival"]), **queued, "args": {}}
        yield {"ph": "e", "ts": _us(r["scheduled"]), **queued, "args": {}}
        yield {
            "ph": "X", "name": name, "cat": "request", "pid": pid, "tid": lane, **_span(r["scheduled"], finish),
            "args": about,
        }  # fmt: skip


def _lanes(requests: Columns) -> dict[int, int]:
    """By row in the table: the replica's lowest free lane, from 1."""
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}  # (end, lane)
    lanes: dict[int, int] = {}
    for row in np.argsort(requests["scheduled"], kind="stable"):
        start, replica = float(requests["scheduled"][row]), int(requests["replica"][row])
        if math.isnan(start):
            break
        finish = float(requests["finish"][row])
        unused, taken = free.setdefault(replica, []), busy.setdefault(replica, [])
        while taken and taken[0][0] <= start:
            heapq.heappush(unused, heapq.heappop(taken)[1])
        lane = heapq.heappop(unused) if unused else 1 + len(taken)
        lanes[int(row)] = lane
        heapq.heappush(taken, (math.inf if math.isnan(finish) else finish, lane))
    return lanes


def _span(start: float, end: float) -> dict[str, float]:
    begin = _us(start)
    return {"ts": begin, "dur": round(_us(end) - begin, 3)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
