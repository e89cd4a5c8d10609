"""dsim sweep: run a grid or list of worlds once each, and tabulate them."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from . import questions as q
from .answer import Answer
from .cautions import warn, warn_of_yields
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..planner.sweep import Sweep


@dataclass(frozen=True)
class SweepQuestion(q.Somewhere, q.Forced, q.Coded, Question["Sweep"]):
    """Run every cell of a sweep, and write a table and a report; after an interrupt, the same command continues.

    dsim sweep examples/sweep.toml -o runs/sweep
    dsim sweep examples/sweep.toml --ray auto -o runs/sweep

    Arguments:
      config CONFIG.toml: The fixed and the varied fields: docs/sweep.md.
    Output:
      -o, --out DIR: Folder for results; finished cells in it are not run again.
    """

    config: str | Path | Mapping[str, Any]
    _: KW_ONLY
    jobs: int | None = None

    def answer(self, watch: Watch) -> "Answer[Sweep]":
        from ..planner.sweep import FILES, sweep

        config = self.config
        if isinstance(config, Mapping):
            from .objects import named_config

            config = named_config(config)
        if self.out is None and not watch.in_python:
            raise DsimError("--out is missing, expected a folder for the results (-o DIR)")
        with watch.bar("sweep", "cells") as bar:
            options = self.values("jobs", "ray", "force", "allow_code")
            done = sweep(config, self.out, **options, progress=bar.update, command=watch.command())
        errors = [f"cell {row['key']}: {row['error']}" for row in done.results if row["error"] is not None]
        failure = DsimError(f"every cell failed; the first: {errors[0]}") if len(errors) == done.num_cells else None
        if len(errors) > 3:
            errors[3:] = [f"{len(errors) - 3} more cells failed: column error"]
        watch.warn(errors)
        warn(watch, *done.services)
        warn_of_yields(watch, *done.services)
        state = f"{len(done.results)} of {done.num_cells} cells are finished and kept; to go on: {watch.command()}"
        return Answer(
            value=done,
            json=done.to_json(),
            lines=[_account(done)],
            out=self.folder,
            files=FILES,
            failure=failure,
            interrupted=f"Interrupted: {state} -o {self.out}" * done.interrupted,
        )


def _account(done: "Sweep") -> str:
    from ..report.page import priced_apart

    parts = [f"{done.num_cells} cells", f"{done.num_run} run"]
    counts = {"there already": done.num_reused, "failed": done.num_failed, "unstable": done.num_unstable}
    parts += [f"{count} {kind}" for kind, count in counts.items() if count]
    if done.estimated:
        parts.append(f"estimated, not measured ({', '.join(done.estimated)})")
    return "; ".join(parts) + priced_apart(done.implementations)
