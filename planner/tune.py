"""The best settings for a trace: a search over policies or fleets, confirmed on held-out traffic."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..engine.policies import BASELINES
from ..files.place import FolderKind
from ..files.read import cut
from ..files.write import csv_of
from ..profiler.placed import placed
from ..report.html import result_files
from ..results.metrics import no_nan
from ..results.world import World, setup_of
from ..sim.scalers import FIXED
from .backend import Pool
from .candidate import Candidate
from .confirm import REPLICATIONS, chosen, confirm, verdict
from .contents import asked_of, digest
from .ensemble import check_num, ensemble, of_objective
from .memo import FILES as STORE_FILES
from .memo import STORE, KeptError, StoreFolder
from .objective import OBJECTIVES, Evaluator, traffic
from .quality import Quality, load_table, parse_share, quality_factors, quality_of
from .record import doubts_of, profile_notes
from .search import Progress, Refuse, Search, quiet
from .space import guarded, searchable, space_of
from .tuned import Tuned

PRUNE_SHARE, PRUNE_FROM = 0.3, 1000  # share of a trial's requests replayed first; fewest requests
FILES = ("tune.json", "trials.csv", "report.html")
TUNE = FolderKind(
    "a search", (*FILES, "policy.toml", "fleet.toml", "front-*.toml", *STORE_FILES), "tune.json",
    Tuned.schema, store=STORE,
)  # fmt: skip


def tune(
    world: World,
    *,
    objectives: Sequence[str] = ("goodput",),
    policy: str | None = None,
    space: Mapping[str, Any] | str | Path | None = None,
    trials: int = 60,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
    gpu_hour: float | None = None,
    currency: str = "USD",
    gpus: int | None = None,
    num_draws: int | None = None,
    jobs: int = 1,
    ray: str | None = None,
    folder: StoreFolder | None = None,
    command: str = "",
    traffic_words: Sequence[str] = (),
    progress: Progress | None = None,
) -> Tuned:
    """Search for the best policy on a world's traffic, or for the best fleet of its pools.

    policy: to beat. space: see `space_of`. min_quality: relative to the full cache. gpus: budget of the pools.
    num_draws: of the profile, for an ensemble of the compared settings. jobs: settings replayed at once. ray: see
    `Pool`. folder: gets the replays and the results. command, traffic_words: for the page, the latter words of `dsim
    replay` for the traffic. The same seed and jobs give the same result anywhere, interrupted or not.
    """
    progress = progress or (lambda *_: None)
    folder = folder or StoreFolder(None, TUNE)
    check_num(num_draws, [world])
    _check(world, objectives, trials, gpu_hour, policy)
    default = _default(world, policy)
    also = [default.preset] if policy is not None else []
    varied = space_of(world, space, also=also, gpus=gpus, by_cost="cost" in objectives)
    least = parse_share(min_quality)
    table = load_table(quality_table, world.allow_code)
    model = world.loaded_profile().model.name

    def judge(candidate: Candidate) -> Quality:
        qualities = [quality_of(policy, model, table) for policy in candidate.policies]
        worst = min(qualities, key=lambda quality: -1.0 if quality.relative is None else quality.relative)
        answers, answers_today = ([quality_factors(p) for p in c.policies] for c in (candidate, default))
        return replace(worst, same=answers == answers_today)

    question = asked_of(
        default.world, presets=digest([asked_of(replace(world, policy=p))["policy"] for p in varied.presets]),
        objectives=list(objectives), space=no_nan(varied.dimensions), min_quality=least,
        quality_table=None if table is None else digest(repr(table.scores)), gpu_hour=gpu_hour,
    )  # fmt: skip
    if least is not None and varied.presets:
        varied = guarded(varied, lambda policy: quality_of(policy, model, table), least)
    prunes = len(objectives) == 1 and len(traffic(world, False)) >= PRUNE_FROM
    with Pool(jobs, ray) as pool, quiet():
        search = Search(
            objectives=tuple(objectives), space=varied, default=default, judge=judge, pool=pool, memo=folder.memo,
            evaluate=Evaluator(tuple(objectives), gpu_hour), jobs=jobs, seed=world.seed, progress=progress,
        )  # fmt: skip
        folder.begin("search", question)
        search.run(trials, _refusal(judge, least), PRUNE_SHARE if prunes else None)
        stored = "" if folder.memo.path is None else f"; the replays are kept in {folder.memo.path}"
        ranked = search.ranked()
        if not ranked:
            raise KeptError(f"none of {trials} trials could run{stored}")
        closest, outcome = min(ranked, key=lambda pair: pair[1].violation)
        if outcome.violation > 0:
            raise KeptError(
                f"no setting of {trials} trials meets {outcome.missed}; the closest, {closest}, "
                f"misses it by {100 * outcome.violation:.0f} %{stored}"
            )
        best = chosen(search)
        finalists = confirm(search, best)
        winner = best[0]
        confirmed, notes = verdict(objectives[0], finalists[winner], finalists[default], winner == default, least)
        recommended = winner if confirmed else default
        compared = [candidate.world for candidate in dict.fromkeys((recommended, winner, default))]
        requests = world.requests()
        uncertain = None
        if num_draws is not None:
            uncertain = ensemble(
                compared, requests, num_draws, recommended=True, pool=pool, memo=folder.memo,
                judged=of_objective(objectives[0]),
                progress=lambda done, total: progress("asking drawn profiles", done, total, ""),
            )  # fmt: skip
    pools = [pool_world for fleet in compared for pool_world in fleet.of_each_pool()]
    setup = setup_of(world, command, gpu_hour, currency)
    front = [] if len(objectives) == 1 else best
    value, value_today = (search.outcomes[candidate].values[0] for candidate in (winner, default))
    files = [recommended.file(), *((f"front-{i}.toml", c.file()[1]) for i, c in enumerate(front, 1))]
    tuned = Tuned(
        objectives={name: OBJECTIVES[name] for name in objectives},
        confirmed=confirmed,
        winner=finalists[winner],
        runner_up=finalists[best[1]] if len(best) > 1 else None,
        default=finalists[default],
        front=tuple(finalists[candidate] for candidate in front),
        search_gain=search.signs[0] * (value - value_today) / abs(value_today) if value_today else None,
        equal=len(search.equals(winner, search.feasible())) - 1,
        num_replays=search.num_replays,
        replications=REPLICATIONS,
        space=varied.dimensions,
        trials=search.trials(),
        notes=(*varied.notes, *notes, *profile_notes(pools)),
        setup=replace(setup, traffic=f"{setup.traffic}; used: {len(requests):,}, at {requests.rate:.3g} req/s"),
        implementations=tuple(pool_world.base_profile().implementation for pool_world in pools),
        run=shlex.join(["dsim", "replay", world.trace, *recommended.arguments, *traffic_words]),
        ensemble=uncertain,
        doubted=doubts_of(recommended.world, requests),
        compared=tuple(compared),
        files=dict(files),
    )
    _write(folder, tuned)
    return tuned


def _write(folder: StoreFolder, tuned: Tuned) -> None:
    if folder.folder is None:
        return
    frame = tuned.to_frame()
    frame = frame.astype(object).where(frame.notna(), None)
    trials = csv_of([frame.columns, *frame.itertuples(index=False, name=None)])
    folder.put({**tuned.files, "trials.csv": trials, **result_files(tuned)})
    for path in folder.folder.glob("front-*.toml"):
        if path.name not in tuned.files:  # of a longer front
            path.unlink()


def _default(world: World, policy: str | None) -> Candidate:
    """What to beat: the fleet as given, or a policy."""
    if world.pools:
        default = Candidate.at(world, {})
    else:
        profile = world.loaded_profile()
        default = Candidate.at(world, {"policy": policy or BASELINES[profile.family]})
        searchable(profile, world.workload)(*default.policies)
    default.world.check_fits()
    return default


def _refusal(judge: Callable[[Candidate], Quality], least: float | None) -> Refuse:
    """Refuses settings that cannot run, or whose quality is too low or unknown."""

    def refuse(candidate: Candidate) -> str:
        try:
            quality = judge(candidate)
            if candidate.world.pools:
                candidate.world.fleet().check()
            candidate.world.check_fits()
        except DsimError as error:  # contradictory fields
            return str(error)
        shortfall = quality.shortfall(least)
        return shortfall and f"quality {shortfall}"

    return refuse


def _check(world: World, objectives: Sequence[str], trials: int, gpu_hour: float | None, policy: str | None) -> None:
    for name in objectives:
        if name not in OBJECTIVES:
            raise DsimError(f"no objective is named {cut(name)}, expected one of {', '.join(OBJECTIVES)}")
    if not objectives or len(set(objectives)) < len(objectives):
        raise DsimError(f"objectives are {', '.join(objectives) or 'none'}, expected one or several different ones")
    if not world.slos and {"goodput", "cost"} & set(objectives):
        raise DsimError("goodput and cost count requests that meet an SLO, expected one (--slo ttft=2s)")
    if "cost" in objectives and not (gpu_hour is not None and 0 < gpu_hour < math.inf):
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price above 0 where cost is an objective")
    if trials < 1:
        raise DsimError(f"trials is {trials}, expected at least 1")
    if world.scaler != FIXED:
        raise DsimError(
            f"{world.scaler} changes the number of replicas, expected fleets of a fixed count: they are compared"
        )
    if world.concurrency is not None:
        raise DsimError("a closed loop has no held-out traffic, expected arrivals")
    if policy is not None and world.pools:
        raise DsimError(f"policy {policy} is given and the fleet has pools, expected pools alone")
    spec, profile = placed(policy or "")
    if profile is not None:
        raise DsimError(
            f"--policy is {policy}, and a search has one profile: expected --policy {spec} --profile {profile}"
        )
