"""Measured runs in `import dsim`: import a load generator's file, compare runs."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from ..comparison import files as compare_files
from ..comparison.bounds import Bound
from ..comparison.cells import Progress, check_machines, compare_runs
from ..comparison.clients.match import Requested
from ..comparison.clients.measured import measured_beside, measured_run, write_measured
from ..comparison.clients.read import ClientLog, read_client
from ..comparison.compared import Compared
from ..engine.allowed_code import AllowedCode, allowed
from ..engine.errors import DsimError, cut
from ..engine.policy import PRESETS
from ..files.place import check_folder
from ..files.read import printable
from ..planner.given import ProfileLike, TraceLike
from ..planner.recorded import Imported, OfRun
from ..profiler.as_logged import policy_of
from ..profiler.profile import Profile, from_json, load
from ..profiler.steplog import read_log
from ..results.run import Run, read_run
from ..results.scenario import MAX_REPLICAS
from ..results.slo import Slo
from ..traces import Trace
from ..traces import load as load_trace
from .scenarios import texts_of
from .signature import real_signature, warn

RunLike: TypeAlias = str | Path | OfRun | Run


@real_signature
def import_run(
    file: str | Path,
    *,
    trace: TraceLike | None = None,
    time_unit: str | None = None,
    columns: str | None = None,
    only: str | None = None,
    skip_bad: bool = False,
    policy: str | None = None,
    log: str | Path | None = None,
    replicas: int = 1,
    slos: Sequence[str] = (),
    missing_passes: bool = True,
    benchmark: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    _command: str = "",
    _warn: Callable[[Iterable[str]], object] = warn,
) -> Imported:
    """Import a load generator's measurements of a server as a run, with dsim's definitions of the metrics.

    file: of vllm bench serve, guidellm or aiperf, a step log, or a gateway's log. trace: what the client replayed. log:
    the server's, of the same time. benchmark: which of several in the file, from 1.
    Doubts are Python warnings. Raises DsimError.
    """
    if not 1 <= replicas <= MAX_REPLICAS:
        raise DsimError(f"replicas is {cut(replicas)}, expected 1 to {MAX_REPLICAS}")
    own = columns if trace is None else None  # of the log, without another trace
    client = read_client(file, own, only, time_unit if trace is None else None, skip_bad, benchmark)
    doubts = client.warnings
    if log is not None and client.steps is not None:
        raise DsimError(f"log is {log} and {file} is a step log itself: expected one of them")
    engine = client.steps if log is None else read_log(Path(log))
    named = "server" if engine is None or engine.header.preset not in PRESETS else policy_of(engine.header)[0]
    run = measured_run(
        client, None if trace is None else _requested(trace, time_unit, columns),
        policy=printable(policy or named), slos=[Slo.parse(text) for text in texts_of(slos)],
        missing_passes=missing_passes, replicas=replicas, engine=engine,
    )  # fmt: skip
    if _command:
        run.info["command"] = _command
    _warn([*doubts, *run.info["client"]["warnings"]])
    if out is not None:
        write_measured(run, Path(out), force=force)
    return Imported(run, None if out is None else Path(out))


@real_signature
def compare(
    predicted: RunLike | Sequence[RunLike],
    measured: RunLike | Sequence[RunLike],
    *,
    profiles: Sequence[ProfileLike] = (),
    bounds: Sequence[str] = (),
    seeds: int = 0,
    trace: TraceLike | None = None,
    columns: str | None = None,
    only: str | None = None,
    policy: str | None = None,
    allow_code: Iterable[str | Path] = (),
    out: str | Path | None = None,
    force: bool = False,
    _command: str = "",
    _warn: Callable[[Iterable[str]], object] = warn,
    _progress: Progress | None = None,
) -> Compared:
    """Compare predicted with measured runs of the same requests, and divide the error into its parts.

    predicted, measured: a run's folder, a result of `replay`, `import_run` or `load_run`, a load generator's file, or
    lists of them, in pairs. profiles: those of the runs that are not shipped. bounds: `[stat:]metric=percent`, judged
    in the result. seeds: others to re-run with, which tell chance from error. trace, columns, only, policy: of a load
    generator's file or a gateway's log. Raises DsimError.
    """
    sides = [[s] if isinstance(s, str | Path | OfRun | Run) else list(s) for s in (predicted, measured)]
    if len(sides[0]) != len(sides[1]):
        raise DsimError(f"{len(sides[0])} predicted and {len(sides[1])} measured runs are given, expected pairs")
    if not 0 <= seeds <= 100:
        raise DsimError(f"seeds is {cut(seeds)}, expected 0 to 100")
    wanted = [Bound.parse(text) for text in texts_of(bounds)]
    if out is not None:
        check_folder(Path(out), compare_files.COMPARISON, force=force)
    code = allowed(allow_code)
    requested = None if trace is None else _requested(trace, None, columns)
    if only is not None and not any(map(_file, chain(*sides))):
        raise DsimError(f"only is {cut(only)} and the runs are imported already, expected a gateway's log")

    doubts: list[str] = []

    def read(file: Path) -> ClientLog:
        log = read_client(file, columns if trace is None else None, only)
        doubts.extend(log.warnings)
        return log

    pairs = [_pair(p, m, read, requested, policy, code) for p, m in zip(*sides, strict=True)]
    _warn(doubts)
    fitted = [_fitted(run) for pair in pairs for run in pair if "fitted_profile" in run.info]
    given = [profile if isinstance(profile, Profile) else load(profile) for profile in profiles]
    known = {profile.name: profile for profile in [*fitted, *given]}
    check_machines(pairs)
    found = compare_runs(pairs, partial(_profile, known), wanted, seeds=seeds, progress=_progress)
    if out is not None:
        compare_files.write(Path(out), found, pairs, force=force, command=_command)
    return Compared(found, pairs)


def _requested(trace: TraceLike, time_unit: str | None, columns: str | None) -> Requested:
    found = trace if isinstance(trace, Trace) else load_trace(trace, time_unit=time_unit, columns=columns)
    return Requested(found.name, found.arrival, found.input_length, found.output_length)


def _pair(
    predicted: RunLike, measured: RunLike, read: Callable[[Path], ClientLog], requested: Requested | None,
    policy: str | None, allow_code: AllowedCode,
) -> tuple[Run, Run]:  # fmt: skip
    """A load generator's file is matched to the other run, or to its trace."""
    if (file := _file(predicted)) is not None:
        first: Run = measured_run(read(file), requested, policy=policy or "server")
    else:
        first = _run(predicted, allow_code)
    if (file := _file(measured)) is not None:
        return first, measured_beside(first, read(file), requested, policy)
    return first, _run(measured, allow_code)


def _file(run: RunLike) -> Path | None:
    """A load generator's file; None for a run's folder or object."""
    return Path(run) if isinstance(run, str | Path) and Path(run).is_file() else None


def _run(run: RunLike, allow_code: AllowedCode) -> Run:
    if isinstance(run, OfRun):
        return run.run
    return run if isinstance(run, Run) else read_run(run, allow_code)


def _fitted(run: Run) -> Profile:
    """Of a replay as logged, in its run.json."""
    return from_json(run.info["fitted_profile"], f"{run.folder}/run.json: fitted_profile")


def _profile(known: dict[str, Profile], name: str) -> Profile:
    if name in known:
        return known[name]
    try:
        return load(name)
    except DsimError:
        raise DsimError(
            f"profile {cut(name)}, which a run names, is not shipped: give its file with --profile"
        ) from None
