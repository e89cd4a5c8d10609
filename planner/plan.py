"""A plan: which policy on which GPUs, how many, at what cost, and how sure (research/evidence/plan-method.md)."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from scipy.special import betaincinv

from ..engine.errors import DsimError
from ..engine.spec import files_of, parse
from ..files.read import cut
from ..profiler.canvas_law import mean_forwards
from ..profiler.profile import Profile
from ..profiler.uncertainty import common_error
from ..report.table import counted
from ..results.spread import Spread
from ..results.world import MAX_REPLICAS, Setup, World, on_profiles, setup_of
from . import plan_replays
from .backend import Pool
from .candidate import changed_fields, nearest_first, policy_toml
from .candidates import PlanCandidate
from .capacity import PARTS, CapacitySearch, check_rate, search_of
from .contents import Json, asked_of
from .deploy import UNROUTED, deployment_of
from .memo import Memo
from .plan_replays import PRECISION, Entrant, Replays, Task
from .plan_result import MEETS, MISSES, UNSURE, Due, Fleet, Horizon, Planned, Risk, Values, Variant, growth_of
from .quality import quality_of
from .race import FIRST, LIMIT, MOST, Entry, Lane, best_of, race, verdict
from .replicate import CONFIDENCE, Criterion, Interval, broken, interval, judged, share_texts, student
from .settings import Tried, halve

ROUTER = "jsq"  # that is tried in place of none
DOUBT = 1.25  # possible error factor of a pilot
MORE_TRAFFIC, SLOWER = 1.3, 1.2
HEADROOM = 4  # replications of the capacity search

Progress = Callable[[str, int, int | None], object]  # phase, replays done, of how many; None: not known
Case = tuple[Entrant, float, float]  # with a rate (req/s) and a slow-down of the profile


def plan(world: World, candidates: Sequence[PlanCandidate], left_out: Sequence[Fleet] = (), **options: Any) -> Planned:
    """Rank candidates by the cost of the smallest fleet that meets the world's `slos` at a rate.

    The world's policy, profile and replicas are unused. options: of PlanSearch (rate: by default the trace's), jobs
    and ray of `Pool`. DsimError if no candidate meets the SLOs.
    """
    world.routing()
    for candidate in candidates:
        fleet_world(world, candidate).loaded_profile()
    rate = _rate(world, options.pop("rate", None))
    with Pool(options.pop("jobs", None), options.pop("ray", None)) as pool:
        return PlanSearch(world, candidates, pool, rate, **options).result(left_out)


def inputs_of(world: World, candidates: Sequence[PlanCandidate], **size: Any) -> Json:
    """What tells a plan from another one. size: rate, attainment, max_replicas and num_requests."""
    entries = [(str(candidate), candidate.price, [*candidate.settings]) for candidate in candidates]
    return {**asked_of(replace(world, policy=World.policy)), **size, "candidates": entries}


def _rate(world: World, rate: float | None) -> float:
    """req/s; by default the trace's. DsimError if it has no times."""
    if rate is not None:
        return rate
    source = world.source()
    if not (len(source) > 1 and source.duration > 0):
        raise DsimError(f"{source.name} has no arrival times, expected --rate R")
    return source.rate


def fleet_worlds(world: World, candidates: Sequence[PlanCandidate], fleets: Sequence[Fleet]) -> list[World]:
    """The world of each fleet."""
    by_profile = {candidate.profile.name: candidate for candidate in candidates}
    return [fleet_world(world, replace(by_profile[f.profile], policy=f.policy), f.replicas or 1) for f in fleets]


def fleet_world(world: World, candidate: PlanCandidate, replicas: int = 1) -> World:
    return replace(world, policy=candidate.policy, replicas=replicas, profile_object=candidate.profile)


def fleet_of_today(text: str) -> tuple[str, int]:
    """SPEC and replicas of `SPEC,replicas=N`."""
    policy, _, count = text.rpartition(",replicas=")
    if not policy or not (count.isdecimal() and 1 <= int(count) <= MAX_REPLICAS):
        raise DsimError(f"today is {cut(text)}, expected SPEC,replicas=N such as vllm-diffusion:4,replicas=3")
    return policy, int(count)


@dataclass
class PlanSearch:
    """A plan's steps, each a method.

    A share `attainment` of arrivals must meet SLOs without a statistic. `spare` standby replicas cost, but serve
    nothing. With a `horizon` the cost is the mean over it. `today`: what runs now, as SPEC,replicas=N. `command`,
    `currency`: of the setup.
    """

    world: World
    candidates: Sequence[PlanCandidate]
    pool: Pool
    rate: float  # req/s
    _: KW_ONLY
    max_replicas: int = 64
    spare: int = 0
    horizon: Horizon | None = None
    today: str | None = None
    attainment: float = 0.99
    num_requests: int | None = None
    command: str = ""
    currency: str = "USD"
    memo: Memo = field(default_factory=Memo)
    progress: Progress = lambda phase, num_replays, total: None
    spread: float | None = None  # of severities between replications, once it is known
    phase: str = "pilot"

    def __post_init__(self) -> None:
        if not 0 <= self.spare <= MAX_REPLICAS:
            raise DsimError(f"spare is {self.spare}, expected 0 to {MAX_REPLICAS} replicas")
        check_rate(self.rate, self.max_replicas)
        if self.today is not None:
            parse(fleet_of_today(self.today)[0], self.world.allow_code)
        self.groups: list[list[Entrant]] = []  # the entrants of each candidate's settings, the given one first
        for candidate in self.candidates:
            settings = [replace(candidate, policy=p, quality=q, settings={}) for p, q in candidate.settings.items()]
            group = []
            for setting in settings or [candidate]:
                search = search_of(fleet_world(self.world, setting), PRECISION, self.attainment, self.num_requests)
                group.append(Entrant(setting, search))
            self.groups.append(group)
        self.originals = [group[0].candidate for group in self.groups]
        self.chosen = [group[0] for group in self.groups]  # each candidate's setting
        self.search = self.chosen[0].search
        self.criteria = self.search.criteria
        self.replays = Replays(self.pool, self.memo, lambda: self.progress(self.phase, self.replays.num_replays, None))
        self.changes = {  # rate, and slow-down of the profile
            f"{MORE_TRAFFIC - 1:.0%} more traffic": (self.rate * MORE_TRAFFIC, 1.0),
            f"a profile {SLOWER - 1:.0%} slower": (self.rate, SLOWER),
        }

    def result(self, left_out: Sequence[Fleet]) -> Planned:
        self._choose_settings()
        entrants, dropped = self._settle([entrant for entrant in self.chosen if not entrant.candidate.is_research])
        order, tied = self._rank(entrants)
        order = self._as_named_if_enough(order)
        research = self._research([entrant for entrant in self.chosen if entrant.candidate.is_research])
        best = order[0]
        heads = order[:1]
        if self.horizon is not None:  # of each GPU's best: what a request a second costs at the limit
            heads = list({entrant.candidate.profile.device.name: entrant for entrant in reversed(order)}.values())
        capacities = self._headroom(heads)
        ranking = [self._fleet(entrant, capacities.get(entrant, ())) for entrant in order]
        recommended = ranking[0]
        self.spread = max(float(np.std(entrant.lane.settled, ddof=1)) for entrant in order[:2])
        laws, routed, risks = self._under_laws(best), self._routed(best), self._risks(best)
        bought = (recommended.gpus or 0) // recommended.gpus_per_replica
        policy, code, longest = best.candidate.policy, self.world.allow_code, self.world.longest()
        context, profile = int((longest.input_length + longest.limit).max()), best.candidate.profile
        deployment = deployment_of(policy, profile, bought, allow_code=code, spare=self.spare, context=context)
        note = f"# The SLOs are met without the spare: {self.spare} of the replicas.\n" * bool(self.spare)
        refused = (f"{c.original} cannot run as it is: {c.refused}" for c in self.originals if c.refused)
        return Planned(
            rate=self.rate,
            ranking=tuple(ranking),
            left_out=(*dropped, *left_out),
            tied=tuple(str(entrant.candidate) for entrant in tied),
            risks=risks,
            criteria=tuple(criterion.text for criterion in self.criteria),
            bounds={criterion.text: criterion.bound for criterion in self.criteria},
            share_criteria=share_texts(self.criteria),
            plan_toml=note + policy_toml(policy, bought, code),
            priced=all(candidate.price is not None for candidate in self.originals),
            num_replays=self.replays.num_replays,
            num_requests=self.search.num_requests,
            block=self.search.block,
            setup=self._setup(),
            notes=(*_missed(self.search), *_notes_on_gpus([*order, *self.chosen]), *dict.fromkeys(refused)),
            growth=None if self.horizon is None else growth_of(self.horizon, recommended),
            laws=laws,
            routed=routed,
            today=self._today(best),
            research=tuple(research),
            deployment=deployment,
        )

    def _setup(self) -> Setup:
        """Of all profiles; the workload of a profile is its first by default."""
        world = self.world
        profiles = {candidate.profile.name: candidate.profile for candidate in self.originals}.values()
        workloads = dict.fromkeys(next(iter(profile.workloads), "") for profile in profiles)
        setup = setup_of(fleet_world(world, self.originals[0]), self.command, None, self.currency)
        workload = world.workload or world.yields or ", ".join(filter(None, workloads)) or None
        return replace(on_profiles(setup, profiles), workload=workload)

    # Steps of the search

    def _choose_settings(self) -> None:
        """Choose each policy's best setting."""
        self.phase = "settings"

        def rates_of(settings: Sequence[Entrant], rung: int, start: float | None) -> list[float]:
            """Req/s that a replica serves."""
            tasks = [Task(plan_replays.setting_rate, e, self.rate, index=rung, start=start) for e in settings]
            return [float(answer.get("rate", 0.0)) for answer in self.replays(tasks)]

        for k, group in enumerate(self.groups):
            if len(group) < 2:
                continue
            best, rates, equal = halve(group, rates_of, {entrant for entrant in group if entrant.untested})
            first = self.originals[k]
            tried = Tried(
                num=len(group),
                given=first.policy,
                given_rate=rates[group[0]],
                best=best.candidate.policy,
                rate=rates[best],
                equal=equal,
            )
            if first.refused:
                tried = replace(tried, given=first.original, given_rate=0.0)
            best.tried, self.chosen[k] = tried, best

    def _settle(self, entrants: Sequence[Entrant]) -> tuple[list[Entrant], list[Fleet]]:
        """The entrants that a race finds fleets for, and the dropped rows."""
        self.phase = "pilot"
        answers = self.replays(Task(plan_replays.pilot, entrant, self.rate, self.max_replicas) for entrant in entrants)
        guesses: dict[Entrant, int] = {}
        dropped: dict[Entrant, Fleet] = {}
        for entrant, answer in zip(entrants, answers, strict=True):
            if answer.get("replicas") is None:
                dropped[entrant] = self._row(entrant, dropped=self._refusal(entrant, answer))
            else:
                guesses[entrant] = int(answer["replicas"])
        if not guesses:
            reason = next(iter(dropped.values())).dropped
            limit = f"{self.max_replicas} replicas"
            raise DsimError(f"no fleet of up to {limit} meets the SLOs at {self.rate:g} req/s; {reason}")
        costs = {
            entrant: self._mean_cost(entrant, [math.ceil(guess * growth) for growth in self._growths])
            for entrant, guess in guesses.items()
        }
        second = sorted(costs.values())[:2][-1]
        for entrant, cost in costs.items():
            # Costs more than the two cheapest even if the pilot misjudged all three by DOUBT.
            if cost / DOUBT > second * DOUBT:
                guess = guesses.pop(entrant)
                reason = f"about {counted(guess, 'replica')} by the pilot: costs far more than the two cheapest"
                dropped[entrant] = self._row(entrant, about=guess, dropped=reason)
        self.phase = "racing"
        self._race(guesses)
        rows = [dropped[entrant] for entrant in entrants if entrant in dropped]
        for entrant in guesses:
            lane = entrant.lane
            if lane.replicas is None:
                size = counted(lane.low, "replica")
                reason = f"even {size}: not enough"
                if lane.dropped:
                    reason = f"more than {size}: costs more than two others"
                rows.append(self._row(entrant, least=lane.low + 1, dropped=reason))
        enough = [entrant for entrant in guesses if entrant.replicas]
        if not enough:
            limit = f"{self.max_replicas} replicas"
            raise DsimError(f"no fleet of up to {limit} surely meets the SLOs at {self.rate:g} req/s")
        return enough, rows

    def _research(self, entrants: Sequence[Entrant]) -> list[Fleet]:
        """The fleets of schedulers that no engine has, the cheapest first; empty if none meets the SLOs."""
        if not entrants:
            return []
        try:
            return [self._fleet(entrant) for entrant in self._rank(self._settle(entrants)[0])[0]]
        except DsimError:
            return []

    def _as_named_if_enough(self, order: list[Entrant]) -> list[Entrant]:
        """The best policy as it was named, where that costs no more and the settings found do not surely gain.

        Where they are beyond the engine's tested range, costing no more is enough.
        """
        best = order[0]
        original = next(group[0] for group in self.groups if best in group)
        if original is best:
            return order
        self._race({original: best.replicas}, best.replicas * (self.horizon is None))
        if not original.replicas or self._cost(original) > self._cost(best):
            return order
        original.tried = best.tried
        if not best.untested:
            original = self._rank([original, best])[0][0]
        return [original, *order[1:]]

    def _rank(self, entrants: Sequence[Entrant]) -> tuple[list[Entrant], list[Entrant]]:
        """By cost, known quality and distance from the SLOs' bounds; and those tied with the best."""
        cheapest = min(map(self._cost, entrants))
        equal = _best_answers([entrant for entrant in entrants if math.isclose(self._cost(entrant), cheapest)])
        while len(equal) > 1:
            equal = _nearest(equal)
            num = min(len(entrant.lane.settled) for entrant in equal)
            if len(equal) == 1 or num >= MOST:
                break
            short = [entrant for entrant in equal if len(entrant.lane.settled) == num]
            tasks = [self._replay((entrant, self.rate, 1.0), entrant.replicas, num) for entrant in short]
            for entrant, answer in zip(short, self.replays(tasks), strict=True):
                entrant.lane.settled.append(float(answer["severity"]))

        def mean(entrant: Entrant) -> float:
            return float(np.mean(entrant.lane.settled))

        def num_changes(entrant: Entrant) -> int:
            spec = entrant.candidate.policy
            return len(changed_fields(spec, self.world.allow_code)) + len(files_of(spec))

        nearest = _nearest(equal)
        scored = [entrant for entrant in nearest if entrant.candidate.quality.relative is not None]
        best = nearest_first(scored or nearest, num_changes, mean)[0]
        order = sorted(entrants, key=lambda e: (self._cost(e), e is not best, e not in equal, mean(e)))
        return order, [entrant for entrant in equal if entrant is not order[0]]

    # The recommendation in other cases

    def _under_laws(self, best: Entrant) -> tuple[Variant, ...]:
        """What the best policy needs under each counted law of canvases; empty if one is given."""
        world, profile = self.world, best.candidate.profile
        laws = [law for law in profile.canvas_laws if law.engine]
        if profile.family != "canvas" or world.workload or world.yields or len(laws) < 2:
            return ()
        self.phase = "another law"
        variants = []
        for law in laws:
            needed: int | None = best.replicas
            if law is not profile.canvas_laws[0]:
                needed = self._needed(best, workload=law.workload)
            charge, forwards = self._charge(needed, best), mean_forwards(law)
            variants.append(Variant(name=law.workload, replicas=needed, **charge, forwards=forwards, source=law.source))
        return tuple(variants)

    def _routed(self, best: Entrant) -> Variant | None:
        """The best fleet behind ROUTER; None if another router is named, or for one replica."""
        if self.world.router != UNROUTED or best.replicas == 1:
            return None
        self.phase = "another router"
        replicas = min(best.replicas, self._needed(best, router=ROUTER) or best.replicas)
        return Variant(name=ROUTER, replicas=replicas, **self._charge(replicas, best))

    def _needed(self, best: Entrant, **changed: Any) -> int | None:
        """Replicas where fields of the world are others; None: more than allowed."""
        return self._raced([(_with(best, best.candidate, **changed), self.rate, 1.0)], [best.replicas])[0].replicas

    def _today(self, best: Entrant) -> Fleet | None:
        """What runs today, on the recommended GPUs and under the plan's traffic, without spare."""
        if self.today is None:
            return None
        self.phase = "today's fleet"
        policy, replicas = fleet_of_today(self.today)
        quality = quality_of(parse(policy, self.world.allow_code), best.candidate.profile.model.name)
        candidate = replace(best.candidate, policy=policy, quality=quality)
        today = _with(best, candidate, policy=policy)
        today.lane = Lane(candidate=0, price=candidate.weight, limit=replicas, low=replicas - 1, high=replicas)
        answers = self._answers([self._replay((today, self.rate, 1.0), replicas, i) for i in range(FIRST)], "today: ")
        today.lane.severities[replicas] = [float(answer["severity"]) for answer in answers]
        return self._fleet(today, spare=0)

    def _headroom(self, entrants: Sequence[Entrant]) -> dict[Entrant, list[Json]]:
        """Capacities in HEADROOM replications, each with the criterion that breaks above it."""
        self.phase = "headroom"
        replays = [self._replay((entrant, self.rate, 1.0), entrant.replicas, 0) for entrant in entrants]
        firsts = [replace(task, work=plan_replays.fleet_capacity) for task in replays]
        starts = [answer.get("rate") for answer in self.replays(firsts)]  # of the other replications
        tasks = [
            replace(task, index=i, start=start)
            for task, start in zip(firsts, starts, strict=True)
            for i in range(HEADROOM)
        ]
        answers = iter(self._answers(tasks))
        return {entrant: list(islice(answers, HEADROOM)) for entrant in entrants}

    def _risks(self, best: Entrant) -> tuple[Risk, ...]:
        """More traffic, a lost replica and a slower profile."""
        self.phase = "risks"
        replicas, cases = best.replicas, self.changes.values()
        risks = []
        lanes = self._raced([(best, *case) for case in cases], [replicas] * len(cases))
        for (change, case), lane in zip(self.changes.items(), lanes, strict=True):
            risks.append(self._risk(change, lane, replicas, (best, *case), lane.replicas))
        remaining = replicas - (not self.spare)
        lost = self._risk("a replica lost", best.lane, remaining, (best, self.rate, 1.0), replicas)
        if lost.verdict != MEETS and replicas < self.max_replicas:
            lost = replace(lost, needs=replicas + 1, per_hour=self._charge(replicas + 1, best)["per_hour"])
        elif lost.verdict != MEETS:
            lost = replace(lost, needs=None, per_hour=None)
        return risks[0], lost, risks[1]

    def _risk(self, change: str, lane: Lane, replicas: int, case: Case, needs: int | None) -> Risk:
        """What becomes of a lane's fleet of `replicas`. needs: what it takes then."""
        answers: list[Json] = []
        values: Values = {}
        outcome = MISSES
        if replicas:
            answers = self._raced_answers(case, lane, replicas)
            values, severities = _values(self.criteria, answers), lane.severities[replicas]
            meet = all(_slack(c, values[c.text]) >= 0 for c in self.criteria if c.text in values)
            sure = verdict(severities, len(severities) + 1, self.spread)
            # The mean of logarithms and the printed mean may lie on different sides of a bound.
            if sure is not False:
                outcome = UNSURE
            if sure and meet:
                outcome = MEETS
        return Risk(
            change=change,
            values=values,
            judged=_judged(answers),
            verdict=outcome,
            stable=2 * sum(answer["stable"] for answer in answers) > len(answers),
            needs=needs,
            per_hour=self._charge(needs, case[0])["per_hour"],
        )

    # Rows of the result

    def _row(self, entrant: Entrant, **fields: Any) -> Fleet:
        return replace(entrant.candidate.row(), tried=entrant.tried, **fields)

    def _fleet(self, entrant: Entrant, capacities: Sequence[Json] = (), spare: int | None = None) -> Fleet:
        """capacities: the fleet's, where they were searched; spare: by default the plan's."""
        if spare is None:
            spare = self.spare
        due, replicas, mean_cost = self._dues(entrant), entrant.replicas, None
        if due:
            mean_cost = self._cost(entrant)
        charge = self._charge(replicas + spare - self.spare, entrant)
        tokens = None
        if charge["per_hour"] is not None:
            tokens = entrant.search.world.per_million_tokens(charge["per_hour"], self.rate)
        answers = self._raced_answers((entrant, self.rate, 1.0), entrant.lane, replicas)
        first, values = answers[0], _values(self.criteria, answers)
        slacks = {c.text: _slack(c, values[c.text]) for c in self.criteria if c.text in values}
        room, breaks_first = None, min(slacks, key=lambda text: slacks[text], default=self.criteria[0].text)
        if capacities:
            rate = interval([capacity["rate"] / self.rate for capacity in capacities])
            room = Interval(rate.value - 1, rate.low - 1, rate.high - 1)
            binding = Counter(capacity["binding"] for capacity in capacities).most_common(1)[0][0]
            breaks_first = broken(self.criteria, binding)
        shares = {slo: [answer["attained"].get(slo, 1.0) for answer in answers] for slo in first["attained"]}
        return self._row(
            entrant,
            replicas=replicas,
            spare=spare,
            **charge,
            per_million_tokens=tokens,
            values=values,
            attained={slo: sum(runs) / len(runs) for slo, runs in shares.items()},
            replications=len(answers),
            judged=_judged(answers),
            headroom=room,
            breaks_first=breaks_first,
            doubted=tuple(first["doubted"]),
            due=due,
            mean_cost=mean_cost,
            untested=entrant.untested,
            **{name: first[name] for name in ("limited_by", "limiting_setting", "assumed", "latency_ms")},
        )

    def _dues(self, entrant: Entrant) -> tuple[Due, ...]:
        if self.horizon is None or not entrant.later:
            return ()
        dues = []
        lanes = [entrant.lane, *entrant.later]
        for years, growth, lane in zip(self.horizon.dates, self._growths, lanes, strict=True):
            replicas = lane.replicas or 0
            charge = self._charge(replicas, entrant)
            dues.append(Due(years=years, rate=self.rate * growth, replicas=replicas, **charge))
        return tuple(dues)

    def _refusal(self, entrant: Entrant, answer: Json) -> str:
        texts = " and ".join(f"'{criterion.text}'" for criterion in self.criteria)
        missed = f"{entrant.candidate.policy} misses {texts} even on {self.max_replicas} replicas"
        return str(answer.get("error", missed))

    # Costs, races and replays

    def _charge(self, replicas: int | None, entrant: Entrant) -> Json:
        """GPUs and their price, with the spare; None: not known."""
        if replicas is None:
            return {"gpus": None, "per_hour": None}
        gpus, price = (replicas + self.spare) * entrant.candidate.gpus, entrant.candidate.price
        return {"gpus": gpus, "per_hour": price and gpus * price}

    def _cost(self, entrant: Entrant) -> float:
        return self._mean_cost(entrant, [lane.replicas or 0 for lane in (entrant.lane, *entrant.later)])

    def _mean_cost(self, entrant: Entrant, replicas: Sequence[int]) -> float:
        """An hour (without prices: GPUs), on average over the horizon. replicas: by its dates."""
        mean = replicas[0] if self.horizon is None else self.horizon.mean(replicas)
        return entrant.candidate.weight * (mean + self.spare)

    @property
    def _growths(self) -> list[float]:
        """Factors of the rate: today, and at each date of the horizon."""
        return [1.0] if self.horizon is None else [self.horizon.yearly**years for years in self.horizon.dates]

    def _race(self, starts: Mapping[Entrant, int], limit: int = 0) -> None:
        """Race at the plan's rate, and at those of the horizon. starts: first replicas."""
        growths = self._growths
        cases = [(entrant, self.rate * growth, 1.0) for entrant in starts for growth in growths]
        firsts = [math.ceil(replicas * growth) for replicas in starts.values() for growth in growths]
        lanes = iter(self._raced(cases, firsts, drop=self.horizon is None, limit=limit))
        for entrant in starts:
            entrant.lane, *entrant.later = islice(lanes, len(growths))
            if any(lane.replicas is None for lane in entrant.later):
                entrant.lane.low, entrant.lane.high = self.max_replicas, None

    def _raced(
        self, cases: Sequence[Case], starts: Sequence[int], *, drop: bool = False, limit: int | None = None
    ) -> list[Lane]:
        def severities(entries: Sequence[Entry]) -> list[float]:
            tasks = [self._replay(cases[entry.candidate], entry.replicas, entry.index) for entry in entries]
            return [LIMIT if "error" in answer else float(answer["severity"]) for answer in self.replays(tasks)]

        prices = [entrant.candidate.weight for entrant, _, _ in cases]
        limit = limit or self.max_replicas
        return race(prices, starts, limit, severities, drop=drop, spread=self.spread, spare=self.spare)

    def _raced_answers(self, case: Case, lane: Lane, replicas: int) -> list[Json]:
        """The race's replays of a fleet."""
        answers = self.replays(self._replay(case, replicas, i) for i in range(len(lane.severities[replicas])))
        return [answer for answer in answers if "error" not in answer]

    def _replay(self, case: Case, replicas: int, index: int) -> Task:
        entrant, rate, slower = case
        return Task(plan_replays.fleet_replay, entrant, rate, replicas, slower=slower, index=index)

    def _answers(self, tasks: Sequence[Task], prefix: str = "") -> list[Json]:
        """DsimError for a refused task."""
        answers = self.replays(tasks)
        for answer in answers:
            if "error" in answer:
                raise DsimError(f"{prefix}{answer['error']}")
        return answers


def _with(model: Entrant, candidate: PlanCandidate, **changed: Any) -> Entrant:
    """A candidate that is replayed like another one, with a world's changed fields."""
    return Entrant(candidate, replace(model.search, world=replace(model.search.world, **changed)))


def _nearest(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Those that are not surely further from the SLOs' bounds than another one."""
    return [entrants[i] for i in best_of([entrant.lane.settled for entrant in entrants])]


def _best_answers(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Entrants whose model is not known to answer better in another one."""
    best: dict[str, float] = {}
    for candidate in (entrant.candidate for entrant in entrants):
        name, relative = candidate.profile.model.name, candidate.quality.relative
        if relative is not None:
            best[name] = max(relative, best.get(name, relative))
    return [e for e in entrants if e.candidate.quality.relative in (None, best.get(e.candidate.profile.model.name))]


def _values(criteria: Sequence[Criterion], answers: Sequence[Json]) -> Values:
    values: dict[str, Spread] = {}
    for k, criterion in enumerate(criteria):
        data = np.array([answer["values"][k] for answer in answers if answer["values"][k] is not None])
        if not len(data):
            continue
        mean, half = float(data.mean()), student(data)
        low, high = mean - half, mean + half
        if len(data) < 2:
            values[criterion.text] = Spread(mean, None, None)
            continue
        if criterion.share is not None:
            if half == 0:  # equal replications prove nothing about the next one
                low, high = _of_count(mean, sum(answer["judged"][k] for answer in answers))
            low, high = max(0.0, low), min(1.0, high)
        values[criterion.text] = Spread(mean, low, high)
    return values


def _notes_on_gpus(entrants: Sequence[Entrant]) -> list[str]:
    """What is uncertain in a comparison of GPUs; entrants: the best first."""
    profiles: dict[str, Profile] = {}
    for profile in (entrant.candidate.profile for entrant in entrants):
        profiles.setdefault(profile.device.name, profile)
    if len(profiles) < 2:
        return []
    return [common_error([*profiles.values()], entrants[0].search.world.setting().drawn)]


def _missed(search: CapacitySearch) -> tuple[str, ...]:
    """A note on the part of the trace that short replays miss."""
    total = len(search.world.source())
    num = len(range(search.num_requests)[judged(search.num_requests)])
    if search.world.arrival != "trace" or num >= total:
        return ()
    sample = f"{num:,} of the trace's {total:,} requests, in {PARTS} stretches"
    return (f"each replay judges {sample}: a busier stretch between them is missed",)


def _slack(criterion: Criterion, spread: Spread) -> float:
    """A value's relative distance from its bound; above 0 is good."""
    excess = (spread.value or 0.0) - criterion.bound
    if criterion.share is None:
        excess = -excess
    return excess / criterion.bound


def _of_count(share: float, num: int) -> tuple[float, float]:
    """Exact one-sided bounds of a share of `num` (Clopper and Pearson, 1934)."""
    good = round(share * num)
    low = float(betaincinv(good, num - good + 1, 1 - CONFIDENCE)) if good else 0.0
    high = float(betaincinv(good + 1, num - good, CONFIDENCE)) if good < num else 1.0
    return low, high


def _judged(answers: Sequence[Json]) -> int:
    return sum(max(answer["judged"]) for answer in answers)  # with several classes: the largest
