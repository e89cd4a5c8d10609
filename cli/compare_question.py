"""dsim compare: predicted runs against measured ones."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..engine.errors import DsimError
from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..comparison.comparison import Comparison
    from ..engine.allowed_code import AllowedCode
    from ..profiler.profile import Profile
    from ..report.run_page import RunLike
    from ..results.run import Run
    from .objects import ProfileLike


@dataclass(frozen=True)
class CompareQuestion(q.Forced, q.Coded, Question["Comparison"]):
    """Compare predictions with measurements, and split the error into its parts.

    dsim compare runs/twin runs/live --bound e2el=3% -o runs/compared
    dsim compare runs/twin runs/server --json

    Arguments:
      predicted RUN...: Run folders, in pairs of the same requests: PREDICTED MEASURED ..., the twin's first, then the
          device's, or a server's (dsim import).
    Policy and profile:
      --profile FILE (profiles): A profile that a run names, if it is not shipped; repeat.
    SLOs and quality:
      --bound BOUND (bounds): [stat:]metric=percent: e2el=3% (MAPE), mean:e2el=15%; exit 1 when missed; repeat.
    Output:
      -o, --out DIR: Write compare.json and report.html.
    """

    predicted: "RunLike | Sequence[RunLike]"
    measured: "RunLike | Sequence[RunLike]" = ()  # of as many predicted runs; else `predicted` holds pairs
    _: KW_ONLY
    profiles: "Sequence[ProfileLike]" = ()
    bounds: Sequence[str] = ()

    def answer(self, watch: Watch) -> "Answer[Comparison]":
        from ..comparison.bounds import Bound
        from ..comparison.comparison import COMPARISON, FILES, compare_runs
        from ..engine.allowed_code import allowed
        from ..files.place import check_folder, write_folder
        from ..profiler.profile import load
        from ..report.html import result_files

        predicted, measured = self._sides()
        bounds = [Bound.parse(text) for text in self.bounds]
        if self.folder is not None:
            check_folder(self.folder, COMPARISON, force=self.force)
        code = allowed(self.allow_code)
        pairs = [(_run(p, code), _run(m, code)) for p, m in zip(predicted, measured, strict=True)]
        profiles = self._profiles(pairs)
        with watch.bar("reading", "steps") as bar:
            comparison = compare_runs(
                pairs,
                lambda name: profiles.get(name) or load(name),
                bounds,
                progress=lambda policy, done, total: bar.update(done, total, policy),
            )
        if self.folder is not None:
            write_folder(self.folder, COMPARISON, result_files(comparison, watch.command()), force=self.force)
        return Answer(value=comparison, out=self.folder, files=FILES, missed=comparison.missed)

    def _profiles(self, pairs: "Sequence[tuple[Run, Run]]") -> "dict[str, Profile]":
        """By name: of runs that hold theirs (a replay as logged), and the given ones."""
        from ..profiler.profile import from_json
        from .objects import loaded

        profiles = []
        for run in chain(*pairs):
            if run.info.fitted_profile is not None:
                profiles.append(from_json(run.info.fitted_profile, f"{run.folder}/run.json: fitted_profile"))
        profiles += map(loaded, self.profiles)
        return {profile.name: profile for profile in profiles}

    def _sides(self) -> "tuple[Sequence[RunLike], Sequence[RunLike]]":
        predicted, measured = cast("Sequence[RunLike]", self.predicted), cast("Sequence[RunLike]", self.measured)
        if not measured:
            if len(predicted) % 2:
                raise DsimError(f"{len(predicted)} run folders are given, expected pairs: PREDICTED MEASURED")
            predicted, measured = predicted[::2], predicted[1::2]
        if len(predicted) != len(measured):
            raise DsimError(f"{len(predicted)} predicted and {len(measured)} measured runs are given, expected pairs")
        return predicted, measured


def _run(run: "RunLike", allow_code: "AllowedCode") -> "Run":
    from ..report.run_page import RunResult
    from ..results.run import Run, read_run

    if isinstance(run, RunResult):
        return run.run
    if isinstance(run, Run):
        return run
    if Path(run).is_file():
        raise DsimError(f"{run}: is a file, expected a run's folder: make it one with dsim import {run} -o DIR")
    return read_run(run, allow_code)
