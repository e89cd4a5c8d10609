"""Confirm a search's best settings on fresh luck and held-out traffic, paired with the default."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .candidate import Candidate, nearest_first
from .objective import Part, ReplayOutcome
from .quality import Quality
from .race import best_of
from .replicate import Interval, student
from .search import Search

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
        return self.policy + f" on {self.replicas} replicas" * (self.replicas > 1)


def chosen(search: Search) -> list[Candidate]:
    """The best two under fresh luck, on the search's part of the trace; of equals the nearest to the default.

    Among the best setting and others of the best, those first that are as good and nearer to the engine's default. A
    setting beyond the engine's tested range must be a tenth better.
    """
    first, *rivals = sorted(search.feasible(), key=lambda c: -search.worth(c, search.outcomes[c]))  # stable
    equal = nearest_first(search.equals(first, rivals), lambda c: c.num_changes(search.default))
    few = [first, *equal, *(c for c in rivals if c not in equal)][:NUM_RERANKED]
    if len(few) < 2:
        return few
    costs: dict[Candidate, list[float]] = {c: [] for c in few}
    missed: dict[Candidate, int] = dict.fromkeys(few, 0)
    for index in range(NUM_RERANKS):
        search.progress("ranking", index, NUM_RERANKS, search.best_text())
        outcomes = search.measure(few, Part("rerank", index))
        for c, outcome in zip(few, outcomes, strict=True):
            costs[c].append(-search.worth(c, outcome))
            missed[c] += outcome.violation > 0
    order = sorted(few, key=lambda c: (2 * missed[c] > NUM_RERANKS, sum(costs[c])))
    feasible = [c for c in order if 2 * missed[c] <= NUM_RERANKS] or order
    equals = [feasible[i] for i in best_of([costs[c] for c in feasible])]
    best = nearest_first(equals, lambda c: c.num_changes(search.default), lambda c: float(np.mean(costs[c])))[0]
    return [best, *(c for c in order if c != best)][:2]


def confirm(search: Search, candidates: Sequence[Candidate]) -> dict[Candidate, Finalist]:
    """Replay candidates and default on the same held-out traffic."""
    settings = [search.default, *(c for c in candidates if c != search.default)]
    outcomes: dict[Candidate, list[ReplayOutcome]] = {c: [] for c in settings}
    for index in range(REPLICATIONS):
        search.progress("confirming", index, REPLICATIONS, search.best_text())
        replays = search.measure(settings, Part("confirm", index))
        for c, outcome in zip(settings, replays, strict=True):
            outcomes[c].append(outcome)
    search.progress("confirming", REPLICATIONS, REPLICATIONS, search.best_text())
    if search.default not in search.outcomes:
        [search.outcomes[search.default]] = search.measure([search.default], Part("search"))
    finalists = {}
    for c, replays in outcomes.items():
        measured, base = ([outcome.value for outcome in outcomes[setting]] for setting in (c, search.default))
        attainment = float(np.mean([outcome.attainment for outcome in replays]))
        finalists[c] = Finalist(
            policy=c.world.policy,
            replicas=c.world.replicas,
            untested=c.untested,
            quality=search.judge(c),
            value=estimate(measured),
            gain=gain(measured, base, search.sign),
            meets_run_slos=float(np.mean([outcome.violation <= 0 for outcome in replays])),
            attainment=None if math.isnan(attainment) else attainment,
        )
    return finalists


def verdict(
    objective: str, winner: Finalist, default: Finalist, is_default: bool, min_quality: float | None
) -> tuple[bool, list[str]]:
    """Whether to recommend the winner; notes."""
    notes = []
    gain = winner.gain
    usable = default.meets_run_slos >= 0.5
    if min_quality is not None:
        relative = default.quality.relative
        usable = usable and relative is not None and relative >= min_quality
    if is_default:
        notes.append("the search found nothing better than the default")
        ok = True
    elif winner.meets_run_slos < 0.5:
        notes.append(f"the winner of the search misses an SLO in {1 - winner.meets_run_slos:.0%} of held-out replays")
        ok = False
    elif gain is None or gain.low > 0 or not usable:
        ok = True
        if not usable:
            notes.append("the default itself misses an SLO or the quality asked for, and cannot be recommended")
    else:
        notes.append(f"the gain in {objective} over the default is not confirmed: the default is recommended")
        ok = False
    return ok, notes


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
