"""dsim import: a load generator's measurements of a server as a run."""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import option
from .screen import Screen, say, show


def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Of vllm bench serve --save-detailed, guidellm (JSON) or aiperf (profile_export.jsonl), or a "
            "gateway's log (LiteLLM's, or any with --columns) that has start, first token and end.",
            show_default=False,
        ),
    ],
    trace: Annotated[
        str | None, option("T", "The trace that the client replayed: its arrivals and lengths.", "--trace")
    ] = None,
    time_unit: options.TimeUnit = None,
    columns: options.Columns = None,
    only: options.Only = None,
    skip_bad: options.SkipBad = False,
    policy: Annotated[
        str | None,
        option(
            "NAME",
            "Name of the server's policy: a twin's, to compare with it; by default from the step log, or `server`.",
        ),
    ] = None,
    log: Annotated[
        Path | None, option("FILE", "The server's step log of the same time: adds its steps.", "--log")
    ] = None,
    benchmark: Annotated[
        int | None, option("N", "Which benchmark of a file with several (guidellm's sweep), from 1.", "--benchmark")
    ] = None,
    replicas: Annotated[int, option("N", "Replicas behind the router.", "--replicas")] = 1,
    slo: options.Slos = None,
    missing_fails: options.MissingFails = False,
    out: options.RunOut = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Import a load generator's measurements of a server as a run, with dsim's definitions of metrics.

    dsim import bench.json --trace trace.jsonl --slo ttft=2s -o runs/measured
    dsim import spend.json --only model=sdar-8b --slo ttft=2s -o runs/measured
    dsim import bench.json --log steps.jsonl --json
    """
    from ..api.measured import import_run
    from ..comparison.clients.words import client_lines
    from ..results.manifest import FILES

    screen = Screen()
    run = import_run(
        file, trace=trace, time_unit=time_unit, columns=columns, only=only, skip_bad=skip_bad, policy=policy,
        log=log, replicas=replicas,
        slos=slo or [], missing_passes=not missing_fails, benchmark=benchmark, out=out, force=force,
        _command=options.command(), _warn=screen.warn,
    )  # fmt: skip
    info = run.measured.info
    say(run.page, {key: info.get(key) for key in ("client", "trace", "policies")}, as_json)
    if not as_json:
        show(*client_lines(info))
    screen.wrote(out, FILES)
