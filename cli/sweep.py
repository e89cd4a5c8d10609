"""dsim sweep: run a grid or list of scenarios once each, and tabulate them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import DsimError
from . import options
from .bar import Bar
from .options import INTERRUPTED
from .screen import Screen, print_json, show

if TYPE_CHECKING:
    from ..planner.sweep import Sweep


def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="The fixed and the varied fields: docs/sweep.md.")
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="Folder for results; finished cells in it are not run again."),
    ],
    ensemble: options.Ensemble = None,
    allow_code: options.AllowCode = None,
    jobs: options.Jobs = None,
    backend: options.Backend = "local",
    address: options.Address = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew: discard the folder's content.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run every cell of a sweep, and write a table and a report; after an interrupt, the same command continues.

    dsim sweep examples/sweep.toml -o runs/sweep
    dsim sweep examples/sweep.toml --backend ray --address auto -o runs/sweep
    """
    from ..planner.sweep import FILES
    from ..planner.sweep import sweep as run_sweep
    from ..report.ensemble import decided, sentences

    screen = Screen()
    with Bar(screen, "sweep", "cells") as bar:
        done = run_sweep(
            config, out, jobs=jobs, backend=backend, address=address, force=force, progress=bar.update,
            command=options.command(options.SPEED), allow_code=allow_code or [],
            ensemble=ensemble,
            asking=lambda done, of: bar.update(done, of, "asking drawn profiles", unit="replays"),
        )  # fmt: skip
    failed = done.table[done.table["error"].notna()]
    if as_json:
        print_json(done.to_json())
    else:
        drawn = None if done.ensemble is None else done.ensemble.to_json()
        show(decided(_account(done), {"ensemble": drawn}), *(sentences(drawn) if drawn else []))
    screen.warn(f"cell {cell}: {error}" for cell, error in zip(failed["key"][:3], failed["error"][:3], strict=True))
    if len(failed) > 3:
        screen.warn([f"{len(failed) - 3} more cells failed: column error"])
    options.warn(screen, *done.first.values())
    options.warn_of_yields(screen, *done.first.values())
    if done.interrupted:
        screen.alarm(
            f"Interrupted: {len(done.table)} of {done.num_cells} cells are finished and kept; "
            f"to go on: {options.command(options.SPEED)} -o {out}"
        )
    screen.wrote(out, FILES)
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)
    if len(failed) == done.num_cells:
        raise DsimError(f"every cell failed; the first: {failed['error'].iloc[0]}")


def _account(done: "Sweep") -> str:
    from ..report.page import priced_apart

    said = done.to_json()
    parts = [f"{done.num_cells} cells", f"{done.num_run} run"]
    if done.num_reused:
        parts.append(f"{done.num_reused} there already")
    parts += [f"{said[f'num_{what}']} {what}" for what in ("failed", "unstable") if said[f"num_{what}"]]
    if done.plan.estimated:
        parts.append(f"estimated, not measured ({', '.join(done.plan.estimated)})")
    return "; ".join(parts) + priced_apart(done.plan.implementations)
