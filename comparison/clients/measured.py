"""A load generator's file as a measured run of a trace's requests."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import __version__
from ...engine.errors import DsimError
from ...engine.journal import REQUEST_COLUMNS, STEP_COLUMNS, StepTotals
from ...profiler.steplog import StepLog, of_random_tokens
from ...report.run import run_html
from ...results.metrics import CANCELLED, COMPLETED, REJECTED, UNFINISHED, latencies, rows_of, stable, summarize
from ...results.run import Array, Columns, Run
from ...results.run_folder import RunWriter
from ...results.run_info import ClientInfo, Lateness, OwnFigure, RunInfo, TraceInfo
from ...results.slo import Slo
from ...traces.formats import CLIENT
from .engine import Lists, journal_of
from .match import Requested, match, places
from .read import ClientLog

# In the engine's log: s after arrival at the engine.
ENGINE_TIMES = ("scheduled", "first_emission", "last_emission")
CLIENT_COLUMNS = ("lateness", *CLIENT.values(), *(f"engine_{name}" for name in ENGINE_TIMES))
DIFFERS = 1e-3  # relative: from here the report shows the client's figure too
# Entries of a summary that need steps.
OF_STEPS = (
    "wasted_canvas_tokens", "num_decode_steps", "num_prefill_steps", "preemptions", "busy_share", "kv_utilization",
    "prefill_time_share", "kv_pages",
)  # fmt: skip
OF_STEPS_UNKNOWN = ("wasted_canvas_tokens", "preemptions", "kv_utilization", "kv_pages")  # even with an engine's log


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run in memory, with steps from an engine's log."""

    columns: Columns = field(default_factory=dict)
    journal: tuple[Columns, Lists] | None = None

    @property
    def num_steps(self) -> int:
        return 0 if self.journal is None else len(self.journal[0]["step"])

    def requests(self, policy: str, columns: Sequence[str] | None = None) -> Columns:
        return {name: self.columns[name] for name in columns or REQUEST_COLUMNS}

    def step_batches(self, policy: str, columns: Sequence[str] | None = None) -> Iterator[Columns]:
        if self.journal is not None:
            yield {name: self.journal[0][name] for name in columns or STEP_COLUMNS}

    def step_lists(self, policy: str) -> dict[str, tuple[Array, Array]]:
        if self.journal is None:
            raise DsimError(f"{self.folder} has no step journal")
        return self.journal[1]


def measured_run(
    log: ClientLog, trace: Requested | None = None, *, policy: str = "server", slos: Sequence[Slo] = (),
    missing_passes: bool = True, replicas: int = 1, engine: StepLog | None = None,
) -> MeasuredRun:  # fmt: skip
    """The run in a client's file; DsimError if it cannot be of the trace.

    engine: the server's log of the same time, unless the file is one. A request arrives at the trace's time (without a
    trace, when sent); its other times count from its sending, so a late client changes no latency.
    """
    requests = log.requests
    if not len(requests):
        raise DsimError(f"{log.path}: holds no requests, expected at least 1")
    if not log.has_times and trace is None:
        raise DsimError(f"{log.path}: {log.tool} does not say when requests were sent, expected --trace")
    # The answered ones first, in order: as a trace of the log numbers them.
    rows = np.argsort(np.argsort(requests.error != "", kind="stable")) if trace is None else match(log, trace)
    columns, warnings = _columns(log, trace, rows)
    engine = engine or log.steps
    journal = None if engine is None else _engine_side(log, engine, rows, columns)
    if engine is not None and (why := of_random_tokens(engine)):
        warnings.append(why)
    unknown = np.isnan(columns["scheduled"]).all()  # no prefill starts in the file
    for_stability = {**columns, "scheduled": columns["first_emission"]} if unknown else columns
    totals = StepTotals() if journal is None else _totals(journal[0])
    totals.itl.add_many(np.array(log.gaps))
    summary = summarize(policy, columns, totals, slos, missing_passes=missing_passes, replicas=replicas)
    unmeasured: dict[str, Any] = dict.fromkeys(OF_STEPS if journal is None else OF_STEPS_UNKNOWN)
    summary = replace(summary, stable=stable(for_stability), **unmeasured)
    arrival = columns["arrival"]
    span = float(arrival[-1] - arrival[0])
    rate = (len(arrival) - 1) / span if span > 0 else math.inf
    info = RunInfo(
        dsim=__version__,
        driver="client",
        commits="server",
        client=_about(log, columns, warnings),
        trace=TraceInfo(
            name=Path(log.path).name if trace is None else trace.name,
            num_requests=len(arrival),
            arrival="as sent" if trace is None else "trace",
            rate=rate if rate < math.inf else None,
        ),
        replicas=replicas,
        slos=tuple(map(str, slos)),
        missing_passes=missing_passes,
        policies=(summary,),
    )
    return MeasuredRun(Path(log.path), info, columns=columns, journal=journal)


def measured_beside(predicted: Run, log: ClientLog, trace: Requested | None, policy: str | None) -> MeasuredRun:
    """The run in a client's file, by default of the predicted run's requests.

    policy: what the server runs; DsimError if it is needed.
    """
    names = predicted.policies if policy is None else [policy]
    if len(names) != 1 or names[0] not in predicted.policies:
        raise DsimError(
            f"{predicted.folder} holds policies {', '.join(predicted.policies)}, and {log.path} is of one server: "
            "expected the one that it runs, --policy"
        )
    if trace is None and not log.is_trace:
        held = predicted.requests(names[0])
        order = np.lexsort((held["request"], held["arrival"]))
        asked = (held[name][order] for name in ("arrival", "input_length", "output_length"))
        trace = Requested(str(predicted.folder), *asked)
    info = predicted.info
    return measured_run(
        log, trace, policy=names[0], slos=[Slo.parse(text) for text in info.slos], missing_passes=info.missing_passes,
    )  # fmt: skip


def _columns(log: ClientLog, trace: Requested | None, rows: npt.NDArray[np.int64]) -> tuple[Columns, list[str]]:
    n, warnings, requests = len(rows), [], log.requests
    sent, tokens, told_input = requests.sent, requests.output_length, requests.input_length
    arrival = sent - sent.min() if trace is None else trace.arrival[rows]
    # On the client's clock the least late request is on time.
    known_late = trace is not None and log.has_times
    lateness = np.full(n, np.nan) if not known_late else sent - arrival - (sent - arrival).min()
    columns: Columns = {}
    for name, dtype in REQUEST_COLUMNS.items():
        columns[name] = np.full(n, np.nan if dtype == "float64" else 0, dtype)
    done = requests.error == ""
    columns["request"][:] = rows
    columns["arrival"][:] = arrival
    columns["status"][:] = list(map(_status, requests.error))
    asked_input = told_input if trace is None else trace.input_length[rows]
    told_input = np.where(told_input == 0, asked_input, told_input)
    columns["input_length"][:] = np.where(done, told_input, asked_input)
    columns["output_length"][:] = tokens if trace is None else trace.output_length[rows]
    columns["max_tokens"][:] = columns["output_length"]
    for name, key in (("first_emission", "first"), ("last_emission", "last"), ("finish", "last")):
        columns[name][:] = arrival + (requests[key] - sent)
    columns["num_tokens"][:] = columns["num_committed"][:] = tokens
    columns["num_emissions"][:] = requests.num_chunks
    # The first of several-token chunks is unknown: no `tpot_chunk` then.
    columns["num_first"][:] = np.where(tokens == requests.num_chunks, 1, tokens)
    columns["lateness"] = lateness
    for name, column in CLIENT.items():
        columns[column] = requests[name]
    for name in ENGINE_TIMES:
        columns[f"engine_{name}"] = np.full(n, np.nan)
    if trace is not None:
        for what, asked, got in (
            ("prompt", asked_input, told_input), ("output", trace.output_length[rows], tokens),
        ):  # fmt: skip
            other = done & (asked != got)
            if other.any():
                mean = float(got[done].mean()) / float(asked[done].mean()) - 1
                warnings.append(
                    f"{int(other.sum())} of {int(done.sum())} requests have {what} lengths other than the trace's "
                    f"(in sum {100 * mean:+.1f} %)"
                )
    order = np.lexsort((columns["request"], columns["arrival"]))
    return rows_of(columns, order), warnings


def _engine_side(
    log: ClientLog, engine: StepLog, rows: npt.NDArray[np.int64], columns: Columns
) -> tuple[Columns, Lists] | None:  # fmt: skip
    """An engine's log as the run's journal; adds its times to `columns`."""
    own = engine is log.steps
    r = engine.requests
    if np.isnan(r.arrival).any():
        raise DsimError(f"{log.path}: the engine's log does not say when requests arrived, expected their `arrival`")
    asked = Requested("the engine's log", r.arrival, r.input_length, r.output_length)
    place = np.arange(len(rows)) if own else places(log, asked)
    index = np.full(len(r), -1)
    index[place] = rows
    at = np.searchsorted(rows, columns["request"], sorter=np.argsort(rows))
    in_order = place[np.argsort(rows)[at]]
    for name in ENGINE_TIMES:
        columns[f"engine_{name}"] = getattr(r, name)[in_order] - r.arrival[in_order]
        if own and name == "scheduled":
            columns[name][:] = columns["arrival"] + columns[f"engine_{name}"]
    if own:  # an answer below its limit ended at an EOS
        columns["max_tokens"][:] = np.maximum(columns["output_length"], r.output_length[in_order])
        columns["limited"][:] = (columns["max_tokens"] > columns["output_length"]).any()
    return journal_of(engine, index, float(np.median(r.arrival[in_order] - columns["arrival"])))


def _totals(steps: Columns) -> StepTotals:
    decode = ~steps["prefill"]
    totals = StepTotals(
        num_decode_steps=int(decode.sum()), num_prefill_steps=int((~decode).sum()),
        prefill_time=float(steps["latency"][~decode].sum()), decode_time=float(steps["latency"][decode].sum()),
    )  # fmt: skip
    totals.step_latency.add_many(steps["latency"][decode])
    for batch in steps["batch"][decode].tolist():
        totals.batch.add(batch)
    return totals


def _status(error: str) -> int:
    """A request that its client gave up is cancelled or unfinished, another failed one rejected."""
    if not error:
        return COMPLETED
    if error.startswith("cancelled"):
        return CANCELLED
    return UNFINISHED if error.startswith("incomplete") else REJECTED


def _about(log: ClientLog, columns: Columns, warnings: list[str]) -> ClientInfo:
    done = columns["status"] == COMPLETED
    ours = latencies(columns)
    own = {}
    for name, column in CLIENT.items():
        theirs = columns[column]
        known = done & ~np.isnan(theirs) & ~np.isnan(ours[name])
        if not known.any():
            continue
        mean, mine = float(theirs[known].mean()), float(ours[name][known].mean())
        if abs(mean - mine) > DIFFERS * mine:
            own[name] = OwnFigure(1e3 * mean, 1e3 * mine)
    errors = dict(Counter(filter(None, log.requests.error)))
    lateness = columns["lateness"]
    late = None
    if not np.isnan(lateness).any():
        p50, p99 = (float(q) for q in 1e3 * np.percentile(lateness, [50, 99]))
        late = Lateness(p50, p99, float(1e3 * lateness.max()))
    return ClientInfo(
        tool=log.tool,
        failed=int((~done).sum()),
        errors=errors,
        lateness_ms=late,
        differing=own,
        warnings=tuple(warnings),
    )


def write_measured(run: MeasuredRun, folder: Path, *, force: bool = False) -> None:
    """Write a run's folder; without an engine's log steps.parquet is empty."""
    with RunWriter(folder, force=force, more=CLIENT_COLUMNS) as writer:
        writer.requests(run.policies[0], run.columns)
        if run.journal is not None:
            writer.steps(run.policies[0]).append(*run.journal)
        writer.finish(run.info, run_html)
