"""A plan, from question to files, for `dsim plan` and `dsim.plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..comparison.measured_log import measured_log
from ..engine.errors import DsimError
from ..profiler.models import known_model
from ..profiler.placed import placed
from ..profiler.profile import Profile, load, shipped_for
from ..report.page import Page
from ..report.plan import plan_page
from ..report.run import log_words
from ..results.metrics import no_nan
from ..results.scenario import Scenario, setup_of
from ..traces import Trace
from .backend import Pool
from .contents import Json, asked_of, digest
from .ensemble import check_num
from .memo import Memo
from .plan import Progress, candidates_of, fleet_of_today, own_rate, plan, posed, posed_fleets
from .plan_folder import PlanFolder
from .plan_replays import Posed
from .planned import Fleet, PlanCandidate, Planned
from .purchase import Horizon
from .quality import load_table, parse_share
from .record import profile_notes
from .uncertain_fleet import COST, GPUS, replica_cost, rivals, uncertain_fleets


@dataclass(frozen=True)
class Options:
    """See `dsim.plan`."""

    rate: float | None = None  # req/s
    attainment: float = 0.99
    max_replicas: int = 64
    num_requests: int | None = None
    spare: int = 0
    growth: str | None = None
    horizon: float = 1.0  # years
    buy_now: bool = False
    today: str | None = None
    ensemble: int | None = None
    min_quality: float | str | None = None
    quality_table: str | Path | None = None
    as_given: bool = False
    change_answers: bool = False
    research: bool = False

    def __post_init__(self) -> None:
        if self.as_given and self.change_answers:
            raise DsimError(
                "as given and change answers are both true, expected at most one: the first searches nothing"
            )
        if self.growth is None and (self.horizon != 1 or self.buy_now):
            raise DsimError("horizon or buy now is given and no growth, expected one such as 30%/year")
        _ = self.over
        if self.today is not None:
            fleet_of_today(self.today)
        check_num(self.ensemble)

    @property
    def over(self) -> Horizon | None:
        return None if self.growth is None else Horizon(self.growth, self.horizon, self.buy_now)


@dataclass(frozen=True)
class Question:
    """A checked plan, ready to run."""

    scenario: Scenario
    candidates: Sequence[PlanCandidate]
    left_out: Sequence[Fleet]
    rate: float  # req/s
    options: Options
    prices: Callable[[Profile], float | None] = lambda profile: None

    @property
    def profiles(self) -> list[Profile]:
        return list({c.profile.name: c.profile for c in self.candidates}.values())

    @property
    def asked(self) -> Json:
        """Inputs of the plan's replays."""
        own, traffic = self.options, asked_of(replace(self.scenario, policy=Scenario.policy))
        each = [(c, asked_of(posed(self.scenario, c))) for c in self.candidates]
        candidates = [(str(c), c.price, c.settings, asks["policy"], asks["profile"]) for c, asks in each]
        asked = {name: value for name, value in traffic.items() if name not in ("policy", "rate")}
        return {
            **asked, "candidates": digest(candidates), "rate": self.rate, "attainment": own.attainment,
            "max_replicas": own.max_replicas, "num_requests": own.num_requests,
        }  # fmt: skip


def question_of(
    scenario: Scenario,
    policies: Sequence[str],
    profiles: Sequence[Profile] | None,
    prices: Callable[[Profile], float | None],
    options: Options,
) -> Question:
    """profiles: by default one of the log's model, or the commands' default; none if each policy names its own.

    DsimError if no candidate can run.
    """
    if profiles is None:
        profiles = [] if name_their_profiles(policies) else [load(_profile_of(scenario.source()))]
    candidates, left_out = candidates_of(
        scenario, policies, profiles, prices, as_given=options.as_given, change_answers=options.change_answers,
        research=options.research,
        min_quality=parse_share(options.min_quality),
        quality_table=load_table(options.quality_table, scenario.allow_code),
    )  # fmt: skip
    rate = own_rate(scenario) if options.rate is None else options.rate
    return Question(scenario, candidates, left_out, rate, options, prices)


def _profile_of(trace: Trace) -> str:
    """A shipped profile of the one model that a log names; else the default."""
    models = {known_model(name) for name in set(map(str, trace.extras.get("model", ())))}
    model = models.pop() if len(models) == 1 else None
    return [*(shipped_for(model.name) if model else []), Scenario.profile][0]


def name_their_profiles(policies: Sequence[str]) -> bool:
    return bool(policies) and all(placed(policy)[1] is not None for policy in policies)


def answer(
    question: Question,
    memo: Memo | None = None,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    progress: Progress | None = None,
) -> tuple[Planned, list[Posed]]:
    """The plan with its optional parts, and the best two fleets."""
    own, progress = question.options, progress or (lambda *_: None)
    planned = plan(
        question.scenario, question.candidates, question.left_out, rate=question.rate, attainment=own.attainment,
        max_replicas=own.max_replicas, num_requests=own.num_requests, spare=own.spare, horizon=own.over,
        today=own.today, jobs=jobs, ray=ray, memo=memo, progress=progress,
    )  # fmt: skip
    posing = partial(posed_fleets, replace(question.scenario, rate=planned.rate), question.candidates)
    if own.ensemble is not None:
        compared = rivals(planned)
        with Pool(jobs, ray) as pool:
            planned = replace(planned, ensemble=uncertain_fleets(
                dict(zip(compared, posing(list(compared.values())), strict=True)),
                [replica_cost(planned, f) for f in compared.values()], own.ensemble, spare=own.spare,
                cost=COST if planned.priced else GPUS, attainment=own.attainment, num_requests=planned.num_requests,
                pool=pool, memo=memo, progress=partial(progress, "asking drawn profiles"),
            ))  # fmt: skip
    return planned, posing(planned.ranking[:2])


def write_plan(
    question: Question, folder: PlanFolder, command: str, *, sheets: Sequence[Profile] = (),
    gpu_hour: str | None = None, currency: str = "USD", progress: Progress, **pool: Any,
) -> tuple[Planned, Json, Page, list[str]]:  # fmt: skip
    """Answer the question: the plan, the object of `--json`, the page, and the files written.

    sheets: profiles made from data sheets, saved too. pool: jobs, ray.
    """
    scenario, profiles = question.scenario, question.profiles
    folder.begin("plan", question.asked)
    planned, ahead = answer(question, folder.memo, progress=progress, **pool)
    info = {**no_nan(setup_of(scenario, command, None, currency)), **planned.to_json()}
    info |= {"gpu_hour": gpu_hour, "attainment": question.options.attainment}
    info |= {"profile": ", ".join(p.name for p in profiles), "estimated": any(p.is_estimate for p in profiles)}
    for name in ("device", "model", "profile_version"):
        info.pop(name, None)
    firsts = dict.fromkeys(next(iter(p.workloads), "") for p in profiles)
    info["workload"] = scenario.workload or scenario.yields or ", ".join(filter(None, firsts)) or None
    found = measured_log(replace(scenario, num_requests=None))
    if found is not None:
        info["measured"] = {**no_nan(found), "words": log_words(found)}
    info["notes"] += profile_notes(ahead)
    page = plan_page(info)
    return planned, info, page, folder.write(planned, info, page, sheets)
