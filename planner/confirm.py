"""Confirm a search's best settings on fresh luck and held-out traffic, paired with the default."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .objective import Part, ReplayOutcome, Tried
from .quality import Quality
from .race import nearest
from .replicate import Interval, student
from .search import Judge, Search
from .tuned import Finalist

CONFIDENCE = 0.95
REPLICATIONS = 10  # replays of the held-out part
NUM_RERANKED, NUM_RERANKS = 4, 4  # settings, and replays of each
NUM_CONFIRMED = 8  # of a Pareto front


def chosen(search: Search) -> list[Tried]:
    """Settings to confirm, best first: the best two, or spread over the front."""
    if len(search.objectives) == 1:
        return _rerank(search, _to_rerank(search))
    front = search.front()
    if len(front) <= NUM_CONFIRMED:
        return front
    return [front[round(i)] for i in np.linspace(0, len(front) - 1, NUM_CONFIRMED)]


def confirm(search: Search, candidates: Sequence[Tried], judge: Judge) -> dict[Tried, Finalist]:
    """Replay candidates and default on the same held-out traffic."""
    known = [search.default, *(c for c in candidates if c != search.default)]
    outcomes: dict[Tried, list[ReplayOutcome]] = {c: [] for c in known}
    for index in range(REPLICATIONS):
        search.progress("confirming", index, REPLICATIONS, search.best_text())
        found = search.measure([(c, Part("confirm", index)) for c in known])
        for c, outcome in zip(known, found, strict=True):
            outcomes[c].append(outcome)
    search.progress("confirming", REPLICATIONS, REPLICATIONS, search.best_text())
    if search.default not in search.seen:
        [search.seen[search.default]] = search.measure([(search.default, Part("search"))])
    return {c: _finalist(search, c, outcomes, judge(c)) for c in known}


def verdict(objective: str, winner: Finalist, default: Finalist, min_quality: float | None) -> tuple[bool, list[str]]:
    """Whether to recommend the winner; notes."""
    notes = []
    gain = winner.gains[0]
    usable = default.meets >= 0.5
    if min_quality is not None:
        relative = default.quality.relative
        usable = usable and relative is not None and relative >= min_quality
    if winner.candidate == default.candidate:
        notes.append("the search found nothing better than the default")
        ok = True
    elif winner.meets < 0.5:
        notes.append(f"the winner of the search misses an SLO in {1 - winner.meets:.0%} of held-out replays")
        ok = False
    elif math.isnan(gain.value) or gain.low > 0 or not usable:
        ok = True
        if not usable:
            notes.append("the default itself misses an SLO or the quality asked for, and cannot be recommended")
    else:
        notes.append(f"the gain in {objective} over the default is not confirmed: the default is recommended")
        ok = False
    quality = (winner if ok else default).quality
    if quality.relative is None and not quality.same:
        notes.append(f"the quality of the recommended policy is unknown: {quality.notes[0]}")
    if objective in ("goodput", "cost") and default.attainment > 0.995 and winner.attainment > 0.995:
        notes.append("the default already serves nearly every request well: a higher --rate would tell settings apart")
    return ok, notes


def estimate(values: Sequence[float], scale: float = 1.0) -> Interval:
    """Mean and Student's interval, divided by `scale`."""
    data = np.asarray(values, float) / scale
    mean, half = float(data.mean()), student(data, CONFIDENCE)
    return Interval(mean, mean - half, mean + half)


def gain(values: Sequence[float], base: Sequence[float], sign: float) -> Interval:
    """A mean's relative gain over the default's, paired by replication (ratio estimator); sign -1: less is better."""
    mine, other = np.asarray(values, float), np.asarray(base, float)
    mean = float(other.mean())
    if not mean > 0:
        return Interval(math.nan, math.nan, math.nan)
    ratio = float(mine.mean()) / mean
    spread = estimate(list(sign * (mine - ratio * other)), mean)
    value = sign * (ratio - 1)
    return Interval(value, value + spread.low, value + spread.high)


def _to_rerank(search: Search) -> list[Tried]:
    """The best setting and others of the best, those first that are as good and nearer to the engine's default.

    A setting beyond the engine's tested range must be a tenth better.
    """
    feasible = [c for c, outcome in search.ranked() if outcome.violation <= 0]
    ranked = sorted(feasible, key=lambda c: -search.worth(c, search.seen[c]))  # stable
    best, *others = ranked
    equal = sorted(search.equals(best, others), key=search.changes)
    return [best, *equal, *(c for c in others if c not in equal)][:NUM_RERANKED]


def _rerank(search: Search, few: list[Tried]) -> list[Tried]:
    """The best two under fresh luck, on the search's part of the trace; of equals the nearest to the default."""
    if len(few) < 2:
        return few
    costs: dict[Tried, list[float]] = {c: [] for c in few}
    missed: dict[Tried, int] = dict.fromkeys(few, 0)
    for index in range(NUM_RERANKS):
        search.progress("ranking", index, NUM_RERANKS, search.best_text())
        outcomes = search.measure([(c, Part("rerank", index)) for c in few])
        for c, outcome in zip(few, outcomes, strict=True):
            costs[c].append(-search.worth(c, outcome))
            missed[c] += outcome.violation > 0
    order = sorted(few, key=lambda c: (2 * missed[c] > NUM_RERANKS, sum(costs[c])))
    able = [c for c in order if 2 * missed[c] <= NUM_RERANKS] or order
    best = able[nearest([costs[c] for c in able], [search.changes(c) for c in able])]
    return [best, *(c for c in order if c != best)][:2]


def _finalist(
    search: Search, candidate: Tried, outcomes: Mapping[Tried, Sequence[ReplayOutcome]], quality: Quality
) -> Finalist:
    mine, base = outcomes[candidate], outcomes[search.default]
    values, gains = [], []
    for i, sign in enumerate(search.signs):
        values.append(estimate([o.values[i] for o in mine]))
        gains.append(gain([o.values[i] for o in mine], [o.values[i] for o in base], sign))
    return Finalist(
        candidate=candidate,
        quality=quality,
        search=search.seen[candidate].values,
        values=tuple(values),
        gains=tuple(gains),
        meets=float(np.mean([o.violation <= 0 for o in mine])),
        attainment=float(np.mean([o.attainment for o in mine])),
    )
