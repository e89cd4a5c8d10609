"""The best settings for a trace: a search over policies or fleets, confirmed on held-out traffic."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..engine.errors import DsimError
from ..engine.policies import BASELINES
from ..engine.spec import parse
from ..files.read import FilePath, cut
from ..files.write import csv_of
from ..profiler.placed import placed
from ..report.html import result_files
from ..report.page import Page
from ..report.result import NOT_STORED, Result
from ..results.metrics import finite
from ..results.world import Setup, World, setup_of
from ..sim.scalers import FIXED
from .backend import Pool
from .candidate import Candidate, nearest_first, on_replicas, policy_toml
from .contents import asked_of, digest
from .deploy import deployment_of
from .memo import StoreFolder, store_kind
from .objective import OBJECTIVES, Evaluator, Part, ReplayOutcome
from .quality import Quality, load_table, parse_share, quality_factors, quality_of
from .race import best_of
from .record import doubts_of, profile_notes
from .replicate import Interval, student
from .search import Progress, Refuse, Search, Trial
from .space import searchable, space_of

if TYPE_CHECKING:
    import pandas as pd

FILES = ("policy.toml", "tune.json", "trials.csv", "report.html")
REPLICATIONS = 10  # replays of the held-out part
NUM_RERANKED, NUM_RERANKS = 4, 4  # settings, and replays of each


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A setting confirmed on fresh luck and held-out traffic, paired with the default."""

    policy: str  # SPEC
    replicas: int
    untested: tuple[str, ...]  # fields beyond the engine's tested range, in words
    quality: Quality
    value: Interval  # of the objective
    gain: Interval | None  # over the default, relative; above 0 is better; None: the default's is 0
    meets_run_slos: float  # share of confirming replays that met every SLO on the run
    attainment: float | None  # mean share of good arrivals

    def __str__(self) -> str:
        return on_replicas(self.policy, self.replicas)


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned(Result):
    """A search's finding, and how sure it is."""

    schema: ClassVar[str] = "dsim-tune"

    objective: str
    unit: str
    confirmed: bool  # the winner's gain
    winner: Finalist
    default: Finalist
    search_gain: float | None  # the winner's, relative: biased upward
    equal: int  # other settings as good in the search, within 1 %
    num_replays: int
    replications: int
    space: Mapping[str, tuple[Any, ...]]
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    setup: Setup
    implementations: tuple[str, ...]  # that price the compared settings
    doubted: tuple[str, ...]  # of the recommendation's steps, by its profile
    run: str  # the command that replays the recommendation
    launch: tuple[str, ...]  # lines for a shell that start a replica of it; empty: no released engine is known to
    policy_toml: str = field(default="", metadata=NOT_STORED)  # the recommendation's file for `--policy`
    compared: tuple[World, ...] = field(default=(), metadata=NOT_STORED)  # recommended, winner, default

    @property
    def recommended(self) -> Finalist:
        """The winner if its gain is confirmed, else the default."""
        return (self.default, self.winner)[self.confirmed]

    def page(self) -> Page:
        from ..report.search_page import tune_page

        return tune_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """trials.csv: one row per trial."""
        import pandas as pd

        rows = []
        for trial in self.trials:
            row = {f.name: getattr(trial, f.name) for f in fields(trial) if f.name != "fields"}
            rows.append({**row, **trial.fields})
        return pd.DataFrame(rows)


TUNE = store_kind("a search", Tuned.schema, FILES, "tune.json")


def tune(
    world: World,
    *,
    objective: str = "goodput",
    policy: str | None = None,
    space: Mapping[str, Any] | FilePath | None = None,
    trials: int = 60,
    min_quality: float | str | None = None,
    quality_table: FilePath | None = None,
    gpu_hour: float | None = None,
    currency: str = "USD",
    jobs: int = 1,
    ray: str | None = None,
    folder: StoreFolder | None = None,
    command: str = "",
    traffic_words: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Tuned:
    """Search for the best policy on a world's traffic.

    policy: to beat. space: see `space_of`. min_quality: relative to the full cache. jobs: settings replayed at once.
    ray: see `Pool`. folder: gets the replays and the results. command, traffic_words: for the page, the latter words of
    `dsim replay` for the traffic. The same seed and jobs give the same result anywhere, interrupted or not.
    """
    folder = folder or StoreFolder(None, TUNE)
    _check(world, objective, trials, gpu_hour, policy)
    profile = world.loaded_profile()
    default = Candidate.at(world, {"policy": policy or BASELINES[profile.family]})
    searchable(profile, world.workload)(parse(default.world.policy, world.allow_code))
    default.world.check_fits()
    varied = space_of(world, space, also=[] if policy is None else [default.preset])
    least, table = parse_share(min_quality), load_table(quality_table, world.allow_code)

    def judge(candidate: Candidate) -> Quality:
        tried, today = (parse(c.world.policy, world.allow_code) for c in (candidate, default))
        quality = quality_of(tried, profile.model.name, table)
        return replace(quality, same=quality_factors(tried) == quality_factors(today))

    question = asked_of(
        default.world,
        presets=digest([asked_of(replace(world, policy=p))["policy"] for p in varied.presets]),
        objective=objective,
        space=varied.values,
        min_quality=least,
        quality_table=None if table is None else digest(repr(table.scores)),
        gpu_hour=gpu_hour,
    )
    with Pool(jobs, ray) as pool:
        search = Search(
            objective=objective,
            space=varied,
            default=default,
            judge=judge,
            pool=pool,
            memo=folder.memo,
            evaluate=Evaluator(objective, gpu_hour),
            jobs=jobs,
            progress=progress,
        )
        folder.begin("search", question)
        search.run(trials, _refusal(judge, least))
        ranked = search.ranked()
        if not ranked:
            raise DsimError(f"none of {trials} trials could run; the first: {search.attempts[0].reason}")
        closest, outcome = min(ranked, key=lambda pair: pair[1].violation)
        if outcome.violation > 0:
            raise DsimError(
                f"no setting of {trials} trials meets {outcome.missed}; the closest, {closest}, "
                f"misses it by {100 * outcome.violation:.0f} %"
            )
        winner = chosen(search)
        finalists = confirm(search, winner)
    confirmed, notes = verdict(objective, finalists[winner], finalists[default], winner == default, least)
    recommended = (default, winner)[confirmed]
    compared = [candidate.world for candidate in dict.fromkeys((recommended, winner, default))]
    requests = world.requests()
    setup = setup_of(world, command, gpu_hour, currency)
    value, value_today = (search.outcomes[candidate].value for candidate in (winner, default))
    fleet = recommended.world
    replicas = ["--replicas", str(fleet.replicas)] if fleet.replicas > 1 else []
    spec, profile = fleet.policy, compared[0].base_profile()
    longest = int((requests.input_length + requests.limit).max())
    deployment = deployment_of(spec, profile, fleet.replicas, allow_code=fleet.allow_code, context=longest)
    tuned = Tuned(
        objective=objective,
        unit=OBJECTIVES[objective],
        confirmed=confirmed,
        winner=finalists[winner],
        default=finalists[default],
        search_gain=search.sign * (value - value_today) / abs(value_today) if value_today else None,
        equal=len(search.equals(winner, search.feasible())) - 1,
        num_replays=search.num_replays,
        replications=REPLICATIONS,
        space=varied.values,
        trials=search.trials(),
        notes=(*notes, *profile_notes(compared)),
        setup=replace(setup, traffic=f"{setup.traffic}; used: {len(requests):,}, at {requests.rate:.3g} req/s"),
        doubted=doubts_of(compared[0], requests),
        implementations=tuple(setting.base_profile().implementation for setting in compared),
        run=shlex.join(["dsim", "replay", world.trace, "--policy", fleet.policy, *replicas, *traffic_words]),
        launch=deployment.start if deployment else (),
        policy_toml=policy_toml(fleet.policy, fleet.replicas, fleet.allow_code),
        compared=tuple(compared),
    )
    _write(folder, tuned)
    return tuned


def _write(folder: StoreFolder, tuned: Tuned) -> None:
    if folder.folder is None:
        return
    frame = tuned.to_frame()
    frame = frame.astype(object).where(frame.notna(), None)
    trials = csv_of([frame.columns, *frame.itertuples(index=False, name=None)])
    folder.put({"policy.toml": tuned.policy_toml, "trials.csv": trials, **result_files(tuned)})


def _refusal(judge: Callable[[Candidate], Quality], least: float | None) -> Refuse:
    """Refuses settings that cannot run, or whose quality is too low or unknown."""

    def refuse(candidate: Candidate) -> str:
        try:
            quality = judge(candidate)
            candidate.world.check_fits()
        except DsimError as error:  # contradictory fields
            return str(error)
        shortfall = quality.shortfall(least)
        return shortfall and f"quality {shortfall}"

    return refuse


def _check(world: World, objective: str, trials: int, gpu_hour: float | None, policy: str | None) -> None:
    if objective not in OBJECTIVES:
        raise DsimError(f"no objective is named {cut(objective)}, expected one of {', '.join(OBJECTIVES)}")
    if not world.slos and objective in ("goodput", "cost"):
        raise DsimError("goodput and cost count requests that meet an SLO, expected one (--slo ttft=2s)")
    if objective == "cost" and not (gpu_hour is not None and 0 < gpu_hour < math.inf):
        raise DsimError(f"--gpu-hour is {gpu_hour}, expected a price above 0 where cost is the objective")
    if trials < 1:
        raise DsimError(f"trials is {trials}, expected at least 1")
    if world.pools or world.scaler != FIXED or world.concurrency is not None:
        raise DsimError("pools, a scaler or a closed loop are given, expected arrivals at one pool of a fixed count")
    spec, profile = placed(policy or "")
    if profile is not None:
        expected = f"--policy {spec} --profile {profile}"
        raise DsimError(f"--policy is {policy}, and a search has one profile: expected {expected}")


def chosen(search: Search) -> Candidate:
    """The best one under fresh luck, on the search's part of the trace; of equals the nearest to the default.

    Among the best setting and others of the best, those first that are as good and nearer to the engine's default. A
    setting beyond the engine's tested range must be a tenth better.
    """
    first, *rivals = sorted(search.feasible(), key=lambda c: -search.worth(c, search.outcomes[c]))  # stable
    equal = nearest_first(search.equals(first, rivals), lambda c: c.num_changes(search.default))
    few = [first, *equal, *(c for c in rivals if c not in equal)][:NUM_RERANKED]
    costs: dict[Candidate, list[float]] = {c: [] for c in few}
    missed: dict[Candidate, int] = dict.fromkeys(few, 0)
    for index in range(NUM_RERANKS):
        search.progress("ranking", index, NUM_RERANKS)
        outcomes = search.measure(few, Part("rerank", index))
        for c, outcome in zip(few, outcomes, strict=True):
            costs[c].append(-search.worth(c, outcome))
            missed[c] += outcome.violation > 0
    feasible = [c for c in few if 2 * missed[c] <= NUM_RERANKS] or few
    equals = [feasible[i] for i in best_of([costs[c] for c in feasible])]
    return nearest_first(equals, lambda c: c.num_changes(search.default), lambda c: float(np.mean(costs[c])))[0]


def confirm(search: Search, winner: Candidate) -> dict[Candidate, Finalist]:
    """Replay the winner and the default on the same held-out traffic."""
    settings = list(dict.fromkeys((search.default, winner)))
    outcomes: dict[Candidate, list[ReplayOutcome]] = {c: [] for c in settings}
    for index in range(REPLICATIONS):
        search.progress("confirming", index, REPLICATIONS)
        replays = search.measure(settings, Part("confirm", index))
        for c, outcome in zip(settings, replays, strict=True):
            outcomes[c].append(outcome)
    search.progress("confirming", REPLICATIONS, REPLICATIONS)
    if search.default not in search.outcomes:
        [search.outcomes[search.default]] = search.measure([search.default], Part("search"))
    finalists = {}
    for c, replays in outcomes.items():
        measured, base = ([outcome.value for outcome in outcomes[setting]] for setting in (c, search.default))
        finalists[c] = Finalist(
            policy=c.world.policy,
            replicas=c.world.replicas,
            untested=c.untested,
            quality=search.judge(c),
            value=estimate(measured),
            gain=gain(measured, base, search.sign),
            meets_run_slos=float(np.mean([outcome.violation <= 0 for outcome in replays])),
            attainment=finite(float(np.mean([outcome.attainment for outcome in replays]))),
        )
    return finalists


def verdict(
    objective: str, winner: Finalist, default: Finalist, is_default: bool, min_quality: float | None
) -> tuple[bool, list[str]]:
    """Whether to recommend the winner; notes."""
    if is_default:
        return True, ["the search found nothing better than the default"]
    if winner.meets_run_slos < 0.5:
        share = f"{1 - winner.meets_run_slos:.0%} of held-out replays"
        return False, [f"the winner of the search misses an SLO in {share}"]
    relative = default.quality.relative
    if default.meets_run_slos < 0.5 or (min_quality is not None and (relative is None or relative < min_quality)):
        return True, ["the default itself misses an SLO or the quality asked for, and cannot be recommended"]
    if winner.gain is None or winner.gain.low > 0:
        return True, []
    return False, [f"the gain in {objective} over the default is not confirmed: the default is recommended"]


def estimate(values: Sequence[float], scale: float = 1.0) -> Interval:
    """Mean and Student's interval, divided by `scale`."""
    data = np.asarray(values, float) / scale
    mean, half = float(data.mean()), student(data)
    return Interval(mean, mean - half, mean + half)


def gain(values: Sequence[float], base: Sequence[float], sign: float) -> Interval | None:
    """A mean's relative gain over the default's, paired by replication (ratio estimator); sign -1: less is better.

    None if the default's mean is 0.
    """
    of_setting, of_default = np.asarray(values, float), np.asarray(base, float)
    mean = float(of_default.mean())
    if not mean > 0:
        return None
    ratio = float(of_setting.mean()) / mean
    spread = estimate(list(sign * (of_setting - ratio * of_default)), mean)
    value = sign * (ratio - 1)
    return Interval(value, value + spread.low, value + spread.high)
