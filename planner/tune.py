"""The best settings for a trace: a search over policies or fleets, confirmed on held-out traffic."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..engine.errors import DsimError
from ..engine.policies import BASELINES
from ..engine.policy import parse
from ..files.place import FolderKind
from ..files.read import cut
from ..files.write import csv_of
from ..profiler.placed import placed
from ..report.html import result_files
from ..report.page import Page
from ..report.result import NOT_STORED, Result
from ..results.world import Setup, World, setup_of
from ..sim.scalers import FIXED
from .backend import Pool
from .candidate import Candidate, policy_toml
from .confirm import REPLICATIONS, Finalist, chosen, confirm, verdict
from .contents import asked_of, digest
from .memo import FILES as STORE_FILES
from .memo import STORE, StoreFolder
from .objective import OBJECTIVES, Evaluator
from .quality import Quality, load_table, parse_share, quality_factors, quality_of
from .record import profile_notes
from .search import Progress, Refuse, Search, Trial
from .space import searchable, space_of

if TYPE_CHECKING:
    import pandas as pd

FILES = ("policy.toml", "tune.json", "trials.csv", "report.html")


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned(Result):
    """A search's finding, and how sure it is."""

    schema: ClassVar[str] = "dsim-tune"

    objective: str
    unit: str
    confirmed: bool  # the winner's gain
    winner: Finalist
    runner_up: Finalist | None
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
    run: str  # the command that replays the recommendation
    policy_toml: str = field(default="", metadata=NOT_STORED)  # the recommendation's file for `--policy`
    compared: tuple[World, ...] = field(default=(), metadata=NOT_STORED)  # recommended, winner, default

    @property
    def recommended(self) -> Finalist:
        """The winner if its gain is confirmed, else the default."""
        return self.winner if self.confirmed else self.default

    def page(self) -> Page:
        from ..report.search import tune_page

        return tune_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """trials.csv: one row per trial."""
        import pandas as pd

        rows = []
        for trial in self.trials:
            row = {f.name: getattr(trial, f.name) for f in fields(trial) if f.name != "fields"}
            rows.append({**row, **trial.fields})
        return pd.DataFrame(rows)


TUNE = FolderKind("a search", (*FILES, *STORE_FILES), "tune.json", Tuned.schema, store=STORE)


def tune(
    world: World,
    *,
    objective: str = "goodput",
    policy: str | None = None,
    space: Mapping[str, Any] | str | Path | None = None,
    trials: int = 60,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
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
        best = chosen(search)
        finalists = confirm(search, best)
    winner = best[0]
    confirmed, notes = verdict(objective, finalists[winner], finalists[default], winner == default, least)
    recommended = winner if confirmed else default
    compared = [candidate.world for candidate in dict.fromkeys((recommended, winner, default))]
    requests = world.requests()
    setup = setup_of(world, command, gpu_hour, currency)
    value, value_today = (search.outcomes[candidate].value for candidate in (winner, default))
    fleet = recommended.world
    replicas = ["--replicas", str(fleet.replicas)] if fleet.replicas > 1 else []
    tuned = Tuned(
        objective=objective,
        unit=OBJECTIVES[objective],
        confirmed=confirmed,
        winner=finalists[winner],
        runner_up=finalists[best[1]] if len(best) > 1 else None,
        default=finalists[default],
        search_gain=search.sign * (value - value_today) / abs(value_today) if value_today else None,
        equal=len(search.equals(winner, search.feasible())) - 1,
        num_replays=search.num_replays,
        replications=REPLICATIONS,
        space=varied.values,
        trials=search.trials(),
        notes=(*notes, *profile_notes(compared)),
        setup=replace(setup, traffic=f"{setup.traffic}; used: {len(requests):,}, at {requests.rate:.3g} req/s"),
        implementations=tuple(setting.base_profile().implementation for setting in compared),
        run=shlex.join(["dsim", "replay", world.trace, "--policy", fleet.policy, *replicas, *traffic_words]),
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
        raise DsimError(
            f"--policy is {policy}, and a search has one profile: expected --policy {spec} --profile {profile}"
        )
