"""Searches in `import dsim`: capacity, plan, tune and sweep."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ..planner.capacity import Capacity, question_of
from ..planner.deploy import UNROUTED
from ..planner.given import PolicyLike, ProfileLike, TraceLike, spec_of
from ..planner.plan_run import Options, answer
from ..planner.plan_run import question_of as plan_question
from ..planner.planned import Planned
from ..planner.sweep import Sweep
from ..planner.sweep import sweep as _sweep
from ..planner.tune_run import Options as TuneOptions
from ..planner.tune_run import question_of as tune_question
from ..planner.tuned import Tuned
from ..profiler.profile import Profile
from ..profiler.profile import load as load_profile
from ..results.fleet_file import FleetWords
from ..results.scenario import Scenario, on_fleet, replicas_of
from .scenarios import named_config, named_scenario
from .signature import Traffic, Unrouted, real_signature


@real_signature
def capacity(
    trace: TraceLike,
    slos: Sequence[str],
    *,
    policy: PolicyLike = Scenario.policy,
    profile: ProfileLike = Scenario.profile,
    rate: float | None = None,
    max_replicas: int | None = None,
    replicas: int | None = None,
    pools: Sequence[str] = (),
    links: Sequence[str] = (),
    decider: str = Scenario.decider,
    fleet: str | Path | None = None,
    gpu_hour: float | None = None,
    attainment: float = 0.99,
    precision: float = 0.02,
    num_requests: int | None = None,
    curve: bool = True,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    **traffic: Unpack[Traffic],
) -> Capacity:
    """Find how much traffic a fleet sustains while every SLO holds; with `rate` (req/s), how many replicas it needs.

    pools, links, decider, fleet: as in `replay`; with `rate`, find the replicas of each pool. attainment
    and precision are shares: 0.99 is 99 %. Raises DsimError.
    """
    scenario = named_scenario(trace, slos, spec_of(policy), profile, [], traffic)
    words = FleetWords(tuple(pools), tuple(links), scenario.router, decider).or_file(fleet)
    [scenario] = on_fleet([scenario], words, named=fleet is None)
    return question_of(scenario, rate, replicas, max_replicas)(
        gpu_hour=gpu_hour, attainment=attainment, precision=precision, num_requests=num_requests, curve=curve,
        jobs=jobs, backend=backend, address=address,
    )  # fmt: skip


@real_signature
def plan(
    trace: TraceLike,
    slos: Sequence[str],
    *,
    policies: Sequence[PolicyLike] = (),
    profiles: Sequence[ProfileLike] | None = None,
    rate: float | None = None,
    gpu_hour: float | Mapping[str, float] | None = None,
    attainment: float = 0.99,
    max_replicas: int = 64,
    spare: int = 0,
    growth: str | None = None,
    horizon: float = 1.0,
    buy_now: bool = False,
    today: str | None = None,
    ensemble: int | None = None,
    as_given: bool = False,
    change_answers: bool = False,
    research: bool = False,
    router: str = UNROUTED,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
    num_requests: int | None = None,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    **traffic: Unpack[Unrouted],
) -> Planned:
    """Rank policies on profiles for a trace, with replicas and cost.

    policies: by default those of engines that a profile's model can run. profiles: by default the commands' default,
    or none if each policy names its own. gpu_hour: a price, or prices by profile name. as_given: search no engine
    settings. change_answers: also search block, threshold and canvas. research: also schedulers of no engine. router:
    a plain Service of Kubernetes draws at random. spare: standby replicas. growth: such as 30%/year; the cost is the
    mean over `horizon` years, each GPU bought when it is needed, or (buy_now) today. today: what runs now, as
    SPEC,replicas=N. ensemble: also replay the recommended fleet under this many drawn profiles; 19 or more give
    intervals. Raises DsimError.
    """
    specs = [spec_of(policy) for policy in policies]
    routed = Traffic(**traffic, router=router)
    scenario = named_scenario(trace, slos, Scenario.policy, Scenario.profile, specs, routed)
    options = Options(
        rate, attainment, max_replicas, num_requests, spare, growth, horizon, buy_now, today, ensemble, min_quality,
        quality_table, as_given, change_answers, research,
    )  # fmt: skip
    loaded = None if profiles is None else [p if isinstance(p, Profile) else load_profile(p) for p in profiles]
    question = plan_question(
        scenario, specs, loaded,
        lambda p: gpu_hour.get(p.name) if isinstance(gpu_hour, Mapping) else gpu_hour, options,
    )  # fmt: skip
    return answer(question, jobs=jobs, backend=backend, address=address)[0]


@real_signature
def tune(
    trace: TraceLike,
    *,
    slos: Sequence[str] = (),
    policy: PolicyLike | None = None,
    space: str | Path | Mapping[str, Any] | None = None,
    profile: ProfileLike = Scenario.profile,
    replicas: int | None = None,
    rate: float | None = None,
    num_requests: int | None = None,
    objectives: Sequence[str] = ("goodput",),
    trials: int = 60,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
    gpu_hour: float | None = None,
    jobs: int = 1,
    backend: str = "local",
    address: str | None = None,
    pools: Sequence[str] = (),
    links: Sequence[str] = (),
    decider: str = Scenario.decider,
    fleet: str | Path | None = None,
    gpus: int | None = None,
    **traffic: Unpack[Traffic],
) -> Tuned:
    """Find the settings that serve a trace best, confirmed on traffic that the search did not use.

    policy: the one to beat. space: settings to vary, a file as for `dsim tune --space` or a dictionary. pools, links,
    decider, fleet: as in `replay`; then each pool's settings, its replicas within `gpus` and the decider are
    searched. Raises DsimError.
    """
    spec = None if policy is None else spec_of(policy)
    words = FleetWords(tuple(pools), tuple(links), traffic.get("router", Scenario.router), decider)
    words = words.or_file(fleet)
    scenario = named_scenario(
        trace, slos, Scenario.policy, profile, [] if spec is None else [spec], traffic,
        rate=rate, num_requests=num_requests, replicas=replicas_of([spec or ""], replicas),
    )  # fmt: skip
    [scenario] = on_fleet([scenario], words, named=fleet is None, searched=True)
    options = TuneOptions(
        spec, space, objectives, trials, min_quality, quality_table, gpu_hour, jobs, None, gpus,
    )  # fmt: skip
    return tune_question(scenario, options).answer(backend=backend, address=address)


@real_signature
def sweep(
    config: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    force: bool = False,
    quality: Callable[[Scenario], float | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    ensemble: int | None = None,
    allow_code: Iterable[str | Path] = (),
) -> Sweep:
    """Run every cell of a configuration (a TOML file or dictionary) and tabulate the results.

    In a dictionary traces, profiles and policies may be objects. out: a folder; a later sweep runs only its missing
    cells, unless `force`. quality: scores a scenario. progress: called with finished and all cells, then with the
    ensemble's replays. ensemble: number of drawn profiles for the best stable cells. Raises DsimError.
    """
    named = named_config(config) if isinstance(config, Mapping) else config
    return _sweep(
        named, out, jobs=jobs, backend=backend, address=address, force=force, quality=quality, progress=progress,
        allow_code=allow_code, ensemble=ensemble, asking=progress,
    )  # fmt: skip
