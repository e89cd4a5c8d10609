"""dsim compare: predicted runs against measured ones."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast
from typing import Annotated as A

from ..engine.errors import DsimError, cut
from . import questions as q
from .answer import Answer
from .cautions import missed_slos
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..comparison.clients.match import Requested
    from ..comparison.clients.read import ClientLog
    from ..comparison.compared import Compared
    from ..engine.allowed_code import AllowedCode
    from ..planner.given import ProfileLike, TraceLike
    from ..profiler.profile import Profile
    from ..report.run import RunLike
    from ..results.run import Run


@dataclass(frozen=True)
class CompareQuestion(q.Forced, q.Coded, Question["Compared"]):
    """Compare predictions with measurements, and split the error into its parts.

    dsim compare runs/twin runs/live --bound e2el=3% -o runs/compared
    dsim compare runs/twin bench.json --trace mine.jsonl --policy optimus --json
    """

    predicted: A[
        "RunLike | Sequence[RunLike]",
        Opt(
            "Run folders, in pairs of the same requests: the twin's first, then the device's, or a load "
            "generator's file or a gateway's log (dsim import).", "PREDICTED MEASURED [PREDICTED MEASURED ...]",
        ),
    ]  # fmt: skip
    measured: "RunLike | Sequence[RunLike]" = ()  # of as many predicted runs; else `predicted` holds pairs
    _: KW_ONLY
    profiles: A[
        "Sequence[ProfileLike]",
        Opt("A profile that a run names, if it is not shipped; repeat.", "FILE", "Policy and profile", ("--profile",)),
    ] = ()
    bounds: A[
        Sequence[str],
        Opt(
            "[stat:]metric=percent: e2el=3% (MAPE), mean:e2el=15%; exit 1 when missed; repeat.", "BOUND",
            "SLOs and quality", ("--bound",),
        ),
    ] = ()  # fmt: skip
    seeds: A[int, Opt("Re-run with N other seeds: how far one moves a mean.", "N", "Execution")] = 0
    trace: A[
        "TraceLike | None",
        Opt("The trace that a load generator replayed; the predicted run's by default.", "T", "Traffic"),
    ] = None
    columns: A[str | None, q.COLUMNS] = None
    only: A[str | None, q.ONLY] = None
    policy: A[
        str | None, Opt("The policy of the predicted run that a load generator measured.", "P", "Policy and profile")
    ] = None
    fail_on_slo: A[bool, q.FAIL_ON_SLO] = False
    out: A[str | Path | None, q.out("Write compare.json and report.html.")] = None

    def answer(self, watch: Watch) -> "Answer[Compared]":
        from ..comparison import files
        from ..comparison.bounds import Bound
        from ..comparison.cells import check_machines, compare_runs
        from ..comparison.clients.read import read_client
        from ..comparison.compared import Compared
        from ..engine.allowed_code import allowed
        from ..files.place import check_folder
        from ..profiler.profile import Profile, from_json, load

        predicted, measured = self._sides()
        if not 0 <= self.seeds <= 100:
            raise DsimError(f"seeds is {cut(self.seeds)}, expected 0 to 100")
        bounds = [Bound.parse(text) for text in self.bounds]
        if self.folder is not None:
            check_folder(self.folder, files.COMPARISON, force=self.force)
        log_columns = self.columns if self.trace is None else None
        traffic = None if self.trace is None else requested(self.trace, None, self.columns)
        if self.only is not None and not any(map(_client_file, chain(predicted, measured))):
            raise DsimError(f"only is {cut(self.only)} and the runs are imported already, expected a gateway's log")
        doubts: list[str] = []

        def read(file: Path) -> "ClientLog":
            log = read_client(file, log_columns, self.only)
            doubts.extend(log.warnings)
            return log

        code = allowed(self.allow_code)
        pairs = [_pair(p, m, read, traffic, self.policy, code) for p, m in zip(predicted, measured, strict=True)]
        watch.warn(doubts)
        fitted = [
            from_json(run.info.fitted_profile, f"{run.folder}/run.json: fitted_profile")  # of a replay as logged
            for run in chain(*pairs)
            if run.info.fitted_profile is not None
        ]
        given = [profile if isinstance(profile, Profile) else load(profile) for profile in self.profiles]
        profiles = {profile.name: profile for profile in [*fitted, *given]}
        check_machines(pairs)
        with watch.bar("reading", "steps") as bar:
            comparison = compare_runs(
                pairs, partial(_profile, profiles), bounds, seeds=self.seeds,
                progress=lambda policy, done, total: bar.update(done, total, policy),
            )  # fmt: skip
        if self.folder is not None:
            files.write(self.folder, comparison, pairs, force=self.force, command=watch.command())
        compared = Compared(comparison, pairs)
        missed = [str(judged) for judged in comparison.bounds if not judged.met]
        if self.fail_on_slo:
            missed += missed_slos([s for _, run in pairs if os.path.isdir(run.folder) for s in run.info.policies])
        return Answer(
            value=compared, json=comparison.to_json(), page=compared.page, out=self.folder, files=files.FILES,
            missed=missed,
        )  # fmt: skip

    def _sides(self) -> "tuple[Sequence[RunLike], Sequence[RunLike]]":
        predicted, measured = cast("Sequence[RunLike]", self.predicted), cast("Sequence[RunLike]", self.measured)
        if not measured:
            if len(predicted) % 2:
                raise DsimError(f"{len(predicted)} run folders are given, expected pairs: PREDICTED MEASURED")
            predicted, measured = predicted[::2], predicted[1::2]
        if len(predicted) != len(measured):
            raise DsimError(f"{len(predicted)} predicted and {len(measured)} measured runs are given, expected pairs")
        return predicted, measured


def requested(trace: "TraceLike", time_unit: str | None, columns: str | None) -> "Requested":
    """A trace's arrivals and lengths, which a client replayed."""
    from ..comparison.clients.match import Requested
    from ..traces import Trace, load

    known = trace if isinstance(trace, Trace) else load(trace, time_unit=time_unit, columns=columns)
    return Requested(known.name, known.arrival, known.input_length, known.output_length)


def _pair(
    predicted: "RunLike", measured: "RunLike", read: "Callable[[Path], ClientLog]", trace: "Requested | None",
    policy: str | None, allow_code: "AllowedCode",
) -> "tuple[Run, Run]":  # fmt: skip
    """A load generator's file is matched to the other run, or to its trace."""
    from ..comparison.clients.measured import measured_beside, measured_run

    file = _client_file(predicted)
    first: Run = (
        _run(predicted, allow_code) if file is None else measured_run(read(file), trace, policy=policy or "server")
    )
    file = _client_file(measured)
    return first, _run(measured, allow_code) if file is None else measured_beside(first, read(file), trace, policy)


def _client_file(run: "RunLike") -> Path | None:
    """A load generator's file; None for a run's folder or object."""
    return Path(run) if isinstance(run, str | Path) and Path(run).is_file() else None


def _run(run: "RunLike", allow_code: "AllowedCode") -> "Run":
    from ..report.run import RunResult
    from ..results.run import Run, read_run

    if isinstance(run, RunResult):
        return run.run
    return run if isinstance(run, Run) else read_run(run, allow_code)


def _profile(profiles: "Mapping[str, Profile]", name: str) -> "Profile":
    from ..profiler.profile import load

    if name in profiles:
        return profiles[name]
    try:
        return load(name)
    except DsimError:
        raise DsimError(
            f"profile {cut(name)}, which a run names, is not shipped: give its file with --profile"
        ) from None
