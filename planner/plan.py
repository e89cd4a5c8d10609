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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import betaincinv

from ..engine.allowed_code import AllowedCode
from ..engine.errors import DsimError, PolicyError
from ..engine.policy import PRESETS, name_of, parse, preset_of
from ..files.read import cut
from ..profiler.canvas_law import mean_forwards
from ..profiler.placed import placed
from ..profiler.profile import Profile, as_run_by, load
from ..profiler.uncertainty import common_error
from ..report.table import counted, percent
from ..results.scenario import MAX_REPLICAS, Scenario
from ..traces.prefixes import num_named
from .backend import Pool
from .candidate import beyond_tested, changed_fields, nearest_first, plain_spec, policy_toml
from .capacity import MANY, PARTS, STABILITY, WHOLE, CapacitySearch, check_rate, search_of
from .contents import Json
from .deploy import UNROUTED, deployment_of, engine_of_preset, engine_of_profile, not_served, times_another
from .memo import Memo
from .plan_replays import Posed, Replays, Task
from .planned import MEETS, MISSES, UNSURE, Due, Fleet, PlanCandidate, Planned, Risk, Variant
from .purchase import Horizon, growth_of, peak_of
from .quality import Quality, QualityTable, quality_of
from .race import CONFIDENCE, FIRST, LIMIT, MOST, Entry, Lane, best_of, race, verdict
from .replicate import Criterion, Interval, interval, judged, student, to_judge
from .settings import Tried, changing_answers, halve, settings_to_try
from .space import searchable

BETTER = "jsq"  # the router that is tried in its place
DOUBT = 1.25  # possible error factor of a pilot
MORE_TRAFFIC, SLOWER = 1.3, 1.2
HEADROOM = 4  # replications of the capacity search

Progress = Callable[[str, int, int | None], None]  # phase, replays done, of how many; None: not known


def candidates_of(
    scenario: Scenario,
    policies: Sequence[str],
    profiles: Sequence[Profile],
    prices: Callable[[Profile], float | None],
    *,
    min_quality: float | None = None,
    quality_table: QualityTable | None = None,
    as_given: bool = False,
    change_answers: bool = False,
    research: bool = False,
) -> tuple[list[PlanCandidate], list[Fleet]]:
    """Policies on the profiles that can run them, and policies left out, with reasons.

    POLICY@PROFILE runs on that profile only. Without policies: the shipped presets of a profile's family that a
    released engine has; with `research`, or if none of them can run, also those that no engine has. An engine's
    preset is left out on another engine's profile, unless named and without a profile of its own engine. as_given:
    search no settings. change_answers: also search settings that change answers. DsimError if no candidate remains.
    """
    found: list[PlanCandidate] = []
    out: list[Fleet] = []
    asked = _on_profiles(policies, profiles)
    devices = {profile.device.name for profile, _ in asked}
    engines = {engine_of_profile(profile) for profile, _ in asked}
    longest = scenario.longest()
    shared_prefixes = not as_given and scenario.lengths is None and num_named(scenario.source()) > 0
    for held, own in asked:
        place = "" if len(asked) == 1 else held.name if len(devices) < len(asked) else held.device.name
        for given in own:
            preset = preset_of(name_of(given), given, scenario.allow_code)
            if not (policies or research or preset.engine):
                continue
            spec = plain_spec(given, scenario.allow_code) if given.endswith(".toml") else given
            policy = replace(scenario, policy=given).parsed_policy()
            profile = heaviest_law_first(as_run_by(held, policy))
            check = searchable(profile, scenario.workload, longest)
            quality = quality_of(policy, profile.model.name, quality_table)
            answers = {} if as_given else changing_answers(given, profile, scenario.workload, scenario.allow_code)
            candidate = PlanCandidate(
                spec,
                profile,
                place,
                quality,
                prices(profile),
                changing=tuple(answers),
                searches_changing=change_answers,
                is_research=not (policies or preset.engine),
            )
            searched = {} if as_given else {
                one: quality_of(parse(one, scenario.allow_code), profile.model.name, quality_table)
                for one in settings_to_try(
                    given, profile, check, scenario.allow_code, shared_prefixes, answers if change_answers else {}
                )
            }  # fmt: skip
            settings = {one: own for one, own in searched.items() if _keeps(own, min_quality)}
            elsewhere = times_another(profile, preset)
            if elsewhere and engine_of_preset(preset) in engines:
                continue
            reason = not_served(preset, profile)
            if not reason and elsewhere and not policies:
                reason = f"{profile.name} has the step times of {cut(profile.implementation)}"
            refused = ""
            try:
                check(policy)
            except DsimError as error:
                refused = str(error).removeprefix(f"{cut(policy.name)}: ")
            if not reason and not searched:
                reason = refused
            if not reason and min_quality is not None and not (settings if searched else _keeps(quality, min_quality)):
                said = f"unknown: {quality.notes[0]}" if quality.relative is None else str(quality)
                reason = f"quality {said}, expected at least {100 * min_quality:g} %"
            if reason:
                out.append(replace(_row(candidate), dropped=reason))
            else:
                if len(settings) > 1 or refused:
                    specs, qualities = tuple(settings), tuple(settings.values())
                    candidate = replace(
                        candidate, policy=specs[0], settings=specs, qualities=qualities, given=spec, refused=refused
                    )
                found.append(candidate)
    if not policies and not research and not found:
        found, out = candidates_of(
            scenario, policies, profiles, prices, min_quality=min_quality, quality_table=quality_table,
            as_given=as_given, change_answers=change_answers, research=True,
        )  # fmt: skip
    if all(candidate.is_research for candidate in found):
        found = [replace(candidate, is_research=False) for candidate in found]
    if not found:
        said = "; ".join(dict.fromkeys(f"{_named(row)}: {row.dropped}" for row in out))
        raise DsimError(said or "no policy and no profile is given, expected one of each")
    return found, out


def heaviest_law_first(profile: Profile) -> Profile:
    """The profile with its counted laws of canvases first, by forwards; the first is the default."""
    if len([law for law in profile.canvas_laws if law.engine]) < 2:
        return profile
    laws = sorted(profile.canvas_laws, key=lambda law: -mean_forwards(law) if law.engine else 0.0)
    return replace(profile, canvas_laws=tuple(laws))


def _keeps(quality: Quality, least: float | None) -> bool:
    return least is None or (quality.relative or 0.0) >= least


def _named(row: Fleet) -> str:
    return f"{row.policy} on {row.place}" if row.place else row.policy


def _on_profiles(policies: Sequence[str], profiles: Sequence[Profile]) -> list[tuple[Profile, list[str]]]:
    """Policies to try on each profile, including profiles named by policies."""
    asked: dict[str, tuple[Profile, list[str]]] = {}
    for profile in profiles:
        if profile.name in asked:
            raise DsimError(f"two profiles are named {profile.name}, expected a name of its own for each")
        asked[profile.name] = profile, [] if policies else _presets_of(profile)
    for policy in policies:
        spec, own = placed(policy)
        homes = list(profiles) if own is None else [load(own)]
        for profile in homes:
            _, specs = asked.setdefault(profile.name, (profile, []))
            if spec in specs:
                raise PolicyError(f"policy {spec} is given twice on {profile.name}, expected once")
            specs.append(spec)
    return [(profile, specs) for profile, specs in asked.values() if specs]


def _presets_of(profile: Profile) -> list[str]:
    return [name for name, preset in PRESETS.items() if preset.policy.family == profile.family]


def plan(
    scenario: Scenario,
    candidates: Sequence[PlanCandidate],
    left_out: Sequence[Fleet] = (),
    *,
    rate: float | None = None,
    max_replicas: int = 64,
    spare: int = 0,
    horizon: Horizon | None = None,
    today: str | None = None,
    attainment: float = 0.99,
    num_requests: int | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    memo: Memo | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Rank candidates by the cost of the smallest fleet that meets the scenario's `slos` at `rate` (req/s).

    rate: by default the trace's. A share `attainment` of arrivals must meet SLOs without a statistic. `spare` standby
    replicas cost, but serve nothing. With a `horizon` the cost is the mean over it. `today`: what runs now, as
    SPEC,replicas=N. The scenario's policy, profile and replicas are unused. `jobs`, `ray` (see `Pool`)
    and `memo` change no result. DsimError if no candidate meets the SLOs.
    """
    if not 0 <= spare <= MAX_REPLICAS:
        raise DsimError(f"spare is {spare}, expected 0 to {MAX_REPLICAS} replicas")
    scenario.routing()
    for candidate in candidates:
        posed(scenario, candidate).loaded_profile()
    rate = own_rate(scenario) if rate is None else rate
    check_rate(rate, max_replicas)
    groups, candidates = _spread_out(candidates)
    searches = [search_of(posed(scenario, c), 0.02, attainment, num_requests) for c in candidates]
    whole = [whole_search(search, attainment) for search in searches]
    with Pool(jobs, ray) as pool:
        run = _Run(
            candidates, groups, searches, whole, rate, max_replicas, spare, horizon, pool, memo or Memo(), progress
        )  # fmt: skip
        run.choose_settings()
        lanes, dropped = run.settle([i for i in run.chosen if not candidates[i].is_research])
        order, tied, failed = run.decide(lanes)
        order = run.as_given_if_enough(order)
        # With growth, of each GPU's best: what a request a second costs at the limit.
        devices = {candidates[lane.candidate].profile.device.name: lane for lane in reversed(order)}
        room = run.headroom(order[:1] if horizon is None else [lane for lane in order if lane in devices.values()])
        ranking = [run.fleet(lane, room.get(lane.candidate)) for lane in order]
        spread = max(float(np.std(lane.settled, ddof=1)) for lane in order[:2])
        now = None if today is None else run.as_today(order[0], *fleet_of_today(today))
        laws = run.under_laws(order[0], spread)
        research = run.research([i for i in run.chosen if candidates[i].is_research])
        routed = run.with_router(order[0], spread)
        risks = run.risks(order[:2], spread)
    search, best = searches[0], candidates[order[0].candidate]
    criteria = search.criteria
    recommended = ranking[0]
    assert recommended.replicas is not None
    bought = (recommended.gpus or 0) // recommended.gpus_per_replica
    longest = scenario.longest()
    deployment = deployment_of(
        best.policy, best.profile, bought, router=scenario.router, allow_code=scenario.allow_code, spare=spare,
        untested=recommended.untested, context=int((longest.input_length + longest.limit).max()),
    )  # fmt: skip
    return Planned(
        rate=rate,
        ranking=tuple(ranking),
        left_out=(*failed, *dropped, *left_out),
        tied=tuple(str(candidates[lane.candidate]) for lane in tied),
        risks=tuple(risks),
        criteria=tuple(c.text for c in criteria),
        bounds={c.text: c.bound for c in criteria},
        share_criteria=tuple(c.text for c in criteria if c.share is not None),
        plan_toml=(f"# The SLOs are met without the spare: {spare} of the replicas.\n" if spare else "")
        + policy_toml(best.policy, bought, scenario.allow_code)
        + ("" if deployment is None else deployment.toml()),
        priced=all(c.price is not None for c in candidates),
        num_replays=run.replays.num_replays,
        num_requests=search.num_requests,
        block=search.block,
        notes=(
            *_missed(search, whole[0], min(2, len(order))),
            *_of_answers(candidates, best, scenario.allow_code),
            *_of_gpus([candidates[i] for i in (*(lane.candidate for lane in order), *run.chosen)], search),
            *dict.fromkeys(f"{one.given} cannot run as it is: {one.refused}" for one in candidates if one.refused),
        ),
        peak=peak_of(scenario.source(), rate, recommended) if scenario.arrival == "trace" else None,
        growth=None if horizon is None else growth_of(horizon, recommended),
        routed=routed,
        laws=laws,
        today=now,
        research=tuple(research),
        deployment=deployment,
    )


def _spread_out(candidates: Sequence[PlanCandidate]) -> tuple[list[list[int]], list[PlanCandidate]]:
    """Indices of each candidate's settings, and the settings as candidates."""
    groups: list[list[int]] = []
    found: list[PlanCandidate] = []
    for one in candidates:
        own = [
            replace(one, policy=spec, quality=quality, settings=(), qualities=())
            for spec, quality in zip(one.settings, one.qualities, strict=True)
        ] or [one]
        groups.append(list(range(len(found), len(found) + len(own))))
        found += own
    return groups, found


def whole_search(search: CapacitySearch, attainment: float) -> CapacitySearch:
    """The search with replays that judge the whole trace, up to WHOLE requests."""
    scenario = search.scenario
    if scenario.arrival != "trace" and scenario.lengths is not None:
        return search
    num = min(to_judge(len(scenario.source())), WHOLE if scenario.arrival == "trace" else MANY)
    return search if num <= search.num_requests else search_of(scenario, 0.02, attainment, num)


def _missed(search: CapacitySearch, whole: CapacitySearch, num_settled: int) -> tuple[str, ...]:
    """Notes on the part of the trace that short replays miss."""
    if search.scenario.arrival != "trace":
        return ()
    of = len(search.scenario.source())
    seen, most = (min(of, len(range(s.num_requests)[judged(s.num_requests)])) for s in (search, whole))
    if seen == of:
        return ()
    part = f"{seen:,} of the trace's {of:,} requests, in {PARTS} stretches"
    if search is whole:
        return (f"each replay judges {part}: a busier stretch between them is missed",)
    on = "the whole trace" if most >= of else f"replays that judge {most:,}"
    which = "the recommendation and the runner-up were" if num_settled > 1 else "the recommendation was"
    return (
        f"replays of {search.num_requests:,} requests judge {part}. They sorted out the other policies; only {which} "
        f"settled on {on}, with headroom and risks. Another policy may need fewer or more replicas than is said here",
    )


def _of_answers(candidates: Sequence[PlanCandidate], best: PlanCandidate, allow_code: AllowedCode) -> list[str]:
    """Notes on settings that change answers: recommended, or not searched."""
    notes = [
        f"{name}={value} changes the model's answers, and replays do not judge their quality: compare answers first"
        for name, value in changed_fields(best.policy, allow_code).items()
        if name in best.changing
    ]
    policies: dict[tuple[str, ...], list[str]] = {}
    for one in candidates:
        if one.changing and not one.searches_changing:
            policies.setdefault(one.changing, []).append(name_of(one.policy))
    notes += [
        f"settings that change the answers were not searched: {' and '.join(fields)} of "
        f"{', '.join(dict.fromkeys(names))} (--change-answers)"
        for fields, names in policies.items()
    ]
    return notes


def _of_gpus(candidates: Sequence[PlanCandidate], search: CapacitySearch) -> list[str]:
    """A note on the errors of a comparison of GPUs; candidates: the best first."""
    profiles: dict[str, Profile] = {}
    for one in candidates:
        profiles.setdefault(one.profile.device.name, one.profile)
    return [common_error([*profiles.values()], search.scenario.setting().drawn)] if len(profiles) > 1 else []


def own_rate(scenario: Scenario) -> float:
    """req/s; DsimError if the trace has no times."""
    source = scenario.source()
    if not (len(source) > 1 and source.duration > 0):
        raise DsimError(f"{source.name} has no arrival times, expected --rate R")
    return source.rate


def posed_fleets(scenario: Scenario, candidates: Sequence[PlanCandidate], fleets: Sequence[Fleet]) -> list[Posed]:
    on = {c.profile.name: c for c in candidates}
    return [posed(scenario, replace(on[f.profile], policy=f.policy), f.replicas or 1) for f in fleets]


def posed(scenario: Scenario, candidate: PlanCandidate, replicas: int = 1) -> Posed:
    plain = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    own = {"policy": candidate.policy, "replicas": replicas, "given_profile": candidate.profile}
    return Posed(**{**plain, **own})


class _NoFleetError(DsimError):
    """No fleet meets the SLOs."""


class _Run:
    def __init__(
        self,
        candidates: list[PlanCandidate],
        groups: Sequence[Sequence[int]],
        searches: list[CapacitySearch],
        whole: list[CapacitySearch],
        rate: float,
        most: int,
        spare: int,
        horizon: Horizon | None,
        pool: Pool,
        memo: Memo,
        progress: Progress | None,
    ) -> None:
        self.candidates, self.searches, self.rate, self.most, self.spare = candidates, searches, rate, most, spare
        self.horizon = horizon
        self.due: dict[int, list[Lane]] = {}  # by candidate, after today
        self.replays = Replays(searches, whole, pool, memo, self._tell)
        self.whole_searches = whole
        self.shortened = searches[0] is not whole[0]
        self.whole: set[int] = set()  # candidates that replay the whole trace now
        self._groups = groups
        code = searches[0].scenario.allow_code
        self._num_changes = [len(changed_fields(one.policy, code)) for one in candidates]
        self.untested = {i for i, one in enumerate(candidates) if beyond_tested(one.policy, code)}
        self.chosen = [group[0] for group in groups]  # each policy's setting
        self.tried: dict[int, Tried] = {}  # by the chosen setting
        self._progress = progress
        self._doing = "pilot"

    @property
    def _changes(self) -> tuple[tuple[str, float, float], ...]:
        """Name, rate, and slow-down of the profile."""
        return (
            (f"{MORE_TRAFFIC - 1:.0%} more traffic", self.rate * MORE_TRAFFIC, 1.0),
            (f"a profile {SLOWER - 1:.0%} slower", self.rate, SLOWER),
        )

    def choose_settings(self) -> None:
        """Choose each policy's best setting."""
        self._doing = "settings"
        halvings = {k: halve(group, self.untested) for k, group in enumerate(self._groups) if len(group) > 1}
        asked = {k: next(halving) for k, halving in halvings.items()}
        while asked:  # all policies at once, to fill the pool
            tasks = [
                Task("try", i, self.rate, 1, index=rung, start=start)
                for settings, rung, start in asked.values() for i in settings
            ]  # fmt: skip
            scores = iter([float(found.get("rate", 0.0)) for found in self.replays(tasks)])
            for k, (settings, _, _) in list(asked.items()):
                try:
                    asked[k] = halvings[k].send([next(scores) for _ in settings])
                except StopIteration as done:
                    del asked[k]
                    self._choose(k, *done.value)

    def _choose(self, k: int, best: int, rates: Mapping[int, float], equal: int) -> None:
        """rates: req/s that a replica serves, by setting."""
        given = self._groups[k][0]
        self.chosen[k] = best
        first, rate = self.candidates[given], rates[given]
        spec, rate = (first.given, 0.0) if first.refused else (first.policy, rate)
        self.tried[best] = Tried(len(self._groups[k]), spec, rate, self.candidates[best].policy, rates[best], equal)

    def research(self, chosen: Sequence[int]) -> list[Fleet]:
        """The fleets of schedulers that no engine has, the cheapest first, as far as short replays tell."""
        if not chosen:
            return []
        try:
            lanes, _ = self.settle(chosen)
        except _NoFleetError:
            return []
        return [self.fleet(lane, None) for lane in self.rank(lanes)[0]]

    def settle(self, chosen: Sequence[int]) -> tuple[list[Lane], list[Fleet]]:
        """The lanes of the race, and the dropped rows."""
        self._doing = "pilot"
        tasks = (Task("pilot", i, self.rate, self.most) for i in chosen)
        pilots = dict(zip(chosen, self.replays(tasks), strict=True))
        cannot = {i: self._refusal(i, p) for i, p in pilots.items() if p.get("replicas") is None}
        if len(cannot) == len(pilots):
            said = f"no fleet of up to {self.most} replicas meets the SLOs at {self.rate:g} req/s"
            raise _NoFleetError(f"{said}; {next(iter(cannot.values()))}")
        guesses = {i: int(p["replicas"]) for i, p in pilots.items() if i not in cannot}
        costs = {i: self.candidates[i].weight * (n + self.spare) for i, n in self._over_time(guesses).items()}
        second = sorted(costs.values())[:2][-1]
        # Costs more than the two cheapest even if the pilot misjudged all three by DOUBT.
        expensive = {i for i, cost in costs.items() if cost / DOUBT > second * DOUBT}
        running = [i for i in guesses if i not in expensive]
        self._doing = "racing"
        lanes = self._race({i: guesses[i] for i in running})
        rows: list[Fleet] = []
        for i in chosen:
            if i in cannot:
                rows.append(replace(self._row(i), dropped=cannot[i]))
            elif i in expensive:
                reason = f"about {counted(guesses[i], 'replica')} by the pilot: costs far more than the two cheapest"
                rows.append(replace(self._row(i), about=guesses[i], dropped=reason))
        for lane in lanes:
            if lane.replicas is None:
                what = "more than" if lane.dropped else "even"
                reason = f"{what} {counted(lane.low, 'replica')}: " + (
                    "costs more than two others" if lane.dropped else "not enough"
                )
                rows.append(replace(self._row(lane.candidate), least=lane.low + 1, dropped=reason))
        return self._settled(lanes), rows

    def decide(self, lanes: Sequence[Lane]) -> tuple[list[Lane], list[Lane], list[Fleet]]:
        """`rank`, with the first two settled on the whole trace; also the rows that failed there."""
        order, tied = self.rank(lanes)
        if not self.shortened:
            return order, tied, []
        self._doing = "racing on the whole trace"
        best: list[Lane] = []
        failed: list[Fleet] = []
        while order and (len(best) < 2 or self._cost(order[0]) < max(map(self._cost, best))):
            take, order = order[: max(1, 2 - len(best))], order[max(1, 2 - len(best)) :]
            self.whole |= {lane.candidate for lane in take}
            for lane in self._race({x.candidate: x.high or 1 for x in take}):
                if lane.replicas is None:
                    reason = f"even {counted(lane.low, 'replica')}: not enough on the whole trace"
                    failed.append(replace(self._row(lane.candidate), least=lane.low + 1, dropped=reason))
                else:
                    best.append(lane)
        first, tied = self.rank(self._settled(best))
        return first + order, tied, failed

    def as_given_if_enough(self, order: list[Lane]) -> list[Lane]:
        """The best policy as it was given, where that costs no more and the settings found do not surely gain.

        Where they are beyond the engine's tested range, costing no more is enough.
        """
        best = order[0]
        given = next(group[0] for group in self._groups if best.candidate in group)
        if given == best.candidate:
            return order
        if best.candidate in self.whole:
            self.whole.add(given)
        [plain] = self._race({given: best.high or 1}, best.high if self.horizon is None else None)
        if plain.replicas is None or self._cost(plain) > self._cost(best):
            return order
        first = plain if best.candidate in self.untested else self.rank([plain, best])[0][0]
        self.tried[given] = self.tried[best.candidate]
        return [first, *order[1:]]

    def _settled(self, lanes: Sequence[Lane]) -> list[Lane]:
        settled = [lane for lane in lanes if lane.replicas is not None]
        if not settled:
            raise _NoFleetError(f"no fleet of up to {self.most} replicas surely meets the SLOs at {self.rate:g} req/s")
        return settled

    def rank(self, lanes: Sequence[Lane]) -> tuple[list[Lane], list[Lane]]:
        """Lanes by cost, known quality and distance from the SLOs' bounds; and the lanes tied with the best."""
        cheapest = min(self._cost(lane) for lane in lanes)
        left = self._best_answers([lane for lane in lanes if math.isclose(self._cost(lane), cheapest)])
        while len(left) > 1:
            left = [left[i] for i in best_of([lane.settled for lane in left])]
            n = min(len(lane.settled) for lane in left)
            if len(left) == 1 or n >= MOST:
                break
            short = [lane for lane in left if len(lane.settled) == n]
            tasks = [self._replay(lane.candidate, self.rate, lane.high or 0, 1.0, n) for lane in short]
            for lane, found in zip(short, self.replays(tasks), strict=True):
                lane.settled.append(float(found["severity"]))
        equals = [left[i] for i in best_of([lane.settled for lane in left])]
        best = nearest_first(
            equals, lambda lane: self._num_changes[lane.candidate], lambda lane: float(np.mean(lane.settled))
        )[0]
        order = sorted(
            lanes,
            key=lambda lane: (self._cost(lane), lane is not best, lane not in left, float(np.mean(lane.settled))),
        )
        return order, [lane for lane in left if lane is not order[0]]

    def _best_answers(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Lanes whose model is not known to answer better in another one."""
        of = [self.candidates[lane.candidate] for lane in lanes]
        known = [(lane, one.profile.model.name, one.quality.relative) for lane, one in zip(lanes, of, strict=True)]
        best = dict(sorted((model, quality) for _, model, quality in known if quality is not None))  # the last counts
        return [lane for lane, model, quality in known if quality in (None, best.get(model))]

    def with_router(self, lane: Lane, spread: float) -> Variant | None:
        """The best fleet behind a router that knows the queues; None if another router is named, or for one replica."""
        if self.searches[lane.candidate].scenario.router != UNROUTED or lane.replicas in (None, 1):
            return None
        self._doing = "another router"
        replicas = min(lane.replicas, self._needed(lane, spread, router=BETTER) or lane.replicas)
        return Variant(BETTER, replicas, *self._charge(replicas, self.candidates[lane.candidate]))

    def under_laws(self, lane: Lane, spread: float) -> tuple[Variant, ...]:
        """What the best policy needs under each counted law of canvases; empty if one is given."""
        scenario, best = self.searches[lane.candidate].scenario, self.candidates[lane.candidate]
        laws = [law for law in best.profile.canvas_laws if law.engine]
        if best.profile.family != "canvas" or scenario.workload or scenario.yields or len(laws) < 2:
            return ()
        self._doing = "another law"
        found = []
        for law in laws:
            is_default = law is best.profile.canvas_laws[0]
            needed = lane.replicas if is_default else self._needed(lane, spread, workload=law.workload)
            gpus, hourly = (None, None) if needed is None else self._charge(needed, best)
            found.append(Variant(law.workload, needed, gpus, hourly, mean_forwards(law), law.source))
        return tuple(found)

    def _needed(self, lane: Lane, spread: float, **changed: Any) -> int | None:
        """Replicas that a lane's policy needs where fields of its scenario are others; None: more than allowed."""
        candidate = self._add(self.candidates[lane.candidate], lane, **changed)
        [other] = self._raced([(candidate, self.rate, 1.0)], [lane.replicas or 1], spread=spread)
        return other.replicas

    def as_today(self, lane: Lane, policy: str, replicas: int) -> Fleet:
        """What runs today, on the recommended GPUs and under the plan's traffic."""
        self._doing = "today's fleet"
        best = self.candidates[lane.candidate]
        at = self._add(replace(best, policy=policy, settings=()), lane, policy=policy)
        now = Lane(candidate=at, price=best.weight, most=replicas, at=replicas, low=replicas - 1, high=replicas)
        found = self.replays([self._replay(at, self.rate, replicas, 1.0, index) for index in range(FIRST)])
        for one in found:
            if "error" in one:
                raise DsimError(f"today is {policy}: {one['error']}")
        now.severities[replicas] = [float(one["severity"]) for one in found]
        return self.fleet(now, None)

    def _add(self, candidate: PlanCandidate, like: Lane, **changed: Any) -> int:
        """Add a candidate that is replayed like a lane's, with a scenario's changed fields; returns its index."""
        self.candidates.append(candidate)
        for searches in (self.searches, self.whole_searches):
            search = searches[like.candidate]
            searches.append(replace(search, scenario=replace(search.scenario, **changed)))
        at = len(self.candidates) - 1
        if like.candidate in self.whole:
            self.whole.add(at)
        return at

    def headroom(self, lanes: Sequence[Lane]) -> dict[int, list[Json]]:
        """By candidate: capacities in HEADROOM replications, each with the criterion that breaks above it."""
        self._doing = "headroom"
        # The first rates are the others' starts; the risks fill the pool meanwhile.
        risks = [
            self._replay(lane.candidate, rate, lane.replicas or 1, slower, 0)
            for lane in lanes for _, rate, slower in self._changes
        ]  # fmt: skip
        firsts = self._own([(lane, 0, None) for lane in lanes], risks)
        later = [
            (lane, i, first["rate"]) for lane, first in zip(lanes, firsts, strict=True) for i in range(1, HEADROOM)
        ]
        found: dict[int, list[Json]] = {lane.candidate: [first] for lane, first in zip(lanes, firsts, strict=True)}
        for (lane, _, _), one in zip(later, self._own(later), strict=True):
            found[lane.candidate].append(one)
        return found

    def _own(self, asked: Sequence[tuple[Lane, int, float | None]], others: Sequence[Task] = ()) -> list[Json]:
        """Capacities by replication and start rate. others: tasks to run meanwhile."""
        tasks = [
            Task(
                "own", lane.candidate, self.rate, lane.high or 0, 1.0, index,
                lane.settled[index] if index < len(lane.settled) else None, start, lane.candidate in self.whole,
            )
            for lane, index, start in asked
        ]  # fmt: skip
        found = self.replays([*tasks, *others])[: len(tasks)]
        for one in found:
            if "error" in one:
                raise DsimError(one["error"])
        return found

    def risks(self, best: Sequence[Lane], spread: float) -> list[Risk]:
        """More traffic, a lost replica and a slower profile, for the best two.

        spread: of severities between replications.
        """
        self._doing = "risks"
        mine = best[0]
        assert mine.replicas is not None
        worlds = [(rate, slower) for _, rate, slower in self._changes]
        after = self._race_in([(mine, *world) for world in worlds], spread)
        costs = [math.inf if lane.replicas is None else lane.cost(lane.replicas or 0) for lane in after]
        # No change makes the runner-up cheaper, so it is replayed only where the recommendation then costs more.
        asked = [i for i, cost in enumerate(costs) for other in best[1:] if cost > other.cost(other.replicas or 0)]
        rivals = dict(zip(asked, self._race_in([(best[1], *worlds[i]) for i in asked], spread), strict=True))
        found: list[Risk] = []
        for i, (change, rate, slower) in enumerate(self._changes):
            then = [lane for lane in (after[i], rivals.get(i)) if lane is not None and lane.replicas is not None]
            cheapest = min(then, key=lambda lane: lane.cost(lane.replicas or 0), default=None)
            said = "" if cheapest is None else str(self.candidates[cheapest.candidate])
            found.append(self._risk(change, after[i], mine.replicas, rate, slower, spread, after[i].replicas, said))
        same = str(self.candidates[mine.candidate])
        left = mine.replicas - (0 if self.spare else 1)
        lost = self._risk("a replica lost", mine, left, self.rate, 1.0, spread, mine.replicas, same)
        if lost.verdict != MEETS:
            lost = replace(lost, needs=None if mine.replicas == self.most else mine.replicas + 1)
        return [found[0], self._charged(lost, mine.candidate), found[1]]

    def fleet(self, lane: Lane, own: Sequence[Json] | None) -> Fleet:
        """own: the fleet's capacities, where they were searched."""
        candidate, replicas = self.candidates[lane.candidate], lane.replicas
        assert replicas is not None
        due = tuple(self._dues(lane))
        gpus, hourly = self._charge(due[0].replicas if due else replicas, candidate)
        seen = self._seen(lane, replicas, self.rate)
        scenario, criteria = self.searches[lane.candidate].scenario, self.searches[lane.candidate].criteria
        room = None
        values = self._values(lane, seen)
        breaks = min(criteria, key=lambda c: _slack(c, values[c.text].value) if c.text in values else math.inf).text
        if own is not None:
            rate = interval([one["rate"] / self.rate for one in own], CONFIDENCE)
            room = Interval(rate.value - 1, rate.low - 1, rate.high - 1)
            binding = Counter(one["binding"] for one in own).most_common(1)[0][0]
            breaks = STABILITY if binding < 0 else criteria[binding].text
        return replace(
            self._row(lane.candidate),
            replicas=replicas,
            spare=self.spare,
            gpus=gpus,
            per_hour=hourly,
            per_million_tokens=None if hourly is None else scenario.per_million_tokens(hourly, self.rate),
            values=values,
            attained={slo: sum(f["attained"].get(slo, 1.0) for f in seen) / len(seen) for slo in seen[0]["attained"]},
            replications=len(seen),
            judged=_judged(seen),
            headroom=room,
            breaks_first=breaks,
            limited_by=seen[0]["limited_by"],
            limiting_setting=seen[0]["limiting_setting"],
            assumed=seen[0]["assumed"],
            doubted=tuple(seen[0]["doubted"]),
            due=due,
            mean_cost=self._cost(lane) if self.horizon and lane.candidate in self.due else None,
            untested=beyond_tested(candidate.policy, scenario.allow_code),
            latency_ms=seen[0]["latency_ms"],
        )

    def _charge(self, replicas: int, candidate: PlanCandidate) -> tuple[int, float | None]:
        gpus = (replicas + self.spare) * candidate.gpus
        return gpus, None if candidate.price is None else gpus * candidate.price

    def _race(self, starts: Mapping[int, int], most: int | None = None) -> list[Lane]:
        """A race at the plan's rate, and at those of the horizon. starts: first replicas, by candidate."""
        growths = self._growths
        worlds = [(i, self.rate * more, 1.0) for i in starts for more in growths]
        firsts = [math.ceil(n * more) for n in starts.values() for more in growths]
        lanes = self._raced(worlds, firsts, drop=self.horizon is None, most=most)
        today = lanes[:: len(growths)]
        for k, lane in enumerate(today):
            due = lanes[k * len(growths) + 1 : (k + 1) * len(growths)]
            if any(later.replicas is None for later in due):
                lane.low, lane.high = self.most, None
            self.due[lane.candidate] = due
        return today

    @property
    def _growths(self) -> list[float]:
        """Factors of the rate: today, and at each date of the horizon."""
        return [1.0] if self.horizon is None else [self.horizon.yearly**years for years in self.horizon.dates]

    def _over_time(self, replicas: Mapping[int, int]) -> dict[int, float]:
        """The replicas paid on average, if those needed grow like the traffic."""
        if self.horizon is None:
            return {i: float(n) for i, n in replicas.items()}
        return {i: self.horizon.mean([math.ceil(n * more) for more in self._growths]) for i, n in replicas.items()}

    def _race_in(self, worlds: Sequence[tuple[Lane, float, float]], spread: float) -> list[Lane]:
        """The fewest replicas at another rate and slow-down.

        spread: of severities between replications.
        """
        own = [(lane.candidate, rate, slower) for lane, rate, slower in worlds]
        starts = [lane.replicas or 1 for lane, _, _ in worlds]
        return self._raced(own, starts, spread=spread)

    def _raced(
        self, worlds: Sequence[tuple[int, float, float]], starts: Sequence[int], *,
        drop: bool = False, spread: float | None = None, most: int | None = None,
    ) -> list[Lane]:  # fmt: skip
        def severities(entries: Sequence[Entry]) -> list[float]:
            tasks = []
            for e in entries:
                candidate, rate, slower = worlds[e.candidate]
                tasks.append(self._replay(candidate, rate, e.replicas, slower, e.index))
            return [LIMIT if "error" in found else float(found["severity"]) for found in self.replays(tasks)]

        prices = [self.candidates[i].weight for i, _, _ in worlds]
        lanes = race(prices, starts, most or self.most, severities, drop=drop, spread=spread, spare=self.spare)
        for lane in lanes:
            lane.candidate = worlds[lane.candidate][0]
        return lanes

    def _seen(self, lane: Lane, replicas: int, rate: float, slower: float = 1.0) -> list[Json]:
        """The race's replays of a fleet."""
        many = range(len(lane.severities[replicas]))
        found = self.replays([self._replay(lane.candidate, rate, replicas, slower, index) for index in many])
        return [one for one in found if "error" not in one]

    def _replay(self, candidate: int, rate: float, replicas: int, slower: float, index: int) -> Task:
        return Task("replay", candidate, rate, replicas, slower, index, whole=candidate in self.whole)

    def _values(self, lane: Lane, seen: Sequence[Json]) -> dict[str, Interval]:
        criteria = self.searches[lane.candidate].criteria
        out = {}
        for k, criterion in enumerate(criteria):
            known = np.array([v for found in seen if (v := found["values"][k]) is not None])
            if not len(known):
                continue
            mean, half = float(known.mean()), student(known, CONFIDENCE)
            ends = (mean - half, mean + half)
            if len(known) < 2:
                ends = (math.nan, math.nan)
            elif criterion.share is not None:
                if half == 0:  # equal replications prove nothing about the next one
                    ends = _of_count(mean, sum(found["judged"][k] for found in seen))
                ends = (max(0.0, ends[0]), min(1.0, ends[1]))
            out[criterion.text] = Interval(mean, *ends)
        return out

    def _risk(
        self,
        change: str,
        lane: Lane,
        replicas: int,
        rate: float,
        slower: float,
        spread: float,
        needs: int | None,
        best: str,
    ) -> Risk:
        if not replicas:
            return Risk(change, {}, 0, MISSES, False, needs, None, best)
        seen = self._seen(lane, replicas, rate, slower)
        values = self._values(lane, seen)
        criteria = self.searches[lane.candidate].criteria
        meet = all(_slack(c, values[c.text].value) >= 0 for c in criteria if c.text in values)
        severities = lane.severities[replicas]
        sure = verdict(severities, len(severities) + 1, spread)
        # The mean of logarithms and the printed mean may lie on different sides of a bound.
        said = UNSURE if sure is None else MEETS if sure and meet else MISSES if not sure else UNSURE
        stable = 2 * sum(found["stable"] for found in seen) > len(seen)
        risk = Risk(change, values, _judged(seen), said, stable, needs, None, best)
        return self._charged(risk, lane.candidate)

    def _charged(self, risk: Risk, candidate: int) -> Risk:
        who = self.candidates[candidate]
        return replace(risk, per_hour=None if risk.needs is None else self._charge(risk.needs, who)[1])

    def _refusal(self, candidate: int, pilot: Json) -> str:
        if "error" in pilot:
            return str(pilot["error"])
        criteria = self.searches[candidate].criteria
        texts = " and ".join(f"'{c.text}'" for c in criteria)
        value = pilot["value"]
        said = ""
        if value is not None and len(criteria) == 1:
            shown = (
                f"{percent(value, criteria[0].share)} %" if criteria[0].share is not None else f"{1e3 * value:.4g} ms"
            )
            said = f": {shown} on {self.most}"
        return f"{self.candidates[candidate].policy} misses {texts} even on {self.most} replicas{said}"

    def _row(self, candidate: int) -> Fleet:
        return replace(_row(self.candidates[candidate]), tried=self.tried.get(candidate))

    def _cost(self, lane: Lane) -> float:
        """An hour (without prices: GPUs), on average over the horizon."""
        replicas = float(lane.replicas or 0)
        if self.horizon is not None:
            replicas = self.horizon.mean([later.replicas or 0 for later in (lane, *self.due[lane.candidate])])
        return self.candidates[lane.candidate].weight * (replicas + self.spare)

    def _dues(self, lane: Lane) -> Iterator[Due]:
        if self.horizon is not None and lane.candidate in self.due:
            lanes = (lane, *self.due[lane.candidate])
            for years, more, later in zip(self.horizon.dates, self._growths, lanes, strict=True):
                replicas = (lanes[-1] if self.horizon.buy_now else later).replicas or 0
                yield Due(years, self.rate * more, replicas, *self._charge(replicas, self.candidates[lane.candidate]))

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._doing, self.replays.num_replays, None)


def fleet_of_today(text: str) -> tuple[str, int]:
    """SPEC and replicas of `SPEC,replicas=N`."""
    *items, last = text.split(",")
    name, _, number = last.partition("=")
    if not items or name != "replicas" or not (number.isdigit() and 1 <= int(number) <= MAX_REPLICAS):
        raise DsimError(f"today is {cut(text)}, expected SPEC,replicas=N such as vllm-diffusion:4,replicas=3")
    return ",".join(items), int(number)


def _slack(criterion: Criterion, value: float) -> float:
    """A value's relative distance from its bound; above 0 is good."""
    slack = value - criterion.bound if criterion.share is not None else criterion.bound - value
    return slack / criterion.bound


def _of_count(share: float, num: int) -> tuple[float, float]:
    """Exact one-sided bounds of a share of `num` (Clopper and Pearson, 1934)."""
    good = round(share * num)
    low = float(betaincinv(good, num - good + 1, 1 - CONFIDENCE)) if good else 0.0
    high = float(betaincinv(good + 1, num - good, CONFIDENCE)) if good < num else 1.0
    return low, high


def _judged(seen: Sequence[Json]) -> int:
    return sum(max(found["judged"]) for found in seen)  # with several classes: the largest


def _row(candidate: PlanCandidate) -> Fleet:
    profile = candidate.profile
    return Fleet(
        policy=candidate.policy, place=candidate.place, profile=profile.name, device=profile.device.name,
        model=profile.model.name, implementation=profile.implementation, estimated=profile.is_estimate,
        quality=candidate.quality,
        gpus_per_replica=candidate.gpus, price=candidate.price,
    )  # fmt: skip
