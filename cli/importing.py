"""dsim import: what a load generator measured of a server, as a run that every report reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError, cut
from . import options
from .options import option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..profiler.steplog import StepLog
    from ..report.clients.match import Requested


def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Of vllm bench serve --save-detailed, guidellm (JSON) or aiperf (profile_export.jsonl).",
            show_default=False,
        ),
    ],
    trace: Annotated[
        str | None, option("T", "The trace that the client replayed: its arrivals and lengths.", "--trace")
    ] = None,
    time_unit: options.TimeUnit = None,
    columns: options.Columns = None,
    policy: Annotated[
        str | None,
        option(
            "NAME",
            "What to call the server's policy: a twin's, to compare with it; by default as a step log names it, or "
            "`server`.",
        ),
    ] = None,
    log: Annotated[
        Path | None, option("FILE", "The step log that the server wrote meanwhile: its steps, too.", "--log")
    ] = None,
    metrics: Annotated[
        Path | None, option("FILE", "The server's Prometheus metrics after the run, to check against.", "--metrics")
    ] = None,
    metrics_before: Annotated[
        Path | None, option("FILE", "The same from before it, to be subtracted.", "--metrics-before")
    ] = None,
    replicas: Annotated[int, option("N", "Replicas behind the router.", "--replicas")] = 1,
    drop_warmup: Annotated[float, option("S", "Leave out requests of the first S seconds.")] = 0.0,
    slo: options.Slos = None,
    missing_fails: options.MissingFails = False,
    out: Annotated[Path | None, option("DIR", "Write the run and report.html.", "-o", "--out")] = None,
    as_json: options.AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder.")] = False,
) -> None:
    """Read what a load generator measured of a server into a run, by dsim's definitions.

    dsim import bench.json --trace trace.jsonl --slo ttft=2s -o runs/measured
    """
    from ..planner.scenario import MAX_REPLICAS
    from ..profiler.steplog import read_log
    from ..report.clients.measured import measured_run, write_measured
    from ..report.clients.prometheus import differences, read_samples, summary_of
    from ..report.clients.read import read_client
    from ..report.clients.words import client_lines
    from ..report.run import FILES
    from ..report.slo import Slo
    from ..report.spread import no_spread
    from ..report.story import words

    if metrics_before is not None and metrics is None:
        raise DsimError(f"--metrics-before is {metrics_before} and --metrics is missing: expected both or neither")
    if not 0 <= drop_warmup < float("inf"):
        raise DsimError(f"--drop-warmup is {drop_warmup} s, expected at least 0 and finite")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise DsimError(f"--replicas is {cut(replicas)}, expected 1 to {MAX_REPLICAS}")
    client = read_client(file)
    if log is not None and client.steps is not None:
        raise DsimError(f"--log is {log} and {file} is a step log itself: expected one of them")
    engine = client.steps if log is None else read_log(log)
    run = measured_run(
        client, None if trace is None else requested(trace, time_unit, columns), policy=policy or _named(engine),
        slos=[Slo.parse(text) for text in slo or []], missing_passes=not missing_fails, drop_warmup=drop_warmup,
        replicas=replicas, engine=engine,
    )  # fmt: skip
    screen = Screen()
    if metrics is not None:
        before = None if metrics_before is None else read_samples(metrics_before)
        server = summary_of(read_samples(metrics), before)
        run.info["server"] = server
        screen.warn(differences(server, run.columns, run.info))
    screen.warn(run.info["client"]["warnings"])
    if out is not None:  # before a word is said: who listens may leave early
        run.info["command"] = options.command()
        run.info["spread"] = no_spread("a client's file names no profile; `dsim replay` its trace")
        write_measured(run, out, force=force)
    shown = {key: run.info.get(key) for key in ("client", "server", "trace", "policies")}
    say(lambda: words(run.info["policies"], run.info), shown, as_json)
    if not as_json:
        print(*client_lines(run), sep="\n")
    screen.wrote(out, FILES)


def _named(log: "StepLog | None") -> str:
    """The policy that a log names."""
    from ..engine.policy import PRESETS
    from ..profiler.as_logged import policy_of

    return "server" if log is None or log.header.preset not in PRESETS else policy_of(log.header)[0]


def requested(trace: str, time_unit: str | None = None, columns: str | None = None) -> "Requested":
    """The lengths that a trace asks for."""
    from ..report.clients.match import Requested
    from ..traces import load

    found = load(trace, time_unit=time_unit, columns=columns)
    return Requested(found.name, found.arrival, found.input_length, found.output_length)
