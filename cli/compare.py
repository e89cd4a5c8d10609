"""dsim compare: predicted runs against measured ones."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError, cut
from ..files.place import check_folder
from . import options
from .bar import Bar
from .importing import requested
from .options import option
from .screen import Screen, say

if TYPE_CHECKING:
    from ..engine.allowed_code import AllowedCode
    from ..profiler.profile import Profile
    from ..report.run import Run

MISSED = 1


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREDICTED MEASURED [PREDICTED MEASURED ...]",
            help="Run folders, in pairs of the same requests: the twin's first, then the device's, or a load "
            "generator's file (dsim import).",
            show_default=False,
        ),
    ],
    profile: Annotated[
        list[str] | None,
        option("FILE", "A profile that a run names and that is not shipped; repeat.", "--profile"),
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts/--no-parts", help="Re-run each policy to take its error apart, or do not.")
    ] = True,
    bound: Annotated[
        list[str] | None,
        option(
            "BOUND", "\\[stat:]metric=percent: e2el=3% (MAPE), mean:e2el=15%; exit 1 when missed; repeat.", "--bound"
        ),
    ] = None,
    trace: Annotated[
        str | None, option("T", "The trace that a load generator replayed; the predicted run's by default.", "--trace")
    ] = None,
    columns: options.Columns = None,
    policy: Annotated[
        str | None, option("P", "Which policy of the predicted run a load generator measured.", "--policy")
    ] = None,
    across: Annotated[bool, typer.Option("--across", help="Compare different models or devices.")] = False,
    allow_code: options.AllowCode = None,
    out: Annotated[Path | None, option("DIR", "Write compare.json and report.html.", "-o", "--out")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the output folder.")] = False,
) -> None:
    """Say how far predictions are from measurements, and what the error is made of.

    dsim compare runs/twin runs/live --bound e2el=3% -o runs/compared
    """
    from ..engine.allowed_code import allowed
    from ..profiler.profile import load
    from ..report.compare import files as compare_files
    from ..report.compare.bounds import Bound
    from ..report.compare.comparison import compare_runs
    from ..report.compare.page import spoken

    if len(runs) % 2:
        raise DsimError(f"{len(runs)} run folders are given, expected pairs: PREDICTED MEASURED")
    bounds = [Bound.parse(text) for text in bound or []]
    if out is not None:
        check_folder(out, compare_files.COMPARISON, force=force)
    code = allowed(allow_code or [])
    pairs = [_pair(p, m, trace, columns, policy, code) for p, m in zip(runs[::2], runs[1::2], strict=True)]
    held = [_fitted(run) for pair in pairs for run in pair if "fitted_profile" in run.info]
    given = {found.name: found for found in [*held, *map(load, profile or [])]}
    screen = Screen()
    with Bar(screen, "reading", "steps") as bar:
        found = compare_runs(
            pairs,
            partial(_profile, given),
            bounds,
            with_parts=parts,
            across=across,
            progress=lambda policy, done, total: bar.update(done, total, policy),
        )
    if out is not None:  # before a word is said: who listens may leave early
        compare_files.write(out, found, pairs, force=force, command=options.command())
    say(lambda: spoken(found), found.to_json(), as_json)
    screen.wrote(out, compare_files.FILES)
    missed = [judged for judged in found.bounds if not judged.met]
    for judged in missed:
        screen.alarm(str(judged))
    if missed:
        raise typer.Exit(MISSED)


def _pair(
    predicted: Path, measured: Path, trace: str | None, columns: str | None, policy: str | None,
    allow_code: "AllowedCode",
) -> "tuple[Run, Run]":  # fmt: skip
    """Two runs; a load generator's file is read in the terms of the other run, or of its trace."""
    from ..report.clients.measured import measured_beside, measured_run
    from ..report.clients.read import read_client
    from ..report.run import read_run

    asked = None if trace is None else requested(trace, columns=columns)
    if predicted.is_file():
        first: Run = measured_run(read_client(predicted), asked, policy=policy or "server")
    else:
        first = read_run(predicted, allow_code)
    if measured.is_file():
        return first, measured_beside(first, read_client(measured), asked, policy)
    return first, read_run(measured, allow_code)


def _fitted(run: "Run") -> "Profile":
    """The profile that a replay as logged was made with, which its run.json holds."""
    from ..profiler.profile import from_json

    return from_json(run.info["fitted_profile"], f"{run.folder}/run.json: fitted_profile")


def _profile(given: dict[str, "Profile"], name: str) -> "Profile":
    """The profile that a run names."""
    from ..profiler.profile import load

    if name in given:
        return given[name]
    try:
        return load(name)
    except DsimError:
        raise DsimError(
            f"profile {cut(name)}, which a run names, is not shipped: give its file with --profile, or --no-parts"
        ) from None
