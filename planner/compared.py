"""Predicted runs next to measured ones: reads the runs that a caller names, and compares them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..comparison import files as compare_files
from ..comparison.bounds import Bound
from ..comparison.cells import Comparison, Progress, compare_runs
from ..comparison.clients.imported import requested
from ..comparison.clients.measured import measured_beside, measured_run
from ..comparison.clients.read import read_client
from ..comparison.page import compare_page, spoken
from ..engine.allowed_code import AllowedCode, allowed
from ..engine.errors import DsimError, cut
from ..files.place import check_folder
from ..profiler.profile import Profile, from_json, load
from ..report.page import Figure, Page
from ..report.shown import Showable, frame_of
from ..results.run import Run, read_run
from .given import ProfileLike, TraceLike
from .recorded import OfRun

if TYPE_CHECKING:
    import pandas as pd

RunLike: TypeAlias = str | Path | OfRun | Run


@dataclass(frozen=True, repr=False)
class Compared(Showable):
    """A comparison, and the pairs of runs that it is of."""

    comparison: Comparison
    pairs: Sequence[tuple[Run, Run]]

    def page(self) -> Page:
        return spoken(self.comparison)

    def figures(self) -> list[Figure]:
        return compare_page(self.comparison, self.pairs).figures

    def to_frame(self) -> "pd.DataFrame":
        """A row a policy and metric: its statistics in both runs in the metric's unit, and the relative errors."""
        cells = self.to_json()["cells"]
        return frame_of([{"policy": c["policy"], "metric": m, **v} for c in cells for m, v in c["metrics"].items()])

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints and compare.json holds."""
        return self.comparison.to_json()


def compared(
    runs: Sequence[tuple[RunLike, RunLike]],
    *,
    profiles: Iterable[ProfileLike] = (),
    parts: bool = True,
    bounds: Sequence[str] = (),
    trace: TraceLike | None = None,
    columns: str | None = None,
    policy: str | None = None,
    across: bool = False,
    allow_code: Iterable[str | Path] = (),
    out: Path | None = None,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Compared:
    """Compare pairs of (predicted, measured) runs, and write the comparison's folder where `out` names one.

    profiles: unshipped ones that runs name. trace, columns, policy: of a load generator's file. command: for the page.
    """
    wanted = [Bound.parse(text) for text in bounds]
    if out is not None:
        check_folder(out, compare_files.COMPARISON, force=force)
    code = allowed(allow_code)
    pairs = [_pair(p, m, trace, columns, policy, code) for p, m in runs]
    held = [_fitted(run) for pair in pairs for run in pair if "fitted_profile" in run.info]
    more = [profile if isinstance(profile, Profile) else load(profile) for profile in profiles]
    given = {found.name: found for found in [*held, *more]}
    found = compare_runs(
        pairs, partial(_profile, given), wanted, with_parts=parts, across=across, progress=progress
    )  # fmt: skip
    if out is not None:
        compare_files.write(out, found, pairs, force=force, command=command)
    return Compared(found, pairs)


def _pair(
    predicted: RunLike, measured: RunLike, trace: TraceLike | None, columns: str | None, policy: str | None,
    allow_code: AllowedCode,
) -> tuple[Run, Run]:  # fmt: skip
    """Two runs; a load generator's file is read in the terms of the other run, or of its trace."""
    asked = None if trace is None else requested(trace, columns=columns)
    if (file := _file(predicted)) is not None:
        first: Run = measured_run(read_client(file), asked, policy=policy or "server")
    else:
        first = _run(predicted, allow_code)
    if (file := _file(measured)) is not None:
        return first, measured_beside(first, read_client(file), asked, policy)
    return first, _run(measured, allow_code)


def _file(run: RunLike) -> Path | None:
    """The load generator's file that a run is named by; None for a run's folder or object."""
    return Path(run) if isinstance(run, str | Path) and Path(run).is_file() else None


def _run(run: RunLike, allow_code: AllowedCode) -> Run:
    if isinstance(run, OfRun):
        return run.run
    return run if isinstance(run, Run) else read_run(run, allow_code)


def _fitted(run: Run) -> Profile:
    """The profile that a replay as logged was made with, which its run.json holds."""
    return from_json(run.info["fitted_profile"], f"{run.folder}/run.json: fitted_profile")


def _profile(given: dict[str, Profile], name: str) -> Profile:
    """The profile that a run names."""
    if name in given:
        return given[name]
    try:
        return load(name)
    except DsimError:
        raise DsimError(
            f"profile {cut(name)}, which a run names, is not shipped: give its file with --profile, or --no-parts"
        ) from None
