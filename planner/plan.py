"""One answer to the real question: which policy, on which GPUs, how many of them, at what cost, and how sure that is.

1. A pilot of short replays says about how many replicas each candidate (a policy on a profile) needs; one that is
   hopelessly dear is dropped there.
2. A race (race.py) finds the fewest replicas of each of the others, replication by replication.
3. Fleets that cost the same are told apart by how far they are from the SLOs' bounds at that rate, paired by
   replication, and only as long as that is undecided.
4. Each fleet's own capacity, by bisection over the rate, is its headroom.
5. The best two are asked the same at more traffic and on a slower profile.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .. import __version__
from ..engine.errors import DsimError, PolicyError
from ..engine.policy import PRESETS
from ..profiler.placed import placed
from ..profiler.profile import Profile, load
from ..report.metrics import no_nan
from ..report.page import Page
from ..report.shown import Showable
from .backend import Pool
from .capacity import STABILITY, CapacitySearch, search_of
from .deploy import flags_of
from .ledger import Json, Ledger
from .plan_replays import Posed, Replays, Task
from .quality import Quality, QualityTable, quality_of
from .race import CONFIDENCE, LIMIT, MOST, Entry, Lane, best_of, race, verdict
from .replicate import Interval, student
from .scenario import MAX_REPLICAS, Scenario, digest
from .space import candidate_of, searchable
from .tuned import toml_of

DOUBT = 1.25  # a pilot may be wrong by so much, either way
MORE_TRAFFIC, SLOWER = 1.3, 1.2
SETTLED = 7  # replays that a candidate is likely to take in the race, and then in the search for its headroom:
SEARCHED = 3
RISKS = 20  # and those of the risks

Progress = Callable[[str, int, int], None]  # what is being done, replays done, of about so many


@dataclass(frozen=True)
class PlanCandidate:
    """A policy on a profile, and what a replica's hour costs: its price, or its GPUs where there is none."""

    policy: str  # as it was given
    profile: Profile
    place: str  # as in Fleet
    quality: Quality
    price: float | None  # of a GPU for an hour

    def __str__(self) -> str:
        return f"{self.policy} on {self.place}" if self.place else self.policy

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.profile.device.count

    @property
    def weight(self) -> float:
        """The value that fleets are ranked by, for each replica."""
        return self.gpus * (1.0 if self.price is None else self.price)


@dataclass(frozen=True)
class Fleet:
    """A candidate's place in the ranking: the fewest replicas that meet the SLOs, or why there are none."""

    policy: str
    place: str  # the GPU or profile that tells it from the same policy elsewhere; empty where there is one profile
    profile: str
    device: str
    model: str
    estimated: bool
    quality: Quality
    gpus_per_replica: int
    replicas: int | None = None
    gpus: int | None = None
    per_hour: float | None = None  # in the currency of the price
    per_million_requests: float | None = None
    values: Mapping[str, Interval] = field(default_factory=dict)  # of each criterion: s, or share of arrivals
    attained: Mapping[str, float] = field(default_factory=dict)  # by SLO without a statistic: share of arrivals
    replications: int = 0
    headroom: float | None = None  # of the rate: so much more traffic until an SLO breaks
    breaks_first: str = ""  # the criterion that breaks there, or "stability"
    limited_by: str = ""
    limiting_setting: str = ""
    latency_ms: Mapping[str, Any] = field(default_factory=dict)
    about: int | None = None  # replicas that the pilot says, where it was dropped
    dropped: str = ""  # why it is not in the ranking


@dataclass(frozen=True)
class Risk:
    """The effect of a change of the world on the answer."""

    change: str
    values: Mapping[str, Interval]  # of the recommended fleet's criteria, as it is; empty where none is left
    holds: bool  # whether it still meets the SLOs
    needs: int | None  # replicas of the recommended policy; None: more than were allowed
    per_hour: float | None
    best: str  # the cheaper of recommendation and runner-up then


@dataclass(frozen=True, repr=False)
class Planned(Showable):
    """The ranking, best first, and what it rests on."""

    rate: float  # req/s
    ranking: tuple[Fleet, ...]
    left_out: tuple[Fleet, ...]  # dropped, or refused
    tied: tuple[str, ...]  # policies that nothing tells from the recommendation
    risks: tuple[Risk, ...]
    criteria: tuple[str, ...]
    bounds: Mapping[str, float]  # of each criterion: s, or share of arrivals
    share_criteria: tuple[str, ...]
    plan_toml: str
    priced: bool
    num_replays: int
    num_requests: int  # of a replay
    block: int
    confidence: float = CONFIDENCE
    notes: tuple[str, ...] = ()
    flags: Json = field(default_factory=dict)  # as `deploy.flags_of` says them

    @property
    def recommended(self) -> Fleet:
        """The best fleet."""
        return self.ranking[0]

    @property
    def runner_up(self) -> Fleet | None:
        """The second best; None where only one meets the SLOs."""
        return self.ranking[1] if len(self.ranking) > 1 else None

    def page(self) -> Page:
        from ..report.plan import words

        return words(self.to_json())

    def to_json(self) -> Json:
        """The object that `--json` prints and plan.json holds."""
        data: Json = no_nan(asdict(self))
        out: Json = {"schema": SCHEMA, "version": 1, "recommended": data["ranking"][0]}
        return out | {"runner_up": data["ranking"][1] if self.runner_up else None} | data


SCHEMA = "dsim-plan"


def candidates_of(
    scenario: Scenario,
    policies: Sequence[str],
    profiles: Sequence[Profile],
    prices: Callable[[Profile], float | None],
    *,
    min_quality: float | None = None,
    quality_table: QualityTable | None = None,
) -> tuple[list[PlanCandidate], list[Fleet]]:
    """The policies on the profiles that can run them, and those left out with the reason.

    A policy that names a profile of its own (POLICY@PROFILE) is a candidate there and nowhere else. Without policies:
    every shipped preset of a profile's family. A DsimError for a policy that no profile runs, or of another family.
    """
    found: list[PlanCandidate] = []
    out: list[Fleet] = []
    runs: set[str] = set()
    asked = _on_profiles(policies, profiles)
    devices = {profile.device.name for profile, _ in asked}
    for profile, own in asked:
        check = searchable(profile, scenario.workload)
        place = "" if len(asked) == 1 else profile.name if len(devices) < len(asked) else profile.device.name
        for spec in own:
            policy = replace(scenario, policy=spec).parsed_policy()
            quality = quality_of(policy, profile.model.name, quality_table)
            candidate = PlanCandidate(spec, profile, place, quality, prices(profile))
            reason = ""
            try:
                check(policy)
                runs.add(spec)
            except DsimError as error:
                reason = str(error)
            if not reason and min_quality is not None and (quality.relative or 0.0) < min_quality:
                said = f"unknown: {quality.notes[0]}" if quality.relative is None else str(quality)
                reason = f"quality {said}, expected at least {100 * min_quality:g} %"
            if reason:
                out.append(replace(_row(candidate), dropped=reason))
            else:
                found.append(candidate)
    for row in out:
        if policies and row.policy not in runs:
            raise DsimError(row.dropped)
    if not found:
        raise DsimError(out[0].dropped if out else "no policy and no profile is given, expected one of each")
    return found, out


def _on_profiles(policies: Sequence[str], profiles: Sequence[Profile]) -> list[tuple[Profile, list[str]]]:
    """The policies to be tried on each profile, those that they name themselves among them."""
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


def fingerprint(
    scenario: Scenario, candidates: Sequence[PlanCandidate], rate: float, options: Mapping[str, Any]
) -> str:
    """The same for the same question on the same inputs: what a kept ledger may answer."""
    plain = {k: v for k, v in scenario.question().items() if k not in ("policy", "profile", "given_profile", "trace")}
    policies = [candidate_of(c.policy, allow_code=scenario.allow_code).policy for c in candidates]
    asked = [(repr(p), repr(c.profile), c.price) for p, c in zip(policies, candidates, strict=True)]
    text = json.dumps([__version__, plain, digest(scenario.source()), asked, rate, dict(options)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(
    scenario: Scenario,
    candidates: Sequence[PlanCandidate],
    left_out: Sequence[Fleet] = (),
    *,
    rate: float | None = None,
    max_replicas: int = 64,
    attainment: float = 0.99,
    num_requests: int | None = None,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The candidates ranked by what their smallest fleets cost that meet the scenario's `slos` at `rate` (req/s).

    Without a rate: the trace's own. An SLO without a statistic must be met by a share `attainment` of arrivals, as in
    `capacity`. The scenario's own policy, profile and replicas are not used. `jobs`, `backend` and `address`, for which
    see `Pool`, and what the ledger holds change no result. A DsimError where no candidate meets the SLOs.
    """
    if not 1 <= max_replicas <= MAX_REPLICAS:
        raise DsimError(f"max replicas is {max_replicas}, expected 1 to {MAX_REPLICAS}")
    rate = own_rate(scenario) if rate is None else rate
    if not 0 < rate < math.inf:
        raise DsimError(f"rate is {rate} req/s, expected above 0 and finite")
    searches = [search_of(_posed(scenario, c), 0.02, attainment, num_requests, None) for c in candidates]
    with Pool(backend, jobs, address) as pool:
        run = _Run(candidates, searches, rate, max_replicas, pool, ledger, progress)
        lanes, dropped = run.settle()
        order, tied = run.rank(lanes)
        ranking = [run.fleet(lane, own) for lane, own in zip(order, run.headroom(order), strict=True)]
        risks = run.risks(order[:2], max(float(np.std(lane.settled, ddof=1)) for lane in order))
    search, best = searches[0], candidates[order[0].candidate]
    criteria = search.criteria
    recommended = ranking[0]
    assert recommended.replicas is not None
    return Planned(
        rate=rate,
        ranking=tuple(ranking),
        left_out=(*dropped, *left_out),
        tied=tuple(str(candidates[lane.candidate]) for lane in tied),
        risks=tuple(risks),
        criteria=tuple(c.text for c in criteria),
        bounds={c.text: c.bound for c in criteria},
        share_criteria=tuple(c.text for c in criteria if c.share is not None),
        plan_toml=toml_of(candidate_of(best.policy, recommended.replicas, scenario.allow_code)),
        priced=all(c.price is not None for c in candidates),
        num_replays=run.replays.num_replays,
        num_requests=search.num_requests,
        block=search.block,
        flags=flags_of(best.policy, best.gpus, scenario.allow_code),
    )


def own_rate(scenario: Scenario) -> float:
    """The rate of the trace's own times; a DsimError where it has none."""
    source = scenario.source()
    if not (source.notes.has_arrivals and len(source) > 1 and source.duration > 0):
        raise DsimError(f"{source.name} has no arrival times, expected --rate R")
    return source.rate


def best_fleets(scenario: Scenario, candidates: Sequence[PlanCandidate], planned: Planned) -> dict[str, Scenario]:
    """The recommendation and the runner-up as scenarios at the plan's rate, by how they are called."""
    of = {(c.policy, c.place): c for c in candidates}
    ahead = {str(of[f.policy, f.place]): (of[f.policy, f.place], f.replicas) for f in planned.ranking[:2]}
    return {
        name: _posed(replace(scenario, rate=planned.rate), candidate, replicas or 1)
        for name, (candidate, replicas) in ahead.items()
    }


def _posed(scenario: Scenario, candidate: PlanCandidate, replicas: int = 1) -> Posed:
    plain = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    own = {"policy": candidate.policy, "replicas": replicas, "given_profile": candidate.profile}
    return Posed(**{**plain, **own})


class _Run:
    """A plan in the making."""

    def __init__(
        self,
        candidates: Sequence[PlanCandidate],
        searches: Sequence[CapacitySearch],
        rate: float,
        most: int,
        pool: Pool,
        ledger: Ledger | None,
        progress: Progress | None,
    ) -> None:
        self.candidates, self.searches, self.rate, self.most = candidates, searches, rate, most
        self.replays = Replays(searches, pool, ledger, self._tell)
        self._progress = progress
        self._doing = "pilot"
        self._expected = len(candidates) * (SETTLED + SEARCHED) + RISKS

    def settle(self) -> tuple[list[Lane], list[Fleet]]:
        """Each candidate's lane of the race, and the rows of those that are not in the ranking."""
        pilots = self.replays(Task("pilot", i, self.rate, self.most) for i in range(len(self.candidates)))
        cannot = {i: self._refusal(i, p) for i, p in enumerate(pilots) if p.get("replicas") is None}
        if len(cannot) == len(self.candidates):
            said = f"no fleet of up to {self.most} replicas meets the SLOs at {self.rate:g} req/s"
            raise DsimError(f"{said}; {cannot[0]}")
        guesses = {i: int(p["replicas"]) for i, p in enumerate(pilots) if i not in cannot}
        costs = {i: self.candidates[i].weight * n for i, n in guesses.items()}
        second = sorted(costs.values())[:2][-1]
        # Wrong by as much as a pilot may be, in its favour, and the other two in their disfavour.
        dear = {i for i, cost in costs.items() if cost / DOUBT > second * DOUBT}
        running = [i for i in guesses if i not in dear]
        self._expected = self.replays.num_replays + len(running) * (SETTLED + SEARCHED) + RISKS
        self._doing = "racing"
        lanes = self._race(running, {i: guesses[i] for i in running}, self.rate)
        rows: list[Fleet] = []
        for i, candidate in enumerate(self.candidates):
            if i in cannot:
                rows.append(replace(_row(candidate), dropped=cannot[i]))
            elif i in dear:
                said = f"about {guesses[i]} replicas by the pilot: far dearer than the best two"
                rows.append(replace(_row(candidate), about=guesses[i], dropped=said))
        for lane in lanes:
            if lane.replicas is None:
                what = "more than" if lane.dropped else "even"
                said = f"{what} {lane.low} replicas: " + ("dearer than two others" if lane.dropped else "not enough")
                rows.append(replace(_row(self.candidates[lane.candidate]), about=lane.low + 1, dropped=said))
        settled = [lane for lane in lanes if lane.replicas is not None]
        if not settled:
            raise DsimError(f"no fleet of up to {self.most} replicas surely meets the SLOs at {self.rate:g} req/s")
        return settled, rows

    def rank(self, lanes: Sequence[Lane]) -> tuple[list[Lane], list[Lane]]:
        """Lanes by cost, then by how far the SLOs are from their bounds, best first; and what is tied with the best."""
        cheapest = min(self._cost(lane) for lane in lanes)
        first = [lane for lane in lanes if math.isclose(self._cost(lane), cheapest)]
        left = first
        while len(left) > 1:
            left = [left[i] for i in best_of([lane.settled for lane in left])]
            n = min(len(lane.settled) for lane in left)
            if len(left) == 1 or n >= MOST:
                break
            short = [lane for lane in left if len(lane.settled) == n]
            tasks = [Task("replay", lane.candidate, self.rate, lane.high or 0, 1.0, n) for lane in short]
            for lane, found in zip(short, self.replays(tasks), strict=True):
                lane.settled.append(float(found["severity"]))
        order = sorted(lanes, key=lambda lane: (self._cost(lane), lane not in left, float(np.mean(lane.settled))))
        return order, [lane for lane in left if lane is not order[0]]

    def headroom(self, lanes: Sequence[Lane]) -> list[Json]:
        """Each lane's own capacity, and what breaks above it."""
        self._doing = "headroom"
        self._expected = self.replays.num_replays + len(lanes) * SEARCHED + RISKS
        tasks = [Task("own", lane.candidate, self.rate, lane.high or 0, 1.0, 0, lane.settled[0]) for lane in lanes]
        found = self.replays(tasks)
        for one in found:
            if "error" in one:
                raise DsimError(one["error"])
        return found

    def risks(self, best: Sequence[Lane], spread: float) -> list[Risk]:
        """The effect of more traffic, a lost replica and a slower profile on the best two.

        spread: of severities between replications.
        """
        self._doing = "risks"
        self._expected = self.replays.num_replays + RISKS
        mine = best[0]
        assert mine.replicas is not None
        changes = (
            (f"{MORE_TRAFFIC - 1:.0%} more traffic", self.rate * MORE_TRAFFIC, 1.0),
            (f"a profile {SLOWER - 1:.0%} slower", self.rate, SLOWER),
        )
        found: list[Risk] = []
        for change, rate, slower in changes:
            starts = {lane.candidate: lane.replicas or 1 for lane in best}
            who = list(starts)
            after = self._race(who, starts, rate, slower, drop=False, spread=spread)
            costs = [math.inf if lane.replicas is None else self._cost(lane) for lane in after]
            winner = self.candidates[who[int(np.argmin(costs))]]
            values, holds = self._as_it_is(after[0], mine.replicas, rate, slower, spread)
            best_then = str(winner) if min(costs) < math.inf else ""
            found.append(self._risk(change, values, holds, mine.candidate, after[0].replicas, best_then))
        left = mine.replicas - 1
        values, holds = self._as_it_is(mine, left, self.rate, 1.0, spread) if left else ({}, False)
        same = str(self.candidates[mine.candidate])
        lost = self._risk("a replica lost", values, holds, mine.candidate, mine.replicas + (not holds), same)
        return [found[0], lost, found[1]]

    def fleet(self, lane: Lane, own: Json) -> Fleet:
        """A settled lane's row."""
        candidate, replicas = self.candidates[lane.candidate], lane.replicas
        assert replicas is not None
        price = candidate.price
        hourly = None if price is None else replicas * candidate.gpus * price
        seen = self._seen(lane, replicas, self.rate)
        binding = own["binding"]
        return replace(
            _row(candidate),
            replicas=replicas,
            gpus=replicas * candidate.gpus,
            per_hour=hourly,
            per_million_requests=None if hourly is None else hourly / (3600 * self.rate) * 1e6,
            values=self._values(lane, seen),
            attained={slo: sum(f["attained"].get(slo, 1.0) for f in seen) / len(seen) for slo in seen[0]["attained"]},
            replications=len(seen),
            headroom=max(0.0, own["rate"] / self.rate - 1),
            breaks_first=STABILITY if binding < 0 else self.searches[lane.candidate].criteria[binding].text,
            limited_by=seen[0]["limited_by"],
            limiting_setting=seen[0]["limiting_setting"],
            latency_ms=seen[0]["latency_ms"],
        )

    def _race(
        self,
        who: Sequence[int],
        starts: Mapping[int, int],
        rate: float,
        slower: float = 1.0,
        *,
        drop: bool = True,
        spread: float | None = None,
    ) -> list[Lane]:
        def severities(entries: Sequence[Entry]) -> list[float]:
            tasks = [Task("replay", who[e.candidate], rate, e.replicas, slower, e.index) for e in entries]
            return [LIMIT if "error" in found else float(found["severity"]) for found in self.replays(tasks)]

        prices = [self.candidates[i].weight for i in who]
        lanes = race(prices, [starts[i] for i in who], self.most, severities, drop=drop, spread=spread)
        for lane in lanes:
            lane.candidate = who[lane.candidate]
        return lanes

    def _as_it_is(
        self, lane: Lane, replicas: int, rate: float, slower: float, spread: float
    ) -> tuple[dict[str, Interval], bool]:
        """One of a lane's fleets: values, and whether it surely meets the SLOs."""
        seen = self._seen(lane, replicas, rate, slower)
        return self._values(lane, seen), bool(verdict(lane.severities[replicas], 1, spread))

    def _seen(self, lane: Lane, replicas: int, rate: float, slower: float = 1.0) -> list[Json]:
        """The race's readings of a lane's fleet."""
        many = range(len(lane.severities[replicas]))
        return self.replays(Task("replay", lane.candidate, rate, replicas, slower, index) for index in many)

    def _values(self, lane: Lane, seen: Sequence[Json]) -> dict[str, Interval]:
        criteria = self.searches[lane.candidate].criteria
        out = {}
        for k, criterion in enumerate(criteria):
            known = np.array([v for found in seen if (v := found["values"][k]) is not None])
            if not len(known):
                continue
            mean, half = float(known.mean()), student(known, CONFIDENCE)
            most = 1.0 if criterion.share is not None else math.inf
            ends = (max(0.0, mean - half), min(most, mean + half)) if len(known) > 1 else (math.nan, math.nan)
            out[criterion.text] = Interval(mean, *ends)
        return out

    def _risk(
        self, change: str, values: Mapping[str, Interval], holds: bool, candidate: int, needs: int | None, best: str
    ) -> Risk:
        who = self.candidates[candidate]
        if needs is not None and needs > self.most:
            needs = None
        hourly = None if who.price is None or needs is None else needs * who.gpus * who.price
        return Risk(change, values, holds, needs, hourly, best)

    def _refusal(self, candidate: int, pilot: Json) -> str:
        if "error" in pilot:
            return str(pilot["error"])
        criteria = self.searches[candidate].criteria
        texts = " and ".join(f"'{c.text}'" for c in criteria)
        value = pilot["value"]
        said = ""
        if value is not None and len(criteria) == 1:
            shown = f"{100 * value:.3g} %" if criteria[0].share is not None else f"{1e3 * value:.4g} ms"
            said = f": {shown} on {self.most}"
        return f"{self.candidates[candidate].policy} misses {texts} even on {self.most} replicas{said}"

    def _cost(self, lane: Lane) -> float:
        return self.candidates[lane.candidate].weight * (lane.replicas or 0)

    def _tell(self) -> None:
        if self._progress is not None:
            done = self.replays.num_replays
            self._progress(self._doing, done, max(self._expected, done + 1))


def _row(candidate: PlanCandidate) -> Fleet:
    profile = candidate.profile
    return Fleet(
        policy=candidate.policy, place=candidate.place, profile=profile.name, device=profile.device.name,
        model=profile.model.name, estimated=profile.is_estimate, quality=candidate.quality,
        gpus_per_replica=candidate.gpus,
    )  # fmt: skip
