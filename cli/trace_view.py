"""dsim trace-view: a run for chrome://tracing or ui.perfetto.dev."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.errors import DsimError
from .options import option


def trace_view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    out: Annotated[Path | None, option("FILE", "Where to write; RUN.trace.json by default.", "-o", "--out")] = None,
    begin: Annotated[float, option("S", "From this second of the run on.", "--from")] = 0.0,
    end: Annotated[float | None, option("S", "Up to this second.", "--to")] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Also what each row did in each step: best with --from and --to.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a run's replicas, steps and requests as trace events, to be opened in Perfetto or chrome://tracing.

    dsim trace-view runs/azure --from 1860 --to 1880 --rows
    """
    # Imported here: reading a run loads pyarrow.
    from ..report.run import read_run
    from ..report.trace_view import write_events

    last = math.inf if end is None else end
    if not 0 <= begin < last:
        raise DsimError(f"--from is {begin:g} s and --to is {last:g} s, expected a stretch of time after 0 s")
    found = read_run(run)
    file = out if out is not None else run.parent / f"{run.absolute().name}.trace.json"
    if file.exists() and not force:
        raise DsimError(f"{file} exists: choose another name, or pass --force to replace it")
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            count = write_events(stream, found, begin, last, rows)
        os.replace(part, file)
    except OSError as error:
        raise DsimError(f"{file}: cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"Wrote {file} ({count:,} events): open it at ui.perfetto.dev or chrome://tracing", markup=False
    )
