"""A plan: which policy on which GPUs, how many, at what cost, and how sure that is.

0. Search settings that an engine has flags for (settings.py).
1. A pilot of short replays drops candidates that cost far too much.
2. A race (race.py) finds the fewest replicas of the others.
3. Fleets of equal cost are ranked by distance from the SLOs' bounds, paired by replication.
4. If replays were shorter than the trace, the best two race again on the whole trace.
5. The best one's headroom is its capacity, by bisection over the rate.
6. The best two face more traffic and a slower profile.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import betaincinv

from ..engine.errors import DsimError
from ..engine.policy import name_of
from ..files.read import cut
from ..profiler.canvas_law import mean_forwards
from ..profiler.profile import Profile
from ..profiler.uncertainty import common_error
from ..report.table import counted, percent
from ..results.scenario import MAX_REPLICAS, Scenario, Setup, setup_of
from ..results.spread import Spread
from .backend import Pool
from .candidate import beyond_tested, changed_fields, nearest_first, policy_toml
from .candidates import PlanCandidate
from .capacity import PARTS, STABILITY, CapacitySearch, check_rate, search_of
from .contents import Json, asked_of, digest
from .deploy import UNROUTED, deployment_of
from .memo import Memo
from .plan_replays import PRECISION, Entrant, Posed, Replays, Task, whole_search
from .plan_result import MEETS, MISSES, UNSURE, Due, Fleet, Planned, Risk, Values, Variant
from .purchase import Horizon, growth_of
from .race import CONFIDENCE, FIRST, LIMIT, MOST, Entry, Lane, best_of, race, verdict
from .replicate import Criterion, Interval, interval, judged, student
from .settings import Tried, halve

ROUTER = "jsq"  # that is tried in place of none
DOUBT = 1.25  # possible error factor of a pilot
MORE_TRAFFIC, SLOWER = 1.3, 1.2
HEADROOM = 4  # replications of the capacity search

Progress = Callable[[str, int, int | None], object]  # phase, replays done, of how many; None: not known
Case = tuple[int, float, float]  # entrant, rate (req/s), slow-down of the profile


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    rate: by default the trace's. A share `attainment` of arrivals must meet SLOs without a statistic. `spare` standby
    replicas cost, but serve nothing. With a `horizon` the cost is the mean over it. `today`: what runs now, as
    SPEC,replicas=N. `jobs`, `ray` (see `Pool`) and `memo` change no result. `command`, `currency`: of the setup.
    """

    rate: float | None = None  # req/s
    max_replicas: int = 64
    spare: int = 0
    horizon: Horizon | None = None
    today: str | None = None
    attainment: float = 0.99
    num_requests: int | None = None
    jobs: int | None = None
    ray: str | None = None
    command: str = ""
    currency: str = "USD"
    memo: Memo = field(default_factory=Memo)
    progress: Progress = lambda phase, num_replays, total: None

    def __post_init__(self) -> None:
        if not 0 <= self.spare <= MAX_REPLICAS:
            raise DsimError(f"spare is {self.spare}, expected 0 to {MAX_REPLICAS} replicas")
        if self.today is not None:
            fleet_of_today(self.today)


def plan(
    scenario: Scenario, candidates: Sequence[PlanCandidate], left_out: Sequence[Fleet] = (), **options: Any
) -> Planned:
    """Rank candidates by the cost of the smallest fleet that meets the scenario's `slos` at a rate.

    The scenario's policy, profile and replicas are unused. options: of PlanOptions. DsimError if no candidate meets the
    SLOs.
    """
    checked = PlanOptions(**options)
    scenario.routing()
    for candidate in candidates:
        posed(scenario, candidate).loaded_profile()
    with Pool(checked.jobs, checked.ray) as pool:
        return _Search(scenario, candidates, checked, pool).result(left_out)


def inputs_of(
    scenario: Scenario, candidates: Sequence[PlanCandidate], *, rate: float | None, attainment: float,
    max_replicas: int, num_requests: int | None,
) -> Json:  # fmt: skip
    """Of a plan's replays."""
    inputs = asked_of(replace(scenario, policy=Scenario.policy))
    del inputs["policy"]
    named = []
    for candidate in candidates:
        asks = asked_of(posed(scenario, candidate))
        named.append((str(candidate), candidate.price, [*candidate.settings], asks["policy"], asks["profile"]))
    own = {"attainment": attainment, "max_replicas": max_replicas, "num_requests": num_requests}
    return {**inputs, **own, "candidates": digest(named), "rate": own_rate(scenario) if rate is None else rate}


def own_rate(scenario: Scenario) -> float:
    """req/s; DsimError if the trace has no times."""
    source = scenario.source()
    if not (len(source) > 1 and source.duration > 0):
        raise DsimError(f"{source.name} has no arrival times, expected --rate R")
    return source.rate


def posed_fleets(scenario: Scenario, candidates: Sequence[PlanCandidate], fleets: Sequence[Fleet]) -> list[Posed]:
    """The fleets as scenarios."""
    by_profile = {candidate.profile.name: candidate for candidate in candidates}
    return [posed(scenario, replace(by_profile[f.profile], policy=f.policy), f.replicas or 1) for f in fleets]


def posed(scenario: Scenario, candidate: PlanCandidate, replicas: int = 1) -> Posed:
    fields = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    return Posed(**fields | {"policy": candidate.policy, "replicas": replicas, "given_profile": candidate.profile})


def fleet_of_today(text: str) -> tuple[str, int]:
    """SPEC and replicas of `SPEC,replicas=N`."""
    policy, _, count = text.rpartition(",replicas=")
    if not policy or not (count.isdigit() and 1 <= int(count) <= MAX_REPLICAS):
        raise DsimError(f"today is {cut(text)}, expected SPEC,replicas=N such as vllm-diffusion:4,replicas=3")
    return policy, int(count)


class _NoFleetError(DsimError):
    """No fleet meets the SLOs."""


class _Search:
    def __init__(
        self, scenario: Scenario, candidates: Sequence[PlanCandidate], options: PlanOptions, pool: Pool
    ) -> None:
        self.scenario, self.options, self.code = scenario, options, scenario.allow_code
        self.rate = own_rate(scenario) if options.rate is None else options.rate
        check_rate(self.rate, options.max_replicas)
        self.entrants: list[Entrant] = []
        self.groups: list[list[int]] = []  # the entrants of each candidate's settings
        for candidate in candidates:
            settings = [replace(candidate, policy=p, quality=q, settings={}) for p, q in candidate.settings.items()]
            first = len(self.entrants)
            for setting in settings or [candidate]:
                search = search_of(posed(scenario, setting), PRECISION, options.attainment, options.num_requests)
                self.entrants.append(Entrant(setting, search, whole_search(search, options.attainment)))
            self.groups.append([*range(first, len(self.entrants))])
        self.chosen = [group[0] for group in self.groups]  # each candidate's setting
        self.search, self.whole = self.entrants[0].search, self.entrants[0].whole
        self.criteria = self.search.criteria
        self.spread: float | None = None  # of severities between replications, once it is known
        self.phase = "pilot"
        self.replays = Replays(self.entrants, pool, options.memo, self._report)
        self.changes = {  # rate, and slow-down of the profile
            f"{MORE_TRAFFIC - 1:.0%} more traffic": (self.rate * MORE_TRAFFIC, 1.0),
            f"a profile {SLOWER - 1:.0%} slower": (self.rate, SLOWER),
        }

    def result(self, left_out: Sequence[Fleet]) -> Planned:
        options, scenario, criteria = self.options, self.scenario, self.criteria
        self._choose_settings()
        research = [i for i in self.chosen if self.entrants[i].candidate.is_research]
        lanes, dropped = self._settle([i for i in self.chosen if i not in research])
        order, tied, failed = self._decide(lanes)
        order = self._as_named_if_enough(order)
        research_fleets = self._research(research)
        best = self._candidate(order[0])
        heads = order[:1]
        if options.horizon is not None:  # of each GPU's best: what a request a second costs at the limit
            heads = list({self._candidate(lane).profile.device.name: lane for lane in reversed(order)}.values())
        room = self._headroom(heads)
        ranking = [self._fleet(lane, room.get(lane.candidate)) for lane in order]
        recommended = ranking[0]
        self.spread = max(float(np.std(lane.settled, ddof=1)) for lane in order[:2])
        today = None if options.today is None else self._today(order[0], *fleet_of_today(options.today))
        laws, routed, risks = self._under_laws(order[0]), self._with_router(order[0]), self._risks(order[:2])
        bought = (recommended.gpus or 0) // recommended.gpus_per_replica
        longest = scenario.longest()
        deployment = deployment_of(
            best.policy, best.profile, bought, router=scenario.router, allow_code=self.code, spare=options.spare,
            untested=recommended.untested, context=int((longest.input_length + longest.limit).max()),
        )  # fmt: skip
        note = f"# The SLOs are met without the spare: {options.spare} of the replicas.\n" if options.spare else ""
        on_gpus = [self._candidate(lane) for lane in order] + [self.entrants[i].candidate for i in self.chosen]
        return Planned(
            rate=self.rate,
            ranking=tuple(ranking),
            left_out=(*failed, *dropped, *left_out),
            tied=tuple(str(self._candidate(lane)) for lane in tied),
            risks=risks,
            criteria=tuple(criterion.text for criterion in criteria),
            bounds={criterion.text: criterion.bound for criterion in criteria},
            share_criteria=tuple(criterion.text for criterion in criteria if criterion.share is not None),
            plan_toml=note + policy_toml(best.policy, bought, self.code),
            priced=all(entrant.candidate.price is not None for entrant in self.entrants),
            num_replays=self.replays.num_replays,
            num_requests=self.search.num_requests,
            block=self.search.block,
            setup=self._setup(),
            notes=(
                *_missed(self.search, self.whole, min(2, len(order))),
                *self._notes_on_answers(best),
                *_notes_on_gpus(on_gpus, self.search),
                *dict.fromkeys(f"{c.original} cannot run as it is: {c.refused}" for c in self._named() if c.refused),
            ),
            growth=None if options.horizon is None else growth_of(options.horizon, recommended),
            routed=routed,
            laws=laws,
            today=today,
            research=tuple(research_fleets),
            deployment=deployment,
        )

    def _named(self) -> list[PlanCandidate]:
        return [self.entrants[group[0]].candidate for group in self.groups]

    def _setup(self) -> Setup:
        """Of all profiles; the workload of a profile is its first by default."""
        scenario, candidates = self.scenario, self._named()
        profiles = {candidate.profile.name: candidate.profile for candidate in candidates}.values()
        workloads = dict.fromkeys(next(iter(profile.workloads), "") for profile in profiles)
        setup = setup_of(posed(scenario, candidates[0]), self.options.command, None, self.options.currency)
        return replace(
            setup,
            profile=", ".join(profile.name for profile in profiles),
            device=", ".join(dict.fromkeys(profile.device.name for profile in profiles)),
            model=", ".join(dict.fromkeys(profile.model.name for profile in profiles)),
            estimated=any(profile.is_estimate for profile in profiles),
            workload=scenario.workload or scenario.yields or ", ".join(filter(None, workloads)) or None,
        )

    # Steps of the search

    def _choose_settings(self) -> None:
        """Choose each policy's best setting."""
        self.phase = "settings"
        untested = {i for i in range(len(self.entrants)) if self._untested(i)}
        halvings = {k: halve(group, untested) for k, group in enumerate(self.groups) if len(group) > 1}
        rounds = {k: next(halving) for k, halving in halvings.items()}
        while rounds:  # all policies at once, to fill the pool
            tasks = [
                Task("try", i, self.rate, 1, index=rung, start=start)
                for settings, rung, start in rounds.values() for i in settings
            ]  # fmt: skip
            scores = iter([float(answer.get("rate", 0.0)) for answer in self.replays(tasks)])
            for k, (settings, _, _) in list(rounds.items()):
                try:
                    rounds[k] = halvings[k].send([next(scores) for _ in settings])
                except StopIteration as done:
                    del rounds[k]
                    self._choose(k, *done.value)

    def _choose(self, k: int, best: int, rates: Mapping[int, float], equal: int) -> None:
        """rates: req/s that a replica serves, by setting."""
        named, entrant = self.groups[k][0], self.entrants[best]
        first = self.entrants[named].candidate
        self.chosen[k] = best
        entrant.tried = Tried(
            num=len(self.groups[k]),
            given=first.original if first.refused else first.policy,
            given_rate=0.0 if first.refused else rates[named],
            best=entrant.candidate.policy,
            rate=rates[best],
            equal=equal,
        )

    def _research(self, chosen: Sequence[int]) -> list[Fleet]:
        """The fleets of schedulers that no engine has, the cheapest first, as far as short replays tell."""
        if not chosen:
            return []
        try:
            lanes, _ = self._settle(chosen)
        except _NoFleetError:
            return []
        return [self._fleet(lane, None) for lane in self._rank(lanes)[0]]

    def _settle(self, chosen: Sequence[int]) -> tuple[list[Lane], list[Fleet]]:
        """The lanes of the race, and the dropped rows."""
        self.phase, options = "pilot", self.options
        pilots = self.replays(Task("pilot", i, self.rate, options.max_replicas) for i in chosen)
        guesses: dict[int, int] = {}
        dropped: dict[int, Fleet] = {}
        for i, pilot in zip(chosen, pilots, strict=True):
            if pilot.get("replicas") is None:
                dropped[i] = self._row(i, dropped=self._refusal(i, pilot))
            else:
                guesses[i] = int(pilot["replicas"])
        if not guesses:
            reason = next(iter(dropped.values())).dropped
            raise _NoFleetError(
                f"no fleet of up to {options.max_replicas} replicas meets the SLOs at {self.rate:g} req/s; {reason}"
            )
        costs = {}
        for i, guess in guesses.items():
            replicas = self._mean_replicas([math.ceil(guess * growth) for growth in self._growths])
            costs[i] = self.entrants[i].candidate.weight * (replicas + options.spare)
        second = sorted(costs.values())[:2][-1]
        for i, cost in costs.items():
            # Costs more than the two cheapest even if the pilot misjudged all three by DOUBT.
            if cost / DOUBT > second * DOUBT:
                guess = guesses.pop(i)
                reason = f"about {counted(guess, 'replica')} by the pilot: costs far more than the two cheapest"
                dropped[i] = self._row(i, about=guess, dropped=reason)
        self.phase = "racing"
        lanes = self._race(guesses)
        rows = [dropped[i] for i in chosen if i in dropped]
        for lane in lanes:
            if lane.replicas is None:
                size = counted(lane.low, "replica")
                reason = f"more than {size}: costs more than two others" if lane.dropped else f"even {size}: not enough"
                rows.append(self._row(lane.candidate, least=lane.low + 1, dropped=reason))
        return self._enough(lanes), rows

    def _enough(self, lanes: Sequence[Lane]) -> list[Lane]:
        enough = [lane for lane in lanes if lane.replicas is not None]
        if not enough:
            limit = f"{self.options.max_replicas} replicas"
            raise _NoFleetError(f"no fleet of up to {limit} surely meets the SLOs at {self.rate:g} req/s")
        return enough

    def _decide(self, lanes: Sequence[Lane]) -> tuple[list[Lane], list[Lane], list[Fleet]]:
        """`_rank`, with the first two settled on the whole trace; also the rows that failed there."""
        order, tied = self._rank(lanes)
        if self.search is self.whole:
            return order, tied, []
        self.phase = "racing on the whole trace"
        best: list[Lane] = []
        failed: list[Fleet] = []
        while order and (len(best) < 2 or self._cost(order[0]) < max(map(self._cost, best))):
            num = max(1, 2 - len(best))
            head, order = order[:num], order[num:]
            for lane in head:
                self.entrants[lane.candidate].on_whole = True
            for lane in self._race({lane.candidate: lane.high or 1 for lane in head}):
                if lane.replicas is not None:
                    best.append(lane)
                    continue
                reason = f"even {counted(lane.low, 'replica')}: not enough on the whole trace"
                failed.append(self._row(lane.candidate, least=lane.low + 1, dropped=reason))
        first, tied = self._rank(self._enough(best))
        return first + order, tied, failed

    def _as_named_if_enough(self, order: list[Lane]) -> list[Lane]:
        """The best policy as it was named, where that costs no more and the settings found do not surely gain.

        Where they are beyond the engine's tested range, costing no more is enough.
        """
        best = order[0]
        named = next(group[0] for group in self.groups if best.candidate in group)
        if named == best.candidate:
            return order
        entrant, plain_entrant = self.entrants[best.candidate], self.entrants[named]
        plain_entrant.on_whole = entrant.on_whole
        [plain] = self._race({named: best.high or 1}, best.high if self.options.horizon is None else None)
        if plain.replicas is None or self._cost(plain) > self._cost(best):
            return order
        plain_entrant.tried = entrant.tried
        first = plain if self._untested(best.candidate) else self._rank([plain, best])[0][0]
        return [first, *order[1:]]

    def _rank(self, lanes: Sequence[Lane]) -> tuple[list[Lane], list[Lane]]:
        """Lanes by cost, known quality and distance from the SLOs' bounds; and the lanes tied with the best."""
        cheapest = min(self._cost(lane) for lane in lanes)
        equal = self._best_answers([lane for lane in lanes if math.isclose(self._cost(lane), cheapest)])
        while len(equal) > 1:
            equal = [equal[i] for i in best_of([lane.settled for lane in equal])]
            num = min(len(lane.settled) for lane in equal)
            if len(equal) == 1 or num >= MOST:
                break
            short = [lane for lane in equal if len(lane.settled) == num]
            tasks = [self._replay((lane.candidate, self.rate, 1.0), lane.high or 0, num) for lane in short]
            for lane, answer in zip(short, self.replays(tasks), strict=True):
                lane.settled.append(float(answer["severity"]))
        equal_last = [equal[i] for i in best_of([lane.settled for lane in equal])]
        best = nearest_first(
            equal_last,
            lambda lane: len(changed_fields(self._candidate(lane).policy, self.code)),
            lambda lane: float(np.mean(lane.settled)),
        )[0]
        order = sorted(
            lanes,
            key=lambda lane: (self._cost(lane), lane is not best, lane not in equal, float(np.mean(lane.settled))),
        )
        return order, [lane for lane in equal if lane is not order[0]]

    def _best_answers(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Lanes whose model is not known to answer better in another one."""
        best: dict[str, float] = {}
        for lane in lanes:
            candidate = self._candidate(lane)
            name, relative = candidate.profile.model.name, candidate.quality.relative
            if relative is not None:
                best[name] = max(relative, best.get(name, relative))
        return [
            lane for lane in lanes
            if (candidate := self._candidate(lane)).quality.relative in (None, best.get(candidate.profile.model.name))
        ]  # fmt: skip

    # The recommendation in other cases

    def _with_router(self, lane: Lane) -> Variant | None:
        """The best fleet behind a router that knows the queues; None if another router is named, or for one replica."""
        if self.scenario.router != UNROUTED or lane.replicas in (None, 1):
            return None
        self.phase = "another router"
        replicas = min(lane.replicas, self._needed(lane, router=ROUTER) or lane.replicas)
        return self._variant(ROUTER, lane, replicas)

    def _under_laws(self, lane: Lane) -> tuple[Variant, ...]:
        """What the best policy needs under each counted law of canvases; empty if one is given."""
        scenario, best = self.scenario, self._candidate(lane)
        laws = [law for law in best.profile.canvas_laws if law.engine]
        if best.profile.family != "canvas" or scenario.workload or scenario.yields or len(laws) < 2:
            return ()
        self.phase = "another law"
        variants = []
        for law in laws:
            is_default = law is best.profile.canvas_laws[0]
            needed = lane.replicas if is_default else self._needed(lane, workload=law.workload)
            variant = self._variant(law.workload, lane, needed)
            variants.append(replace(variant, forwards=mean_forwards(law), source=law.source))
        return tuple(variants)

    def _variant(self, name: str, lane: Lane, replicas: int | None) -> Variant:
        gpus, hourly = (None, None) if replicas is None else self._charge(replicas, lane)
        return Variant(name=name, replicas=replicas, gpus=gpus, per_hour=hourly)

    def _needed(self, lane: Lane, **changed: Any) -> int | None:
        """Replicas that a lane's policy needs where fields of its scenario are others; None: more than allowed."""
        entrant = self._enter(self._candidate(lane), lane, **changed)
        [other] = self._raced([(entrant, self.rate, 1.0)], [lane.replicas or 1])
        return other.replicas

    def _today(self, lane: Lane, policy: str, replicas: int) -> Fleet:
        """What runs today, on the recommended GPUs and under the plan's traffic."""
        self.phase = "today's fleet"
        best = self._candidate(lane)
        entrant = self._enter(replace(best, policy=policy, settings={}), lane, policy=policy)
        today = Lane(candidate=entrant, price=best.weight, most=replicas, at=replicas, low=replicas - 1, high=replicas)
        tasks = [self._replay((entrant, self.rate, 1.0), replicas, index) for index in range(FIRST)]
        answers = self._answers(tasks, f"today is {policy}: ")
        today.severities[replicas] = [float(answer["severity"]) for answer in answers]
        return self._fleet(today, None)

    def _enter(self, candidate: PlanCandidate, like: Lane, **changed: Any) -> int:
        """Add a candidate that is replayed like a lane's, with a scenario's changed fields; returns its index."""
        model = self.entrants[like.candidate]
        search, whole = (
            replace(search, scenario=replace(search.scenario, **changed)) for search in (model.search, model.whole)
        )
        self.entrants.append(Entrant(candidate, search, whole, model.on_whole))
        return len(self.entrants) - 1

    def _headroom(self, lanes: Sequence[Lane]) -> dict[int, list[Json]]:
        """By candidate: capacities in HEADROOM replications, each with the criterion that breaks above it."""
        self.phase = "headroom"

        def own(lane: Lane, index: int, start: float | None) -> Task:
            severity = lane.settled[index] if index < len(lane.settled) else None
            task = self._replay((lane.candidate, self.rate, 1.0), lane.high or 0, index)
            return replace(task, kind="own", severity=severity, start=start)

        # The first rates are the others' starts; the risks fill the pool meanwhile.
        first = [own(lane, 0, None) for lane in lanes]
        for lane in lanes:
            for case in self.changes.values():
                first.append(self._replay((lane.candidate, *case), lane.replicas or 1, 0))
        starts = [answer.get("rate") for answer in self.replays(first)]
        tasks = [own(lane, i, start) for lane, start in zip(lanes, starts, strict=False) for i in range(HEADROOM)]
        answers = self._answers(tasks)
        return {lane.candidate: answers[k * HEADROOM : (k + 1) * HEADROOM] for k, lane in enumerate(lanes)}

    def _risks(self, best: Sequence[Lane]) -> tuple[Risk, ...]:
        """More traffic, a lost replica and a slower profile, for the best two."""
        self.phase = "risks"
        first, second = best[0], best[-1]  # perhaps the same
        replicas = first.replicas or 0
        after = self._raced([(first.candidate, *case) for case in self.changes.values()], [replicas] * 2)
        # No change makes the runner-up cheaper, so it is replayed only where the recommendation then costs more.
        dearer = []
        for case, lane in zip(self.changes.values(), after, strict=True):
            cost = math.inf if lane.replicas is None else lane.cost(lane.replicas)
            if second is not first and cost > second.cost(second.replicas or 0):
                dearer.append(case)
        rivals = self._raced([(second.candidate, *case) for case in dearer], [second.replicas or 1] * len(dearer))
        risks = []
        for (change, case), lane in zip(self.changes.items(), after, strict=True):
            lanes = [lane, *(rivals[i] for i, other in enumerate(dearer) if other == case)]
            enough = [each for each in lanes if each.replicas is not None]
            cheapest = min(enough, key=lambda each: each.cost(each.replicas or 0), default=None)
            name = "" if cheapest is None else str(self._candidate(cheapest))
            risks.append(self._risk(change, lane, replicas, case, lane.replicas, name))
        remaining, name = replicas - (0 if self.options.spare else 1), str(self._candidate(first))
        lost = self._risk("a replica lost", first, remaining, (self.rate, 1.0), replicas, name)
        if lost.verdict != MEETS:
            needs = None if replicas == self.options.max_replicas else replicas + 1
            lost = self._risk("a replica lost", first, remaining, (self.rate, 1.0), needs, name)
        return risks[0], lost, risks[1]

    def _risk(
        self, change: str, lane: Lane, replicas: int, case: tuple[float, float], needs: int | None, best: str
    ) -> Risk:
        """What becomes of a lane's fleet of `replicas`. needs: what it takes then."""
        answers: list[Json] = []
        values: Values = {}
        outcome = MISSES
        if replicas:
            answers = self._raced_answers(lane, replicas, *case)
            values, severities = self._values(answers), lane.severities[replicas]
            meet = all(_slack(c, values[c.text]) >= 0 for c in self.criteria if c.text in values)
            sure = verdict(severities, len(severities) + 1, self.spread)
            # The mean of logarithms and the printed mean may lie on different sides of a bound.
            outcome = MISSES if sure is False else MEETS if sure and meet else UNSURE
        return Risk(
            change=change,
            values=values,
            judged=_judged(answers),
            verdict=outcome,
            stable=2 * sum(answer["stable"] for answer in answers) > len(answers),
            needs=needs,
            per_hour=None if needs is None else self._charge(needs, lane)[1],
            best=best,
        )

    # Rows of the result

    def _row(self, entrant: int, **fields: Any) -> Fleet:
        return replace(self.entrants[entrant].candidate.row(), tried=self.entrants[entrant].tried, **fields)

    def _fleet(self, lane: Lane, capacities: Sequence[Json] | None) -> Fleet:
        """capacities: the fleet's, where they were searched."""
        replicas = lane.replicas
        assert replicas is not None
        due, scenario = self._dues(lane), self.entrants[lane.candidate].search.scenario
        gpus, hourly = self._charge(due[0].replicas if due else replicas, lane)
        answers = self._raced_answers(lane, replicas, self.rate, 1.0)
        first, values = answers[0], self._values(answers)
        slacks = {c.text: _slack(c, values[c.text]) if c.text in values else math.inf for c in self.criteria}
        room, breaks_first = None, min(slacks, key=lambda text: slacks[text])
        if capacities is not None:
            rate = interval([capacity["rate"] / self.rate for capacity in capacities], CONFIDENCE)
            room = Interval(rate.value - 1, rate.low - 1, rate.high - 1)
            binding = Counter(capacity["binding"] for capacity in capacities).most_common(1)[0][0]
            breaks_first = STABILITY if binding < 0 else self.criteria[binding].text
        shares = {slo: [answer["attained"].get(slo, 1.0) for answer in answers] for slo in first["attained"]}
        return self._row(
            lane.candidate,
            replicas=replicas,
            spare=self.options.spare,
            gpus=gpus,
            per_hour=hourly,
            per_million_tokens=None if hourly is None else scenario.per_million_tokens(hourly, self.rate),
            values=values,
            attained={slo: sum(each) / len(each) for slo, each in shares.items()},
            replications=len(answers),
            judged=_judged(answers),
            headroom=room,
            breaks_first=breaks_first,
            limited_by=first["limited_by"],
            limiting_setting=first["limiting_setting"],
            assumed=first["assumed"],
            doubted=tuple(first["doubted"]),
            due=due,
            mean_cost=self._cost(lane) if due else None,
            untested=self._untested(lane.candidate),
            latency_ms=first["latency_ms"],
        )

    def _dues(self, lane: Lane) -> tuple[Due, ...]:
        horizon, later = self.options.horizon, self.entrants[lane.candidate].later
        if horizon is None or not later:
            return ()
        dues = []
        for years, growth, at_date in zip(horizon.dates, self._growths, (lane, *later), strict=True):
            replicas = (later[-1] if horizon.buy_now else at_date).replicas or 0
            gpus, hourly = self._charge(replicas, lane)
            dues.append(Due(years=years, rate=self.rate * growth, replicas=replicas, gpus=gpus, per_hour=hourly))
        return tuple(dues)

    def _values(self, answers: Sequence[Json]) -> Values:
        values: dict[str, Spread] = {}
        for k, criterion in enumerate(self.criteria):
            data = np.array([answer["values"][k] for answer in answers if answer["values"][k] is not None])
            if not len(data):
                continue
            mean, half = float(data.mean()), student(data, CONFIDENCE)
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

    def _refusal(self, entrant: int, pilot: Json) -> str:
        if "error" in pilot:
            return str(pilot["error"])
        texts = " and ".join(f"'{criterion.text}'" for criterion in self.criteria)
        value, observed, limit = pilot["value"], "", self.options.max_replicas
        if value is not None and len(self.criteria) == 1:
            share = self.criteria[0].share
            observed = f": {1e3 * value:.4g} ms" if share is None else f": {percent(value, share)} %"
            observed += f" on {limit}"
        return f"{self.entrants[entrant].candidate.policy} misses {texts} even on {limit} replicas{observed}"

    # Costs, races and replays

    def _candidate(self, lane: Lane) -> PlanCandidate:
        return self.entrants[lane.candidate].candidate

    def _untested(self, entrant: int) -> tuple[str, ...]:
        return beyond_tested(self.entrants[entrant].candidate.policy, self.code)

    def _charge(self, replicas: int, lane: Lane) -> tuple[int, float | None]:
        """GPUs and their price, with the spare."""
        candidate = self._candidate(lane)
        gpus = (replicas + self.options.spare) * candidate.gpus
        return gpus, None if candidate.price is None else gpus * candidate.price

    def _cost(self, lane: Lane) -> float:
        """An hour (without prices: GPUs), on average over the horizon."""
        later = self.entrants[lane.candidate].later
        replicas = self._mean_replicas([each.replicas or 0 for each in (lane, *later)])
        return self._candidate(lane).weight * (replicas + self.options.spare)

    def _mean_replicas(self, replicas: Sequence[int]) -> float:
        """Paid on average. replicas: by date of the horizon."""
        return float(replicas[0]) if self.options.horizon is None else self.options.horizon.mean(replicas)

    @property
    def _growths(self) -> list[float]:
        """Factors of the rate: today, and at each date of the horizon."""
        horizon = self.options.horizon
        return [1.0] if horizon is None else [horizon.yearly**years for years in horizon.dates]

    def _race(self, starts: Mapping[int, int], most: int | None = None) -> list[Lane]:
        """A race at the plan's rate, and at those of the horizon. starts: first replicas, by entrant."""
        growths = self._growths
        cases = [(i, self.rate * growth, 1.0) for i in starts for growth in growths]
        firsts = [math.ceil(replicas * growth) for replicas in starts.values() for growth in growths]
        lanes = self._raced(cases, firsts, drop=self.options.horizon is None, most=most)
        today = lanes[:: len(growths)]
        for k, lane in enumerate(today):
            later = lanes[k * len(growths) + 1 : (k + 1) * len(growths)]
            if any(each.replicas is None for each in later):
                lane.low, lane.high = self.options.max_replicas, None
            self.entrants[lane.candidate].later = later
        return today

    def _raced(
        self, cases: Sequence[Case], starts: Sequence[int], *, drop: bool = False, most: int | None = None
    ) -> list[Lane]:
        def severities(entries: Sequence[Entry]) -> list[float]:
            tasks = [self._replay(cases[entry.candidate], entry.replicas, entry.index) for entry in entries]
            return [LIMIT if "error" in answer else float(answer["severity"]) for answer in self.replays(tasks)]

        options = self.options
        prices = [self.entrants[i].candidate.weight for i, _, _ in cases]
        lanes = race(
            prices, starts, most or options.max_replicas, severities, drop=drop, spread=self.spread,
            spare=options.spare,
        )  # fmt: skip
        for lane in lanes:
            lane.candidate = cases[lane.candidate][0]
        return lanes

    def _raced_answers(self, lane: Lane, replicas: int, rate: float, slower: float) -> list[Json]:
        """The race's replays of a fleet."""
        case = lane.candidate, rate, slower
        answers = self.replays(self._replay(case, replicas, i) for i in range(len(lane.severities[replicas])))
        return [answer for answer in answers if "error" not in answer]

    def _replay(self, case: Case, replicas: int, index: int) -> Task:
        entrant, rate, slower = case
        whole = self.entrants[entrant].on_whole
        return Task("replay", entrant, rate, replicas, slower=slower, index=index, whole=whole)

    def _answers(self, tasks: Sequence[Task], where: str = "") -> list[Json]:
        """DsimError for a refused task."""
        answers = self.replays(tasks)
        for answer in answers:
            if "error" in answer:
                raise DsimError(f"{where}{answer['error']}")
        return answers

    def _report(self) -> None:
        self.options.progress(self.phase, self.replays.num_replays, None)

    def _notes_on_answers(self, best: PlanCandidate) -> list[str]:
        """Of settings that change answers: recommended, or not searched."""
        notes = [
            f"{name}={value} changes the model's answers, and replays do not judge their quality: compare answers first"
            for name, value in changed_fields(best.policy, self.code).items()
            if name in best.changing
        ]
        policies: dict[tuple[str, ...], list[str]] = {}
        for candidate in self._named():
            if candidate.changing and not candidate.searches_changing:
                policies.setdefault(candidate.changing, []).append(name_of(candidate.policy))
        for fields, names in policies.items():
            of_policies = f"{' and '.join(fields)} of {', '.join(dict.fromkeys(names))}"
            notes.append(f"settings that change the answers were not searched: {of_policies} (--change-answers)")
        return notes


def _notes_on_gpus(candidates: Sequence[PlanCandidate], search: CapacitySearch) -> list[str]:
    """A note on the errors of a comparison of GPUs; candidates: the best first."""
    profiles: dict[str, Profile] = {}
    for candidate in candidates:
        profiles.setdefault(candidate.profile.device.name, candidate.profile)
    return [common_error([*profiles.values()], search.scenario.setting().drawn)] if len(profiles) > 1 else []


def _missed(search: CapacitySearch, whole: CapacitySearch, num_settled: int) -> tuple[str, ...]:
    """Notes on the part of the trace that short replays miss."""
    if search.scenario.arrival != "trace":
        return ()
    total = len(search.scenario.source())
    short, long = (min(total, len(range(s.num_requests)[judged(s.num_requests)])) for s in (search, whole))
    if short == total:
        return ()
    part = f"{short:,} of the trace's {total:,} requests, in {PARTS} stretches"
    if search is whole:
        return (f"each replay judges {part}: a busier stretch between them is missed",)
    settled = "the recommendation and the runner-up were" if num_settled > 1 else "the recommendation was"
    where = "the whole trace" if long >= total else f"replays that judge {long:,}"
    return (
        f"replays of {search.num_requests:,} requests judge {part}. They sorted out the other policies; only "
        f"{settled} settled on {where}, with headroom and risks. Another policy may need fewer or more "
        "replicas than is said here",
    )


def _slack(criterion: Criterion, spread: Spread) -> float:
    """A value's relative distance from its bound; above 0 is good."""
    beyond = (spread.value or 0.0) - criterion.bound
    return (beyond if criterion.share is not None else -beyond) / criterion.bound


def _of_count(share: float, num: int) -> tuple[float, float]:
    """Exact one-sided bounds of a share of `num` (Clopper and Pearson, 1934)."""
    good = round(share * num)
    low = float(betaincinv(good, num - good + 1, 1 - CONFIDENCE)) if good else 0.0
    high = float(betaincinv(good + 1, num - good, CONFIDENCE)) if good < num else 1.0
    return low, high


def _judged(answers: Sequence[Json]) -> int:
    return sum(max(answer["judged"]) for answer in answers)  # with several classes: the largest
