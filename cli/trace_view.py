"""dsim trace-view: a run for chrome://tracing or ui.perfetto.dev."""

import io
import math
from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import DsimError
from ..files.write import check_file, writing
from .options import option
from .screen import Screen


def trace_view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    out: Annotated[Path | None, option("FILE", "Where to write; RUN.trace.json by default.", "-o", "--out")] = None,
    begin: Annotated[float, option("S", "Start at this second of the run.", "--from")] = 0.0,
    end: Annotated[float | None, option("S", "End at this second.", "--to")] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Also show each row of each step; best with --from and --to.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a run's replicas, steps and requests as trace events for Perfetto or chrome://tracing.

    dsim trace-view runs/azure --from 1860 --to 1880 --rows
    dsim trace-view runs/azure -o azure.trace.json --force
    """
    # Loads pyarrow.
    from ..report.trace_view import write_events
    from ..results.run import read_run

    last = math.inf if end is None else end
    if not 0 <= begin < last:
        raise DsimError(f"--from is {begin:g} s and --to is {last:g} s, expected a stretch of time after 0 s")
    found = read_run(run)
    file = out if out is not None else run.parent / f"{run.absolute().name}.trace.json"
    check_file(file, force=force)
    with writing(file) as data:
        text = io.TextIOWrapper(data, encoding="utf-8", write_through=True)
        count = write_events(text, found, begin, last, rows)
        text.detach()
    Screen().print(f"Wrote {file} ({count:,} events): open it at ui.perfetto.dev or chrome://tracing", markup=False)
