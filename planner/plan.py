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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from scipy.special import betaincinv

from ..engine.errors import DsimError
from ..engine.policy import name_of
from ..files.read import cut
from ..profiler.canvas_law import mean_forwards
from ..report.table import counted, percent
from ..results.spread import Spread
from ..results.world import MAX_REPLICAS, Setup, World, setup_of
from . import plan_replays
from .backend import Pool
from .candidate import changed_fields, nearest_first, policy_toml
from .candidates import PlanCandidate
from .capacity import PARTS, STABILITY, CapacitySearch, check_rate, search_of
from .contents import Json, asked_of, digest
from .deploy import UNROUTED, deployment_of
from .memo import Memo
from .plan_replays import PRECISION, Entrant, Replays, Task, whole_search
from .plan_result import MEETS, MISSES, UNSURE, Due, Fleet, Planned, Risk, Values, Variant
from .purchase import Horizon, growth_of
from .race import FIRST, LIMIT, MOST, Entry, Lane, best_of, race, verdict
from .replicate import CONFIDENCE, Criterion, Interval, interval, judged, student
from .settings import Tried, halve

ROUTER = "jsq"  # that is tried in place of none
DOUBT = 1.25  # possible error factor of a pilot
MORE_TRAFFIC, SLOWER = 1.3, 1.2
HEADROOM = 4  # replications of the capacity search

Progress = Callable[[str, int, int | None], object]  # phase, replays done, of how many; None: not known
Case = tuple[Entrant, float, float]  # with a rate (req/s) and a slow-down of the profile


def plan(
    world: World, candidates: Sequence[PlanCandidate], left_out: Sequence[Fleet] = (), *,
    rate: float | None = None, jobs: int | None = None, ray: str | None = None, **options: Any,
) -> Planned:  # fmt: skip
    """Rank candidates by the cost of the smallest fleet that meets the world's `slos` at a rate.

    The world's policy, profile and replicas are unused. rate: by default the trace's. jobs, ray: see `Pool`.
    options: of PlanSearch. DsimError if no candidate meets the SLOs.
    """
    world.routing()
    for candidate in candidates:
        fleet_world(world, candidate).loaded_profile()
    with Pool(jobs, ray) as pool:
        return PlanSearch(world, candidates, pool, _rate(world, rate), **options).result(left_out)


def inputs_of(
    world: World, candidates: Sequence[PlanCandidate], *, rate: float | None, attainment: float,
    max_replicas: int, num_requests: int | None,
) -> Json:  # fmt: skip
    """Of a plan's replays."""
    inputs = asked_of(replace(world, policy=World.policy))
    del inputs["policy"]
    entries = []
    for candidate in candidates:
        fields = asked_of(fleet_world(world, candidate))
        entries.append((str(candidate), candidate.price, [*candidate.settings], fields["policy"], fields["profile"]))
    size = {"attainment": attainment, "max_replicas": max_replicas, "num_requests": num_requests}
    return {**inputs, **size, "candidates": digest(entries), "rate": _rate(world, rate)}


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
    if not policy or not (count.isdigit() and 1 <= int(count) <= MAX_REPLICAS):
        raise DsimError(f"today is {cut(text)}, expected SPEC,replicas=N such as vllm-diffusion:4,replicas=3")
    return policy, int(count)


class _NoFleetError(DsimError):
    """No fleet meets the SLOs."""


@dataclass
class PlanSearch:
    """A plan's steps, each a method.

    A share `attainment` of arrivals must meet SLOs without a statistic. `spare` standby replicas cost, but serve
    nothing. With a `horizon` the cost is the mean over it. `today`: what runs now, as SPEC,replicas=N. `memo`
    changes no result. `command`, `currency`: of the setup.
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
        self.groups: list[list[Entrant]] = []  # the entrants of each candidate's settings, the given one first
        for candidate in self.candidates:
            settings = [replace(candidate, policy=p, quality=q, settings={}) for p, q in candidate.settings.items()]
            group = []
            for setting in settings or [candidate]:
                search = search_of(fleet_world(self.world, setting), PRECISION, self.attainment, self.num_requests)
                group.append(Entrant(setting, search, whole_search(search, self.attainment)))
            self.groups.append(group)
        self.originals = [group[0].candidate for group in self.groups]
        self.chosen = [group[0] for group in self.groups]  # each candidate's setting
        self.search, self.whole = self.chosen[0].search, self.chosen[0].whole
        self.criteria = self.search.criteria
        self.replays = Replays(self.pool, self.memo, self._report)
        self.changes = {  # rate, and slow-down of the profile
            f"{MORE_TRAFFIC - 1:.0%} more traffic": (self.rate * MORE_TRAFFIC, 1.0),
            f"a profile {SLOWER - 1:.0%} slower": (self.rate, SLOWER),
        }

    def result(self, left_out: Sequence[Fleet]) -> Planned:
        self._choose_settings()
        entrants, dropped = self._settle([entrant for entrant in self.chosen if not entrant.candidate.is_research])
        order, tied, failed = self._decide(entrants)
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
        today = None if self.today is None else self._today(best, *fleet_of_today(self.today))
        laws, routed, risks = self._under_laws(best), self._with_router(best), self._risks(best, order[:2][-1])
        bought = (recommended.gpus or 0) // recommended.gpus_per_replica
        policy, code = best.candidate.policy, self.world.allow_code
        longest = self.world.longest()
        deployment = deployment_of(
            policy, best.candidate.profile, bought, router=self.world.router, allow_code=code, spare=self.spare,
            untested=best.untested, context=int((longest.input_length + longest.limit).max()),
        )  # fmt: skip
        note = f"# The SLOs are met without the spare: {self.spare} of the replicas.\n" if self.spare else ""
        refused = (f"{c.original} cannot run as it is: {c.refused}" for c in self.originals if c.refused)
        return Planned(
            rate=self.rate,
            ranking=tuple(ranking),
            left_out=(*failed, *dropped, *left_out),
            tied=tuple(str(entrant.candidate) for entrant in tied),
            risks=risks,
            criteria=tuple(criterion.text for criterion in self.criteria),
            bounds={criterion.text: criterion.bound for criterion in self.criteria},
            share_criteria=tuple(criterion.text for criterion in self.criteria if criterion.share is not None),
            plan_toml=note + policy_toml(policy, bought, code),
            priced=all(candidate.price is not None for candidate in self.originals),
            num_replays=self.replays.num_replays,
            num_requests=self.search.num_requests,
            block=self.search.block,
            setup=self._setup(),
            notes=(
                *_missed(self.search, self.whole, min(2, len(order))),
                *self._notes_on_answers(best.candidate),
                *dict.fromkeys(refused),
            ),
            growth=None if self.horizon is None else growth_of(self.horizon, recommended),
            routed=routed,
            laws=laws,
            today=today,
            research=tuple(research),
            deployment=deployment,
        )

    def _setup(self) -> Setup:
        """Of all profiles; the workload of a profile is its first by default."""
        world = self.world
        profiles = {candidate.profile.name: candidate.profile for candidate in self.originals}.values()
        workloads = dict.fromkeys(next(iter(profile.workloads), "") for profile in profiles)
        setup = setup_of(fleet_world(world, self.originals[0]), self.command, None, self.currency)
        return replace(
            setup,
            profile=", ".join(profile.name for profile in profiles),
            device=", ".join(dict.fromkeys(profile.device.name for profile in profiles)),
            model=", ".join(dict.fromkeys(profile.model.name for profile in profiles)),
            estimated=any(profile.is_estimate for profile in profiles),
            workload=world.workload or world.yields or ", ".join(filter(None, workloads)) or None,
        )

    # Steps of the search

    def _choose_settings(self) -> None:
        """Choose each policy's best setting."""
        self.phase = "settings"
        halvings = {
            k: halve(group, {entrant for entrant in group if entrant.untested})
            for k, group in enumerate(self.groups) if len(group) > 1
        }  # fmt: skip
        rounds = {k: next(halving) for k, halving in halvings.items()}
        while rounds:  # all policies at once, to fill the pool
            tasks = [
                Task(plan_replays.setting_rate, entrant, self.rate, index=rung, start=start)
                for settings, rung, start in rounds.values() for entrant in settings
            ]  # fmt: skip
            scores = iter([float(answer.get("rate", 0.0)) for answer in self.replays(tasks)])
            for k, (settings, _, _) in list(rounds.items()):
                try:
                    rounds[k] = halvings[k].send([next(scores) for _ in settings])
                except StopIteration as done:
                    del rounds[k]
                    self._choose(k, *done.value)

    def _choose(self, k: int, best: Entrant, rates: Mapping[Entrant, float], equal: int) -> None:
        """rates: req/s that a replica serves, by setting."""
        first = self.originals[k]
        self.chosen[k] = best
        best.tried = Tried(
            num=len(self.groups[k]),
            given=first.original if first.refused else first.policy,
            given_rate=0.0 if first.refused else rates[self.groups[k][0]],
            best=best.candidate.policy,
            rate=rates[best],
            equal=equal,
        )

    def _research(self, entrants: Sequence[Entrant]) -> list[Fleet]:
        """The fleets of schedulers that no engine has, the cheapest first, as far as short replays tell."""
        if not entrants:
            return []
        try:
            return [self._fleet(entrant) for entrant in self._rank(self._settle(entrants)[0])[0]]
        except _NoFleetError:
            return []

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
            raise _NoFleetError(
                f"no fleet of up to {self.max_replicas} replicas meets the SLOs at {self.rate:g} req/s; {reason}"
            )
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
                reason = f"more than {size}: costs more than two others" if lane.dropped else f"even {size}: not enough"
                rows.append(self._row(entrant, least=lane.low + 1, dropped=reason))
        return self._enough(guesses), rows

    def _enough(self, entrants: Iterable[Entrant]) -> list[Entrant]:
        enough = [entrant for entrant in entrants if entrant.replicas]
        if not enough:
            limit = f"{self.max_replicas} replicas"
            raise _NoFleetError(f"no fleet of up to {limit} surely meets the SLOs at {self.rate:g} req/s")
        return enough

    def _decide(self, entrants: Sequence[Entrant]) -> tuple[list[Entrant], list[Entrant], list[Fleet]]:
        """`_rank`, with the first two settled on the whole trace; also the rows that failed there."""
        order, tied = self._rank(entrants)
        if self.search is self.whole:
            return order, tied, []
        self.phase = "racing on the whole trace"
        best: list[Entrant] = []
        failed: list[Fleet] = []
        while order and (len(best) < 2 or self._cost(order[0]) < max(map(self._cost, best))):
            num = max(1, 2 - len(best))
            head, order = order[:num], order[num:]
            for entrant in head:
                entrant.on_whole = True
            self._race({entrant: entrant.replicas for entrant in head})
            for entrant in head:
                if entrant.replicas:
                    best.append(entrant)
                    continue
                reason = f"even {counted(entrant.lane.low, 'replica')}: not enough on the whole trace"
                failed.append(self._row(entrant, least=entrant.lane.low + 1, dropped=reason))
        first, tied = self._rank(self._enough(best))
        return first + order, tied, failed

    def _as_named_if_enough(self, order: list[Entrant]) -> list[Entrant]:
        """The best policy as it was named, where that costs no more and the settings found do not surely gain.

        Where they are beyond the engine's tested range, costing no more is enough.
        """
        best = order[0]
        original = next(group[0] for group in self.groups if best in group)
        if original is best:
            return order
        original.on_whole = best.on_whole
        self._race({original: best.replicas}, best.replicas if self.horizon is None else None)
        if not original.replicas or self._cost(original) > self._cost(best):
            return order
        original.tried = best.tried
        return [original if best.untested else self._rank([original, best])[0][0], *order[1:]]

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

        code = self.world.allow_code
        best = nearest_first(_nearest(equal), lambda e: len(changed_fields(e.candidate.policy, code)), mean)[0]
        order = sorted(entrants, key=lambda e: (self._cost(e), e is not best, e not in equal, mean(e)))
        return order, [entrant for entrant in equal if entrant is not order[0]]

    # The recommendation in other cases

    def _with_router(self, best: Entrant) -> Variant | None:
        """The best fleet behind a router that knows the queues; None if another router is named, or for one replica."""
        if self.world.router != UNROUTED or best.replicas == 1:
            return None
        self.phase = "another router"
        replicas = min(best.replicas, self._needed(best, router=ROUTER) or best.replicas)
        return Variant(name=ROUTER, replicas=replicas, **self._charge(replicas, best))

    def _under_laws(self, best: Entrant) -> tuple[Variant, ...]:
        """What the best policy needs under each counted law of canvases; empty if one is given."""
        world, profile = self.world, best.candidate.profile
        laws = [law for law in profile.canvas_laws if law.engine]
        if profile.family != "canvas" or world.workload or world.yields or len(laws) < 2:
            return ()
        self.phase = "another law"
        variants = []
        for law in laws:
            is_default = law is profile.canvas_laws[0]
            needed = best.replicas if is_default else self._needed(best, workload=law.workload)
            charge, forwards = self._charge(needed, best), mean_forwards(law)
            variants.append(Variant(name=law.workload, replicas=needed, **charge, forwards=forwards, source=law.source))
        return tuple(variants)

    def _needed(self, best: Entrant, **changed: Any) -> int | None:
        """Replicas that a policy needs where fields of its world are others; None: more than allowed."""
        [lane] = self._raced([(_with(best, best.candidate, **changed), self.rate, 1.0)], [best.replicas])
        return lane.replicas

    def _today(self, best: Entrant, policy: str, replicas: int) -> Fleet:
        """What runs today, on the recommended GPUs and under the plan's traffic."""
        self.phase = "today's fleet"
        today = _with(best, replace(best.candidate, policy=policy, settings={}), policy=policy)
        today.lane = Lane(
            candidate=0, price=today.candidate.weight, limit=replicas, trial=replicas, low=replicas - 1, high=replicas
        )
        tasks = [self._replay((today, self.rate, 1.0), replicas, index) for index in range(FIRST)]
        answers = self._answers(tasks, f"today is {policy}: ")
        today.lane.severities[replicas] = [float(answer["severity"]) for answer in answers]
        return self._fleet(today)

    def _headroom(self, entrants: Sequence[Entrant]) -> dict[Entrant, list[Json]]:
        """Capacities in HEADROOM replications, each with the criterion that breaks above it."""
        self.phase = "headroom"

        def capacity(entrant: Entrant, index: int, start: float | None) -> Task:
            task, settled = self._replay((entrant, self.rate, 1.0), entrant.replicas, index), entrant.lane.settled
            severity = settled[index] if index < len(settled) else None
            return replace(task, work=plan_replays.fleet_capacity, severity=severity, start=start)

        # The first rates are the others' starts; the risks fill the pool meanwhile.
        first = [capacity(entrant, 0, None) for entrant in entrants]
        risks = [self._replay((e, *case), e.replicas, 0) for e in entrants for case in self.changes.values()]
        starts = [answer.get("rate") for answer in self.replays([*first, *risks])]
        tasks = [capacity(e, i, start) for e, start in zip(entrants, starts, strict=False) for i in range(HEADROOM)]
        answers = iter(self._answers(tasks))
        return {entrant: list(islice(answers, HEADROOM)) for entrant in entrants}

    def _risks(self, first: Entrant, second: Entrant) -> tuple[Risk, ...]:
        """More traffic, a lost replica and a slower profile, for the best two (perhaps the same)."""
        self.phase = "risks"
        replicas, cases = first.replicas, self.changes.values()
        after = self._raced([(first, *case) for case in cases], [replicas] * len(cases))
        costs = [{} if lane.replicas is None else {str(first.candidate): lane.cost(lane.replicas)} for lane in after]
        # No change makes the runner-up cheaper, so it is replayed only where the recommendation then costs more.
        dearer = [
            (prices, case) for prices, case in zip(costs, cases, strict=True)
            if second is not first and min(prices.values(), default=math.inf) > second.lane.cost(second.replicas)
        ]  # fmt: skip
        rivals = self._raced([(second, *case) for _, case in dearer], [second.replicas] * len(dearer))
        for (prices, _), lane in zip(dearer, rivals, strict=True):
            if lane.replicas is not None:
                prices[str(second.candidate)] = lane.cost(lane.replicas)
        risks = []
        for (change, case), lane, prices in zip(self.changes.items(), after, costs, strict=True):
            cheapest = min(prices, key=prices.__getitem__, default="")
            risks.append(self._risk(change, lane, replicas, (first, *case), lane.replicas, cheapest))
        remaining = replicas - (0 if self.spare else 1)
        today, name = (first, self.rate, 1.0), str(first.candidate)
        lost = self._risk("a replica lost", first.lane, remaining, today, replicas, name)
        if lost.verdict != MEETS:
            needs = None if replicas == self.max_replicas else replicas + 1
            lost = self._risk("a replica lost", first.lane, remaining, today, needs, name)
        return risks[0], lost, risks[1]

    def _risk(self, change: str, lane: Lane, replicas: int, case: Case, needs: int | None, best: str) -> Risk:
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
            outcome = MISSES if sure is False else MEETS if sure and meet else UNSURE
        return Risk(
            change=change,
            values=values,
            judged=_judged(answers),
            verdict=outcome,
            stable=2 * sum(answer["stable"] for answer in answers) > len(answers),
            needs=needs,
            per_hour=self._charge(needs, case[0])["per_hour"],
            best=best,
        )

    # Rows of the result

    def _row(self, entrant: Entrant, **fields: Any) -> Fleet:
        return replace(entrant.candidate.row(), tried=entrant.tried, **fields)

    def _fleet(self, entrant: Entrant, capacities: Sequence[Json] = ()) -> Fleet:
        """capacities: the fleet's, where they were searched."""
        due, replicas = self._dues(entrant), entrant.replicas
        charge = self._charge(due[0].replicas if due else replicas, entrant)
        tokens = None
        if charge["per_hour"] is not None:
            tokens = entrant.search.world.per_million_tokens(charge["per_hour"], self.rate)
        answers = self._raced_answers((entrant, self.rate, 1.0), entrant.lane, replicas)
        first, values = answers[0], _values(self.criteria, answers)
        slacks = {c.text: _slack(c, values[c.text]) if c.text in values else math.inf for c in self.criteria}
        room, breaks_first = None, min(slacks, key=lambda text: slacks[text])
        if capacities:
            rate = interval([capacity["rate"] / self.rate for capacity in capacities])
            room = Interval(rate.value - 1, rate.low - 1, rate.high - 1)
            binding = Counter(capacity["binding"] for capacity in capacities).most_common(1)[0][0]
            breaks_first = STABILITY if binding < 0 else self.criteria[binding].text
        shares = {slo: [answer["attained"].get(slo, 1.0) for answer in answers] for slo in first["attained"]}
        return self._row(
            entrant,
            replicas=replicas,
            spare=self.spare,
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
            mean_cost=self._cost(entrant) if due else None,
            untested=entrant.untested,
            **{name: first[name] for name in ("limited_by", "limiting_setting", "assumed", "latency_ms")},
        )

    def _dues(self, entrant: Entrant) -> tuple[Due, ...]:
        if self.horizon is None or not entrant.later:
            return ()
        dues = []
        lanes = [entrant.lane, *entrant.later]
        for years, growth, lane in zip(self.horizon.dates, self._growths, lanes, strict=True):
            replicas = (lanes[-1] if self.horizon.buy_now else lane).replicas or 0
            charge = self._charge(replicas, entrant)
            dues.append(Due(years=years, rate=self.rate * growth, replicas=replicas, **charge))
        return tuple(dues)

    def _refusal(self, entrant: Entrant, answer: Json) -> str:
        if "error" in answer:
            return str(answer["error"])
        texts = " and ".join(f"'{criterion.text}'" for criterion in self.criteria)
        value, observed, limit = answer["value"], "", self.max_replicas
        if value is not None and len(self.criteria) == 1:
            share = self.criteria[0].share
            observed = f": {1e3 * value:.4g} ms" if share is None else f": {percent(value, share)} %"
            observed += f" on {limit}"
        return f"{entrant.candidate.policy} misses {texts} even on {limit} replicas{observed}"

    # Costs, races and replays

    def _charge(self, replicas: int | None, entrant: Entrant) -> Json:
        """GPUs and their price, with the spare; None: not known."""
        if replicas is None:
            return {"gpus": None, "per_hour": None}
        gpus, price = (replicas + self.spare) * entrant.candidate.gpus, entrant.candidate.price
        return {"gpus": gpus, "per_hour": None if price is None else gpus * price}

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

    def _race(self, starts: Mapping[Entrant, int], limit: int | None = None) -> None:
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
        return Task(
            plan_replays.fleet_replay, entrant, rate, replicas, slower=slower, index=index, whole=entrant.on_whole
        )

    def _answers(self, tasks: Sequence[Task], prefix: str = "") -> list[Json]:
        """DsimError for a refused task."""
        answers = self.replays(tasks)
        for answer in answers:
            if "error" in answer:
                raise DsimError(f"{prefix}{answer['error']}")
        return answers

    def _report(self) -> None:
        self.progress(self.phase, self.replays.num_replays, None)

    def _notes_on_answers(self, best: PlanCandidate) -> list[str]:
        """Of settings that change answers: recommended, or not searched."""
        notes = [
            f"{name}={value} changes the model's answers, and replays do not judge their quality: compare answers first"
            for name, value in changed_fields(best.policy, self.world.allow_code).items()
            if name in best.changing
        ]
        policies: dict[tuple[str, ...], list[str]] = {}
        for candidate in self.originals:
            if candidate.changing and not candidate.searches_changing:
                policies.setdefault(candidate.changing, []).append(name_of(candidate.policy))
        for fields, names in policies.items():
            of_policies = f"{' and '.join(fields)} of {', '.join(dict.fromkeys(names))}"
            notes.append(f"settings that change the answers were not searched: {of_policies} (--change-answers)")
        return notes


def _with(model: Entrant, candidate: PlanCandidate, **changed: Any) -> Entrant:
    """A candidate that is replayed like another one, with a world's changed fields."""
    search, whole = (replace(search, world=replace(search.world, **changed)) for search in (model.search, model.whole))
    return Entrant(candidate, search, whole, model.on_whole)


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
    return [
        entrant for entrant in entrants
        if entrant.candidate.quality.relative in (None, best.get(entrant.candidate.profile.model.name))
    ]  # fmt: skip


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


def _missed(search: CapacitySearch, whole: CapacitySearch, num_settled: int) -> tuple[str, ...]:
    """Notes on the part of the trace that short replays miss."""
    if search.world.arrival != "trace":
        return ()
    total = len(search.world.source())
    short, long = (min(total, len(range(s.num_requests)[judged(s.num_requests)])) for s in (search, whole))
    if short == total:
        return ()
    sample = f"{short:,} of the trace's {total:,} requests, in {PARTS} stretches"
    if search is whole:
        return (f"each replay judges {sample}: a busier stretch between them is missed",)
    settled = "the recommendation and the runner-up were" if num_settled > 1 else "the recommendation was"
    scope = "the whole trace" if long >= total else f"replays that judge {long:,}"
    return (
        f"replays of {search.num_requests:,} requests judge {sample}. They sorted out the other policies; only "
        f"{settled} settled on {scope}, with headroom and risks. Another policy may need fewer or more "
        "replicas than is said here",
    )


def _slack(criterion: Criterion, spread: Spread) -> float:
    """A value's relative distance from its bound; above 0 is good."""
    excess = (spread.value or 0.0) - criterion.bound
    return (excess if criterion.share is not None else -excess) / criterion.bound


def _of_count(share: float, num: int) -> tuple[float, float]:
    """Exact one-sided bounds of a share of `num` (Clopper and Pearson, 1934)."""
    good = round(share * num)
    low = float(betaincinv(good, num - good + 1, 1 - CONFIDENCE)) if good else 0.0
    high = float(betaincinv(good + 1, num - good, CONFIDENCE)) if good < num else 1.0
    return low, high


def _judged(answers: Sequence[Json]) -> int:
    return sum(max(answer["judged"]) for answer in answers)  # with several classes: the largest
