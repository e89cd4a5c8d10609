"""What a load generator measured of a server, as a run in dsim's terms."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from ...engine.errors import DsimError, cut
from ...engine.policy import PRESETS
from ...files.read import printable
from ...profiler.as_logged import policy_of
from ...profiler.steplog import StepLog, read_log
from ...report.spread import no_spread
from ...results.scenario import MAX_REPLICAS
from ...results.slo import Slo
from ...traces import Trace, load
from .gateway import read_measured
from .match import Requested
from .measured import MeasuredRun, measured_run
from .prometheus import differences, read_samples, summary_of

TraceLike: TypeAlias = str | Path | pd.DataFrame | Trace  # a name, a file, a frame, or what was loaded


def imported(
    file: str | Path,
    *,
    trace: TraceLike | None = None,
    time_unit: str | None = None,
    columns: str | None = None,
    only: str | None = None,
    skip_bad: bool = False,
    policy: str | None = None,
    log: str | Path | None = None,
    metrics: str | Path | None = None,
    metrics_before: str | Path | None = None,
    replicas: int = 1,
    drop_warmup: float = 0.0,
    slos: Sequence[str] = (),
    missing_passes: bool = True,
    command: str = "",
) -> tuple[MeasuredRun, list[str]]:
    """The run that a client's file tells of, and what is doubtful about it; the arguments are those of `dsim import`.

    command: what imported it, for the page.
    """
    if metrics_before is not None and metrics is None:
        raise DsimError(f"metrics before is {metrics_before} and metrics is missing: expected both or neither")
    if not 0 <= drop_warmup < float("inf"):
        raise DsimError(f"drop_warmup is {drop_warmup} s, expected at least 0 and finite")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise DsimError(f"replicas is {cut(replicas)}, expected 1 to {MAX_REPLICAS}")
    own = columns if trace is None else None  # of the log, where no other trace is named
    client, told = read_measured(Path(file), own, only, time_unit if trace is None else None, skip_bad)
    if log is not None and client.steps is not None:
        raise DsimError(f"log is {log} and {file} is a step log itself: expected one of them")
    engine = client.steps if log is None else read_log(Path(log))
    run = measured_run(
        client, None if trace is None else requested(trace, time_unit, columns),
        policy=printable(policy or _named(engine)), slos=[Slo.parse(text) for text in slos],
        missing_passes=missing_passes, drop_warmup=drop_warmup, replicas=replicas, engine=engine,
    )  # fmt: skip
    doubts = list(told)
    if metrics is not None:
        before = None if metrics_before is None else read_samples(Path(metrics_before))
        run.info["server"] = summary_of(read_samples(Path(metrics)), before)
        doubts += differences(run.info["server"], run.columns, run.info)
    if command:
        run.info["command"] = command
    run.info["spread"] = no_spread("a client's file names no profile; `dsim replay` its trace")
    return run, [*doubts, *run.info["client"]["warnings"]]


def _named(log: StepLog | None) -> str:
    """The policy that a log names."""
    return "server" if log is None or log.header.preset not in PRESETS else policy_of(log.header)[0]


def requested(trace: TraceLike, time_unit: str | None = None, columns: str | None = None) -> Requested:
    """The lengths that a trace asks for."""
    found = trace if isinstance(trace, Trace) else load(trace, time_unit=time_unit, columns=columns)
    return Requested(found.name, found.arrival, found.input_length, found.output_length)
