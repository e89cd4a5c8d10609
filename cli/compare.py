"""dsim compare: predicted runs against measured ones."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import DsimError
from . import options
from .bar import Bar
from .options import option
from .screen import Screen, say


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREDICTED MEASURED [PREDICTED MEASURED ...]",
            help="Run folders, in pairs of the same requests: the twin's first, then the device's, or a load "
            "generator's file or a gateway's log (dsim import).",
            show_default=False,
        ),
    ],
    profile: Annotated[
        list[str] | None,
        option("FILE", "A profile that a run names, if it is not shipped; repeat.", "--profile"),
    ] = None,
    bound: Annotated[
        list[str] | None,
        option("BOUND", "[stat:]metric=percent: e2el=3% (MAPE), mean:e2el=15%; exit 1 when missed; repeat.", "--bound"),
    ] = None,
    seeds: Annotated[int, option("N", "Re-run with N other seeds: how far one moves a mean.", "--seeds")] = 0,
    trace: Annotated[
        str | None, option("T", "The trace that a load generator replayed; the predicted run's by default.", "--trace")
    ] = None,
    columns: options.Columns = None,
    only: options.Only = None,
    policy: Annotated[
        str | None, option("P", "The policy of the predicted run that a load generator measured.", "--policy")
    ] = None,
    allow_code: options.AllowCode = None,
    out: Annotated[Path | None, option("DIR", "Write compare.json and report.html.", "-o", "--out")] = None,
    fails_on_slo: options.FailOnSlo = False,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Compare predictions with measurements, and split the error into its parts.

    dsim compare runs/twin runs/live --bound e2el=3% -o runs/compared
    dsim compare runs/twin bench.json --trace mine.jsonl --policy optimus --json
    """
    from ..api.measured import compare
    from ..comparison.files import FILES
    from ..results.run import read_run

    if len(runs) % 2:
        raise DsimError(f"{len(runs)} run folders are given, expected pairs: PREDICTED MEASURED")
    screen = Screen()
    with Bar(screen, "reading", "steps") as bar:
        # Before printing: a pipe's reader may close early.
        done = compare(
            runs[::2], runs[1::2], profiles=profile or [], bounds=bound or [], seeds=seeds, trace=trace,
            columns=columns, only=only, policy=policy, allow_code=allow_code or [], out=out, force=force,
            _command=options.command(), _warn=screen.warn,
            _progress=lambda policy, done, total: bar.update(done, total, policy),
        )  # fmt: skip
    found = done.comparison
    say(done.page, found.to_json(), as_json)
    screen.wrote(out, FILES)
    options.exit_if_any(screen, [str(judged) for judged in found.bounds if not judged.met])
    if fails_on_slo:  # of the measured runs
        measured = [read_run(folder) for folder in filter(os.path.isdir, runs[1::2])]
        options.fail_on_slo(screen, [summary for run in measured for summary in run.info["policies"]])
