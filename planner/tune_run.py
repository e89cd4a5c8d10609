"""A search from the question to the files, for `dsim tune` and `dsim.tune`."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..profiler.placed import placed
from ..report.page import Page
from ..report.tune import tune_page
from ..results.metrics import no_nan
from ..results.scenario import Scenario, setup_of
from .backend import Pool
from .contents import Json
from .ensemble import check_num, ensemble, of_objective
from .fleet_space import FleetSpace, fleet_space
from .quality import load_table, parse_share
from .record import profile_notes
from .search import Progress
from .space import Candidate, Space, candidate_of, load_space, searchable, space_of
from .tune import tune
from .tune_folder import TuneFolder
from .tuned import Tuned


@dataclass(frozen=True)
class Options:
    """See `dsim.tune`."""

    policy: str | None = None  # to beat
    space: str | Path | Mapping[str, Any] | None = None
    objectives: Sequence[str] = ("goodput",)
    trials: int = 60
    min_quality: float | str | None = None
    quality_table: str | Path | None = None
    gpu_hour: float | None = None
    jobs: int = 1
    ensemble: int | None = None
    gpus: int | None = None  # budget for pools

    def __post_init__(self) -> None:
        spec, profile = placed(self.policy or "")
        if profile is not None:
            raise DsimError(
                f"--policy is {self.policy}, and a search has one profile: expected --policy {spec} --profile {profile}"
            )


@dataclass(frozen=True)
class Question:
    """A checked search, ready to run; its scenario has the replicas of the policy to beat."""

    scenario: Scenario
    options: Options
    space: Space | FleetSpace | None
    default: Candidate | None


def question_of(scenario: Scenario, options: Options) -> Question:
    code, space = scenario.allow_code, options.space
    check_num(options.ensemble, [scenario])
    if scenario.pools:
        if options.policy is not None:
            raise DsimError(f"policy {options.policy} is given and the fleet has pools, expected pools alone")
        return Question(
            scenario, options, fleet_space(scenario, space, options.gpus, "cost" in options.objectives), None
        )
    if options.gpus is not None:
        raise DsimError(f"gpus is {options.gpus} and no pool is given, expected --pool, or replicas in a space file")
    check = searchable(scenario.loaded_profile(), scenario.workload)
    declared = None
    if space is not None:
        declared = (
            space_of(space, "space", check, code) if isinstance(space, Mapping) else load_space(space, check, code)
        )
    default = None if options.policy is None else candidate_of(options.policy, scenario.replicas, code)
    return Question(scenario, options, declared, default)


def write_tune(
    question: Question, folder: TuneFolder, command: str, *, run: Sequence[str] = (), currency: str = "USD",
    progress: Progress, **pool: Any,
) -> tuple[Tuned, list[Scenario], Json, Page, list[str]]:  # fmt: skip
    """Answer the question: the compared scenarios, recommended first; the object of `--json`; the page; the written
    files.

    run: words of `dsim replay` for the trace, without policy or pools. pool: ray.
    """
    scenario, options = question.scenario, question.options
    tuned = tune(
        scenario, objectives=options.objectives, space=question.space, trials=options.trials,
        default=question.default, memo=folder.memo, min_quality=parse_share(options.min_quality),
        quality_table=load_table(options.quality_table, scenario.allow_code), gpu_hour=options.gpu_hour,
        jobs=options.jobs, progress=progress, begin=lambda asked: folder.begin("search", asked), **pool,
    )  # fmt: skip
    ahead = dict.fromkeys((tuned.recommended, tuned.winner.candidate, tuned.default.candidate))
    compared = [candidate.posed(scenario) for candidate in ahead]
    requests = scenario.requests()
    info = {**tuned.to_json(), **no_nan(setup_of(scenario, command, options.gpu_hour, currency))}
    info["implementations"] = [pool.base_profile().implementation for own in compared for pool in own.of_each_pool()]
    info["run"] = shlex.join(["dsim", "replay", scenario.trace, *tuned.recommended.arguments, *run])
    info["traffic"] += f"; used: {len(requests):,}, at {requests.rate:.3g} req/s"
    if options.ensemble is not None:
        with Pool(jobs=options.jobs, **pool) as own:
            found = ensemble(
                compared, requests, options.ensemble, recommended=True, pool=own, memo=folder.memo,
                judged=of_objective(tuned.objectives[0]),
                progress=lambda done, of: progress("asking drawn profiles", done, of, ""),
            )  # fmt: skip
        info["ensemble"] = no_nan(found)
    info["notes"] += profile_notes([alone for one in compared for alone in one.of_each_pool()])
    page = tune_page(info, tuned.trials)
    return tuned, compared, info, page, folder.write(tuned, info, page)
