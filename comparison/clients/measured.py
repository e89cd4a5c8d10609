"""A load generator's file as a measured run of a trace's requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...engine.errors import DsimError
from ...engine.journal import REQUEST_COLUMNS, StepTotals
from ...profiler.samples import Ints
from ...profiler.steplog import StepLog, of_random_tokens
from ...report.run_page import run_html
from ...report.table import number
from ...results.metrics import CANCELLED, COMPLETED, REJECTED, UNFINISHED, rows_of, stable, summarize
from ...results.run import Columns
from ...results.run_folder import RunWriter
from ...results.run_info import ClientInfo, Lateness, RunInfo, TraceInfo
from ...results.slo import Slo
from ...traces import Trace
from ..error_parts import ENGINE_TIMES
from .client_file import ClientLog
from .engine_log import Lists, journal_of
from .match import Requested, match, places

CLIENT_COLUMNS = ("lateness", *(f"engine_{name}" for name in ENGINE_TIMES))
# Entries of a summary that are unknown, even with an engine's log; and those that are without one.
UNKNOWN = ("wasted_canvas_tokens", "preemptions", "kv_utilization", "kv_pages")
OF_STEPS = ("num_decode_steps", "num_prefill_steps", "busy_share", "prefill_time_share")


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """What clients measured, to be written as a run."""

    info: RunInfo
    columns: Columns  # of requests: REQUEST_COLUMNS and CLIENT_COLUMNS
    journal: tuple[Columns, Lists] | None  # steps of an engine's log, scalar columns and lists


def measured_run(
    log: ClientLog,
    trace: Requested | Trace | None = None,
    *,
    policy: str = "server",
    slos: Sequence[Slo] = (),
    replicas: int = 1,
    engine: StepLog | None = None,
) -> MeasuredRun:
    """The run in a client's file; DsimError if it cannot be of the trace.

    engine: the server's log of the same time, unless the file is one. A request arrives at the trace's time (without a
    trace, when sent); its other times count from its sending, so a late client changes no latency.
    """
    requests = log.requests
    if not len(requests):
        raise DsimError(f"{log.path}: holds no requests, expected at least 1")
    about = TraceInfo(name=Path(log.path).name, num_requests=len(requests), arrival="as sent")
    if trace is not None:
        rows = match(log, trace)
        about = TraceInfo(name=trace.name, num_requests=len(requests))
    elif log.has_times:
        # The answered ones first, in order: as a trace of the log numbers them.
        rows = np.argsort(np.argsort(requests.error != "", kind="stable"))
    else:
        raise DsimError(f"{log.path}: {log.tool} does not say when requests were sent, expected --trace")
    columns, warnings = _columns(log, trace, rows)
    engine = engine or log.steps
    journal, totals, unknown = None, StepTotals(), [*UNKNOWN]
    if engine is not None:
        journal = _engine_side(log, engine, rows, columns)
        warnings += filter(None, [of_random_tokens(engine)])
    if journal is None:
        unknown += OF_STEPS
    else:
        totals = _totals(journal[0])
    totals.itl.add_many(np.array(log.gaps))
    summary = summarize(policy, columns, totals, slos, replicas=replicas)
    if np.isnan(columns["scheduled"]).all():  # no prefill starts in the file
        is_stable = stable(columns | {"scheduled": columns["first_emission"]})
        summary = replace(summary, stable=is_stable)
    nothing: dict[str, Any] = dict.fromkeys(unknown)
    span = float(np.ptp(columns["arrival"]))
    if span > 0:
        about = replace(about, rate=(len(requests) - 1) / span)
    info = RunInfo(
        dsim=__version__,
        driver="client",
        commits="server",
        client=_about(log, columns, warnings),
        trace=about,
        replicas=replicas,
        slos=tuple(map(str, slos)),
        policies=(replace(summary, **nothing),),
    )
    return MeasuredRun(info, columns, journal)


def _columns(log: ClientLog, trace: Requested | Trace | None, rows: Ints) -> tuple[Columns, list[str]]:
    """A run's request columns and CLIENT_COLUMNS, by arrival; warnings of lengths other than the trace's."""
    requests = log.requests
    start, tokens, prompts = requests.sent, requests.output_length, requests.input_length
    arrival, wanted_tokens, wanted_prompts = start - start.min(), tokens, prompts
    if trace is not None:
        arrival, wanted_tokens, wanted_prompts = (
            column[rows] for column in (trace.arrival, trace.output_length, trace.input_length)
        )
    done, unknown = requests.error == "", np.full(len(rows), np.nan)
    prompts = np.where(prompts == 0, wanted_prompts, prompts)
    warnings = []
    for side, in_trace, lengths in (("prompt", wanted_prompts, prompts), ("output", wanted_tokens, tokens)):
        different = int((done & (in_trace != lengths)).sum())
        if different:
            mean = float(lengths[done].mean()) / float(in_trace[done].mean()) - 1
            warnings.append(
                f"{different} of {int(done.sum())} requests have {side} lengths other than the trace's "
                f"(in sum {100 * mean:+.1f} %)"
            )
    values: dict[str, Any] = {
        "request": rows,
        "arrival": arrival,
        "status": list(map(_status, requests.error)),
        "input_length": np.where(done, prompts, wanted_prompts),
        "output_length": wanted_tokens,
        "max_tokens": wanted_tokens,
        "first_emission": arrival + (requests["first"] - start),
        "last_emission": arrival + (requests["last"] - start),
        "finish": arrival + (requests["last"] - start),
        "num_tokens": tokens,
        "num_committed": tokens,
        "num_emissions": requests.num_chunks,
        # The first of several-token chunks is unknown: no `tpot_chunk` then.
        "num_first": np.where(tokens == requests.num_chunks, 1, tokens),
    }
    columns: Columns = {}
    nothing = {"float64": unknown}
    for name, kind in REQUEST_COLUMNS.items():
        columns[name] = np.asarray(values.get(name, nothing.get(kind, 0 * rows))).astype(kind)
    columns["lateness"] = unknown
    if trace is not None and log.has_times:
        # On the client's clock the least late request is on time.
        columns["lateness"] = start - arrival - (start - arrival).min()
    columns |= {f"engine_{name}": unknown for name in ENGINE_TIMES}
    return rows_of(columns, np.lexsort((rows, arrival))), warnings


def _engine_side(log: ClientLog, engine: StepLog, rows: Ints, columns: Columns) -> tuple[Columns, Lists] | None:
    """An engine's log as the run's journal; adds its times to `columns`."""
    is_log = engine is log.steps
    r = engine.requests
    if np.isnan(r.arrival).any():
        raise DsimError(f"{log.path}: the engine's log does not say when requests arrived, expected their `arrival`")
    logged = np.arange(len(rows))  # the log's row of each client request
    if not is_log:
        logged = places(log, Requested("the engine's log", r.arrival, r.input_length, r.output_length))
    index = np.full(len(r), -1)
    index[logged] = rows
    order = np.argsort(rows)
    logged = logged[order][np.searchsorted(rows, columns["request"], sorter=order)]  # ... of each of `columns`
    for name in ENGINE_TIMES:
        columns[f"engine_{name}"] = getattr(r, name)[logged] - r.arrival[logged]
    if is_log:  # an answer below its limit ended at an EOS
        columns["scheduled"][:] = columns["arrival"] + columns["engine_scheduled"]
        columns["max_tokens"][:] = np.maximum(columns["output_length"], r.output_length[logged])
        columns["limited"][:] = (columns["max_tokens"] > columns["output_length"]).any()
    return journal_of(engine, index, float(np.median(r.arrival[logged] - columns["arrival"])))


def _totals(steps: Columns) -> StepTotals:
    decode = ~steps["prefill"]
    latencies = steps["latency"]
    totals = StepTotals(
        num_decode_steps=int(decode.sum()),
        num_prefill_steps=int((~decode).sum()),
        prefill_time=float(latencies[~decode].sum()),
        decode_time=float(latencies[decode].sum()),
    )
    totals.step_latency.add_many(latencies[decode])
    for batch in steps["batch"][decode].tolist():
        totals.batch.add(batch)
    return totals


def _status(error: str) -> int:
    """A request that its client gave up is cancelled or unfinished, another failed one rejected."""
    if not error:
        return COMPLETED
    if error.startswith("cancelled"):
        return CANCELLED
    if error.startswith("incomplete"):
        return UNFINISHED
    return REJECTED


def _about(log: ClientLog, columns: Columns, warnings: list[str]) -> ClientInfo:
    late, lateness = None, 1e3 * columns["lateness"]
    if not np.isnan(lateness).any():
        p50, p99 = np.percentile(lateness, [50, 99]).tolist()
        late = Lateness(p50, p99, float(lateness.max()))
    return ClientInfo(
        tool=log.tool,
        failed=int((columns["status"] != COMPLETED).sum()),
        errors=dict(Counter(filter(None, log.requests.error))),
        lateness_ms=late,
        warnings=tuple(warnings),
    )


def write_measured(run: MeasuredRun, folder: Path, *, force: bool = False) -> None:
    """Write a run's folder; without an engine's log steps.parquet is empty."""
    [policy] = (summary.policy for summary in run.info.policies)
    with RunWriter(folder, force=force, more=CLIENT_COLUMNS) as writer:
        writer.requests(policy, run.columns)
        if run.journal is not None:
            writer.append(policy, *run.journal)
        writer.finish(run.info, run_html)


def client_lines(client: ClientInfo) -> list[str]:
    """Lateness and failures."""
    lines = [f"Client: {client.tool}, {client.failed:,} requests failed"]
    lines += [f"  {count:,} x {error}" for error, count in client.errors.items()]
    if (late := client.lateness_ms) is not None:
        lines.append(
            f"Lateness: requests were sent {number(late.p50)} ms after their time at the median, "
            f"{number(late.p99)} ms at p99, {number(late.max)} ms at most; latencies run from the sending"
        )
    return lines
