"""Times in a trace's own log, next to the predictions for the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..report.run import TIMES
from ..results.metrics import Columns, Floats, Summary, latencies, statistic
from ..results.run_info import LogRow, MeasuredLog
from ..results.slo import Slo
from ..results.world import World, arrived
from ..sim.twin import RunRecords
from ..traces import Trace
from ..traces.formats import MEASURED

STATS = ("p50", "p90", "p99")


def measured_log(world: World, predicted: Mapping[str, Columns] | None = None) -> MeasuredLog | None:
    """Latencies in the trace's own log; None if it has no times.

    predicted: request columns by policy, compared if the replay is of the log's traffic.
    """
    source = world.source()
    trace = source if world.num_requests is None else source.take(np.arange(min(world.num_requests, len(source))))
    waited = _waited(trace)
    if waited is None:
        return None
    num_timed = int((~np.isnan(waited["e2el"])).sum())
    summary = _summary(world, trace, waited)
    failed = source.notes.failed_in_trace if len(trace) == len(source) else 0
    if summary.slo_attainment is not None:  # of arrivals, as of a run
        summary = replace(summary, slo_attainment=summary.slo_attainment * num_timed / (num_timed + failed))
    return MeasuredLog(
        num_timed=num_timed,
        num_requests=len(trace),
        num_failed=failed,
        rate=None if np.isnan(trace.rate) else trace.rate,
        summary=summary,
        beside=_beside(waited, predicted or {}) if is_as_logged(world) else (),
    )


def is_as_logged(world: World) -> bool:
    """Whether the replay has the trace's requests, times and lengths."""
    changes = (world.rate, world.lengths, world.concurrency)
    plain = world.arrival == "trace" and not world.sessions
    longer = (world.num_requests or 0) > len(world.source())
    return plain and all(value is None for value in changes) and not longer


def _waited(trace: Trace) -> dict[str, Floats] | None:
    """s by request, as clients waited; NaN if unknown."""
    if MEASURED["e2el"] not in trace.extras:
        return None
    nothing = [None] * len(trace)
    waited = {name: np.array(trace.extras.get(ours, nothing), np.float64) for name, ours in MEASURED.items()}
    return None if np.isnan(waited["e2el"]).all() else waited


def _summary(world: World, trace: Trace, waited: dict[str, Floats]) -> Summary:
    """As of a client's run."""
    from .clients.measured import measured_run  # few traces have such a log
    from .clients.read import ClientLog, blank

    rows = np.flatnonzero(~np.isnan(waited["e2el"]))
    requests = blank(len(rows))
    requests.sent = trace.arrival[rows]
    requests.first, requests.last = (requests.sent + waited[name][rows] for name in ("ttft", "e2el"))
    requests.input_length, requests.output_length = trace.input_length[rows], trace.output_length[rows]
    slos = [slo for slo in map(Slo.parse, world.slos) if slo.slo_class is None]
    run = measured_run(
        ClientLog(trace.name, "log", "", requests), policy="the log", slos=slos,
    )  # fmt: skip
    return run.info.policies[0]


def _beside(waited: dict[str, Floats], predicted: Mapping[str, Columns]) -> tuple[LogRow, ...]:
    """In ms, of the same requests."""
    rows = []
    for name in TIMES:
        if np.isnan(waited[name]).all():
            continue
        columns = {policy: np.full(len(waited[name]), np.nan) for policy in predicted}
        for policy, requests in predicted.items():
            columns[policy][requests["request"]] = latencies(requests)[name]
        for stat in STATS:
            pairs = {}
            for policy, times in columns.items():
                mask = ~np.isnan(times) & ~np.isnan(waited[name])
                if mask.any():
                    measured, simulated = (1e3 * statistic(values[mask], stat) for values in (waited[name], times))
                    if measured > 0:
                        pairs[policy] = (measured, simulated)
            if pairs:
                rows.append(LogRow(name, stat, int((~np.isnan(waited[name])).sum()), pairs))
    return tuple(rows)


def columns_of(worlds: Sequence[World], results: Sequence[RunRecords]) -> dict[str, Columns]:
    return {world.policy: arrived(result) for world, result in zip(worlds, results, strict=False)}
