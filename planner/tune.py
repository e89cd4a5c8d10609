"""The best settings for a trace: a search over policies, confirmed on held-out traffic."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..engine.errors import DsimError
from ..engine.policies import BASELINES
from ..files.read import cut
from ..results.scenario import Scenario
from ..sim.scalers import FIXED
from .backend import Pool
from .confirm import REPLICATIONS, chosen, confirm, verdict
from .contents import Json, asked_of, digest
from .fleet_space import FleetSpace, fleet_space
from .memo import KeptError, Memo
from .objective import OBJECTIVES, Evaluate, Evaluator, Measure, Tried, traffic
from .quality import Quality, QualityTable, quality_factors, quality_of
from .search import Judge, Progress, Refuse, Search, quiet
from .space import Candidate, Space, default_space, guarded, searchable
from .tuned import Finalist, Tuned

PRUNE_SHARE, PRUNE_FROM = 0.3, 1000  # share of a trial's requests replayed first; fewest requests


def tune(
    scenario: Scenario,
    *,
    objectives: Sequence[str] = ("goodput",),
    space: Space | FleetSpace | None = None,
    trials: int = 60,
    default: Tried | None = None,
    memo: Memo | None = None,
    min_quality: float | None = None,
    quality_table: QualityTable | None = None,
    gpu_hour: float | None = None,
    jobs: int = 1,
    ray: str | None = None,
    evaluate: Evaluate | None = None,
    progress: Progress | None = None,
    begin: Callable[[Json], object] | None = None,
) -> Tuned:
    """Search for the best policy on a scenario's traffic, or for the best fleet of its pools.

    default: the policy to beat. min_quality: relative to the full cache. jobs: settings replayed at once. ray: see
    `Pool`. evaluate: replaces the replay. begin: called with the question before anything is stored. The
    same seed and jobs give the same result anywhere, interrupted or not.
    """
    _check(scenario, objectives, trials, gpu_hour)
    profile = scenario.loaded_profile()
    if scenario.pools:
        if not isinstance(space, FleetSpace):
            space = fleet_space(scenario, by_cost="cost" in objectives)
        default = space.candidate("", {})
    else:
        if space is None:
            also = () if default is None else (default.preset,)
            space = default_space(profile, scenario.workload, also, scenario.allow_code)
        default = default or Candidate(BASELINES[profile.family], (), scenario.replicas)
        searchable(profile, scenario.workload)(*default.policies)
    default.posed(scenario).check_fits()
    declared = space

    def judge(candidate: Tried) -> Quality:
        found = [quality_of(policy, profile.model.name, quality_table) for policy in candidate.policies]
        least = min(found, key=lambda quality: -1.0 if quality.relative is None else quality.relative)
        answers = [list(map(quality_factors, one.policies)) for one in (candidate, default)]
        return replace(least, same=answers[0] == answers[1])

    if min_quality is not None and isinstance(space, Space):
        space = guarded(space, lambda p: quality_of(p, profile.model.name, quality_table), min_quality)
    share, asked = None, None
    if evaluate is None:
        evaluate = own = Evaluator(scenario, tuple(objectives), gpu_hour)
        asked = own.asked
        presets = dict.fromkeys([default.preset, *declared.dimensions])
        files = [asked_of(scenario if scenario.pools else replace(scenario, policy=preset)) for preset in presets]
        if len(objectives) == 1 and len(traffic(scenario, False)) >= PRUNE_FROM:
            share = PRUNE_SHARE
    else:
        files = []
    memo = memo or Memo()
    question = {
        **{name: value for name, value in scenario.question().items() if name not in ("policy", "slos")},
        "slos": list(scenario.slos),
        "files": digest(files),
        "profile_content": digest(repr(profile)),
        "objectives": list(objectives),
        "space": declared.to_json(),
        "default": str(default),
        "min_quality": min_quality,
        "quality_table": None if quality_table is None else digest(repr(quality_table)),
        "gpu_hour": gpu_hour,
    }
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(jobs, ray))
        stack.enter_context(quiet())
        search = Search(
            tuple(objectives), space, default, Measure(evaluate, pool, memo, asked), jobs=jobs,
            seed=scenario.seed, replicas=scenario.replicas, progress=progress or (lambda *_: None),
        )  # fmt: skip
        if begin is not None:
            begin(question)
        search.run(trials, _refusal(scenario, judge, min_quality), share)
        _check_feasible(search, trials, memo.path)
        best = chosen(search)
        finalists = confirm(search, best, judge)
        return _result(search, best, finalists, judge, min_quality)


def _result(
    search: Search,
    best: Sequence[Tried],
    finalists: Mapping[Tried, Finalist],
    judge: Judge,
    min_quality: float | None,
) -> Tuned:
    winner, default = finalists[best[0]], finalists[search.default]
    ok, notes = verdict(search.objectives[0], winner, default, min_quality)
    found, base = winner.search[0], default.search[0]
    return Tuned(
        objectives=search.objectives,
        recommended=winner.candidate if ok else search.default,
        confirmed=ok,
        winner=winner,
        runner_up=finalists[best[1]] if len(best) > 1 else None,
        default=default,
        front=() if len(search.objectives) == 1 else tuple(finalists[c] for c in best),
        search_gain=search.signs[0] * (found - base) / abs(base) if base else math.nan,
        trials=search.frame(judge),
        space=search.space,
        equal=len(search.equals(winner.candidate, [c for c, o in search.ranked() if o.violation <= 0])) - 1,
        notes=(*search.space.notes, *notes),
        num_replays=search.measure.num_replays,
        replications=REPLICATIONS,
    )


def _check_feasible(search: Search, trials: int, store: Path | None) -> None:
    where = "" if store is None else f"; the replays are kept in {store}"
    tried = [(o.violation, c, o.missed) for c, o in search.ranked()]
    if not tried:
        raise KeptError(f"none of {trials} trials could run{where}")
    excess, candidate, missed = min(tried, key=lambda t: t[0])
    if excess > 0:
        raise KeptError(
            f"no setting of {trials} trials meets {missed}; the closest, {candidate}, "
            f"misses it by {100 * excess:.0f} %{where}"
        )


def _refusal(scenario: Scenario, judge: Judge, min_quality: float | None) -> Refuse:
    """Refuses settings that cannot run, or whose quality is too low or unknown."""

    def refuse(candidate: Tried) -> str:
        try:
            quality = judge(candidate)
            if scenario.pools:
                candidate.posed(scenario).fleet().check()
            candidate.posed(scenario).check_fits()
        except DsimError as error:  # contradictory fields
            return str(error)
        if min_quality is None:
            return ""
        if quality.relative is None:
            return f"quality unknown: {quality.notes[0]}"
        return (
            "" if quality.relative >= min_quality else f"quality {quality}, expected at least {100 * min_quality:g} %"
        )

    return refuse


def _check(scenario: Scenario, objectives: Sequence[str], trials: int, gpu_hour: float | None) -> None:
    for name in objectives:
        if name not in OBJECTIVES:
            raise DsimError(f"no objective is named {cut(name)}, expected one of {', '.join(OBJECTIVES)}")
    if not objectives or len(set(objectives)) < len(objectives):
        raise DsimError(f"objectives are {', '.join(objectives) or 'none'}, expected one or several different ones")
    if not scenario.slos and {"goodput", "cost"} & set(objectives):
        raise DsimError("goodput and cost count requests that meet an SLO, expected one (--slo ttft=2s)")
    if "cost" in objectives and not (gpu_hour is not None and 0 < gpu_hour < math.inf):
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price above 0 where cost is an objective")
    if trials < 1:
        raise DsimError(f"trials is {trials}, expected at least 1")
    if scenario.scaler != FIXED:
        raise DsimError(
            f"{scenario.scaler} changes the number of replicas, expected fleets of a fixed count: they are compared"
        )
    if scenario.concurrency is not None:
        raise DsimError("a closed loop has no held-out traffic, expected arrivals")
