"""Runs in `import dsim`: replayed, measured, loaded and compared."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from ..comparison.clients.imported import imported
from ..comparison.clients.measured import write_measured
from ..comparison.measured_log import columns_of, measured_log
from ..engine.allowed_code import allowed
from ..engine.errors import DsimError
from ..engine.policy import Policy, parse
from ..planner.compared import Compared, RunLike, compared
from ..planner.ensemble import check_num
from ..planner.ensemble import ensemble as run_ensemble
from ..planner.given import PolicyLike, ProfileLike, TraceLike
from ..planner.record import in_twin, memory_told, record
from ..planner.recorded import OfRun, Recorded, Replay
from ..planner.space import runs_on
from ..planner.spread import moved_by_spread
from ..profiler.profile import load as _load_profile
from ..results.run import Run, read_run
from ..results.scenario import Scenario, named_code, on_fleet
from ..traces import load as _load_trace
from .scenarios import folder_of, scenarios_of, texts_of
from .signature import Traffic, real_signature

load_trace = real_signature(_load_trace, "load_trace")


load_profile = real_signature(_load_profile, "load_profile")


@real_signature
def parse_policy(spec: str, allow_code: Sequence[str | Path] = ()) -> Policy:
    """The policy of a SPEC, whose own file of code is loaded, or of a TOML file. Raises DsimError.

    allow_code: files of code that a TOML file may name (docs/security.md).
    """
    return parse(spec, named_code([spec], allow_code))


@real_signature
def load_run(folder: str | Path, *, allow_code: Iterable[str | Path] = ()) -> Recorded:
    """The run in a folder that `dsim replay`, `dsim live` or `dsim import` wrote. Raises DsimError."""
    return Recorded(read_run(folder, allowed(allow_code)))


@real_signature
def replay(
    trace: TraceLike,
    policy: PolicyLike | Sequence[PolicyLike] = Scenario.policy,
    *,
    profile: ProfileLike = Scenario.profile,
    slos: Sequence[str] = (),
    rate: float | None = None,
    num_requests: int | None = None,
    replicas: int | None = None,
    pools: Sequence[str] = (),
    scaler: str = Scenario.scaler,
    startup: float = Scenario.startup,
    ensemble: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **traffic: Unpack[Traffic],
) -> Replay:
    """Replay a trace in the twin under one or several policies.

    trace, profile, policy: names, files and SPECs as on the command line, a pandas frame of requests, or what
    `load_trace`, `load_profile` and `parse_policy` return. pools: of a fleet, `[NAME:]COUNT@PROFILE,POLICY` each, in
    place of policy, profile and replicas. scaler: changes the number of replicas. startup: s that a replica takes to
    start. ensemble: number of profiles to draw from what is not known of this one; 19 or more give intervals. out: a
    folder for the run's files and report, as `dsim replay -o`.
    Raises DsimError.
    """
    if ensemble is not None:
        check_num(ensemble)
    scenarios = scenarios_of(
        trace, policy, profile, slos, traffic, rate=rate, num_requests=num_requests, replicas=replicas
    )
    scenarios = on_fleet(scenarios, pools, scaler, startup)
    for scenario in scenarios:
        runs_on(scenario.loaded_profile(), scenario.workload)(scenario.parsed_policy())
    requests = scenarios[0].requests()
    folder = None if out is None else Path(out)
    told: dict[str, Any] = {} if folder is None else {"spread": moved_by_spread(scenarios, requests)}
    if ensemble is not None:
        told["ensemble"] = run_ensemble(scenarios, requests, ensemble).to_json()
    done = record(
        scenarios, requests, in_twin, out=folder, force=force,
        about=lambda results: {
            **told, "memory": memory_told(scenarios, requests, results),
            "measured": measured_log(scenarios[0], columns_of(scenarios, results)),
        },
    )  # fmt: skip
    return Replay(done.results, done.summaries, done.manifest, tuple(scenarios), requests, folder)


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
    metrics: str | Path | None = None,
    metrics_before: str | Path | None = None,
    replicas: int = 1,
    drop_warmup: float = 0.0,
    slos: Sequence[str] = (),
    missing_passes: bool = True,
    out: str | Path | None = None,
    force: bool = False,
) -> Recorded:
    """What a load generator measured of a server, by dsim's definitions: a run to look at and to compare with.

    file: of vllm bench serve, guidellm or aiperf, a step log, or a gateway's log. trace: what the client replayed.
    log, metrics: what the server wrote meanwhile. What is doubtful is a Python warning. Raises DsimError.
    """
    run, doubts = imported(
        file, trace=trace, time_unit=time_unit, columns=columns, only=only, skip_bad=skip_bad, policy=policy, log=log,
        metrics=metrics, metrics_before=metrics_before, replicas=replicas, drop_warmup=drop_warmup,
        slos=texts_of(slos), missing_passes=missing_passes,
    )  # fmt: skip
    for line in doubts:
        warnings.warn(line, stacklevel=3)
    kept, folder = folder_of(out)
    write_measured(run, folder, force=force)
    return Recorded(read_run(folder), kept)


@real_signature
def compare(
    predicted: RunLike | Sequence[RunLike],
    measured: RunLike | Sequence[RunLike],
    *,
    profiles: Sequence[ProfileLike] = (),
    parts: bool = True,
    bounds: Sequence[str] = (),
    trace: TraceLike | None = None,
    columns: str | None = None,
    policy: str | None = None,
    across: bool = False,
    allow_code: Iterable[str | Path] = (),
    out: str | Path | None = None,
    force: bool = False,
) -> Compared:
    """How far predicted runs are from measured ones of the same requests, and what the error is made of.

    predicted, measured: a run's folder, what `replay`, `import_run` and `load_run` return, a load generator's file, or
    a list of these, pair by pair. profiles: those that runs name and that are not shipped. bounds: each is
    `[stat:]metric=percent`, and the result says whether it is met. trace, columns, policy: of a load generator's file.
    Raises DsimError.
    """
    sides = [[s] if isinstance(s, str | Path | OfRun | Run) else list(s) for s in (predicted, measured)]
    if len(sides[0]) != len(sides[1]):
        raise DsimError(f"{len(sides[0])} predicted and {len(sides[1])} measured runs are given, expected pairs")
    return compared(
        list(zip(*sides, strict=True)), profiles=profiles, parts=parts, bounds=texts_of(bounds),
        trace=trace, columns=columns, policy=policy, across=across, allow_code=allow_code,
        out=None if out is None else Path(out), force=force,
    )  # fmt: skip
