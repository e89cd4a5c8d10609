"""Runs in `import dsim`: replay a trace, load a run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Unpack

from ..engine.allowed_code import allowed
from ..engine.policy import Policy, parse
from ..planner.backend import Pool
from ..planner.ensemble import check_num
from ..planner.ensemble import ensemble as run_ensemble
from ..planner.given import PolicyLike, ProfileLike, TraceLike
from ..planner.recorded import Recorded, Replay
from ..planner.replay_run import check_place, write_replay
from ..profiler.profile import load as _load_profile
from ..results.fleet_file import FleetWords
from ..results.run import read_run
from ..results.scenario import Scenario, named_code, on_fleet
from ..traces import load as _load_trace
from .scenarios import scenarios_of
from .signature import Traffic, real_signature

load_trace = real_signature(_load_trace, "load_trace")


load_profile = real_signature(_load_profile, "load_profile")


@real_signature
def parse_policy(spec: str, allow_code: Sequence[str | Path] = ()) -> Policy:
    """Parse a policy's SPEC or TOML file; a code file in the SPEC is loaded. Raises DsimError.

    allow_code: files that a TOML file may name (docs/security.md).
    """
    return parse(spec, named_code([spec], allow_code))


@real_signature
def load_run(folder: str | Path, *, allow_code: Iterable[str | Path] = ()) -> Recorded:
    """The run in a folder of `dsim replay`, `dsim live` or `dsim import`. Raises DsimError."""
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
    links: Sequence[str] = (),
    decider: str = Scenario.decider,
    fleet: str | Path | None = None,
    scaler: str = Scenario.scaler,
    startup: float | str = Scenario.startup,
    ensemble: int | None = None,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **traffic: Unpack[Traffic],
) -> Replay:
    """Replay a trace in the twin under one or several policies.

    trace, profile, policy: as on the command line, a pandas frame of requests, or results of `load_trace`,
    `load_profile` and `parse_policy`. pools: `[NAME:]COUNT@PROFILE,POLICY` each, instead of policy, profile and
    replicas. links, decider: prefill pools, and which requests they take. fleet: a TOML file of these. scaler: changes
    the number of replicas; startup: s until a new one serves. ensemble: number of profiles drawn from this one's
    uncertainty; 19 or more give intervals. jobs, backend, address: where they are replayed, as in `dsim.sweep`; without
    them jobs are the threads of a replay, by default one a core. out: a folder as of `dsim replay -o`. Raises
    DsimError.
    """
    check_place(ensemble, jobs, backend, address)
    scenarios = scenarios_of(
        trace, policy, profile, slos, traffic, rate=rate, num_requests=num_requests, replicas=replicas
    )
    router = traffic.get("router", Scenario.router)
    words = FleetWords(tuple(pools), tuple(links), router, decider, scaler, f"{startup or 0}").or_file(fleet)
    scenarios = on_fleet(scenarios, words, named=fleet is None)
    check_num(ensemble, scenarios)
    for scenario in scenarios:
        _ = scenario.setting().check().limits
    requests = scenarios[0].requests()
    folder = None if out is None else Path(out)
    drawn = {}
    if ensemble is not None:
        with Pool(backend, jobs, address) as pool:
            drawn = {"ensemble": run_ensemble(scenarios, requests, ensemble, pool=pool).to_json()}
    done = write_replay(scenarios, requests, drawn, out=folder, force=force, jobs=jobs)
    return Replay(done.results, done.summaries, done.manifest, tuple(scenarios), requests, folder)
