"""A question under profiles drawn from a profile's uncertainty, and the causes that matter most."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtri

from ..engine import chance
from ..engine.errors import DsimError
from ..profiler.uncertainty import FRONT_END, YIELD, Cause, causes
from ..report.table import value
from ..results.metrics import finite
from ..results.slo import Slo
from ..results.spread import Effect, Spread, Uncertain
from ..results.world import World, digest
from ..sim.scalers import FIXED
from ..traces import Trace
from .backend import Pool
from .contents import Json, asked_of
from .memo import Memo

DRAW = 213  # purpose of draws
MAX_DRAWS = 1000
LEVEL = 0.9
EOS = "ends at an EOS"  # the world's, not its profile's
# Reported of every run.
TOLD = ("output_throughput", "ttft_ms.p50", "ttft_ms.p90", "e2el_ms.p90", "norm_latency_ms.p90", "slo_attainment")

Scores = tuple[tuple[str, float], ...]
Values = dict[str, float]
Draw = tuple[World, int]  # under a drawn profile, and the draw's number; 0: as predicted, or a cause alone


def drawn(unknowns: Sequence[Cause], index: int, seed: int) -> Scores:
    """Draw `index`: independent normal scores, keyed by causes' names and owners."""
    return tuple(
        (c.name, float(ndtri(chance.uniform(chance.key(seed, DRAW, index, *c.name.encode(), *c.owner.encode()))[0])))
        for c in unknowns
    )


def known_causes(world: World) -> tuple[Cause, ...]:
    """Unknowns of world and profile that the policy depends on."""
    setting = world.setting()
    # What a cache or an eviction approximates changes the yield: each is a reading of its own.
    parts = f"{type(setting.policy.cache).__name__} {type(setting.policy.eviction).__name__}"
    unknowns = []
    for cause in causes(setting.profile, setting.drawn):
        if cause.name == YIELD:
            cause = replace(cause, owner=f"{cause.owner} {parts}")
        if cause.name != FRONT_END or world.frontend is None:
            unknowns.append(cause)
    if not world.ends_at_eos and setting.policy.family != "full-sequence":
        unknowns.append(
            Cause(EOS, "unknown: half of the draws end answers where the scheduler does not foresee it", True)
        )
    return tuple(unknowns)


def moved(world: World, scores: Scores) -> World:
    of_profile = tuple((name, score) for name, score in scores if name != EOS)
    return replace(world, variation=of_profile, eos=world.ends_at_eos or dict(scores).get(EOS, 0.0) > 0)


def ensemble(worlds: Sequence[World], requests: Trace, num: int, **options: Any) -> Uncertain:
    """Replay each world under `num` drawn profiles, and with each cause at ±1 standard deviation.

    Worlds differ in policy only; they share each draw's luck and profile. options: pool, progress and memo
    of `ask`. Ctrl-C passes through.
    """
    by_name = {world.policy: world for world in worlds}
    metric, higher = deciding(worlds[0])
    metrics = list(dict.fromkeys((metric, *TOLD)))
    question = {"of": metrics, "requests": digest(requests)}
    replay = partial(_replay, requests, metrics)
    uncertain, values = ask(replay, by_name, num, (metric, higher), question=question, **options)
    if len(by_name) == 1:
        return uncertain
    ranked = [_ranked({name: v[i][metric] for name, v in values.items()}, higher) for i in range(num + 1)]
    best = ranked[0][0]
    ratios = {policy: paired(values[best], values[policy]) for policy in ranked[0] if policy != best}
    winners = [names[0] for names in ranked]
    survives = winners[1:].count(best) / num
    return replace(uncertain, answer=f"{best} is the best by {metric}", survives=survives, best=best, ratios=ratios)


def ask(
    evaluate: Callable[[Draw], Values],
    worlds: Mapping[str, World],
    num: int,
    judged: tuple[str, bool],
    *,
    question: Json,
    pool: Pool | None = None,
    memo: Memo | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    moving: int | None = None,
) -> tuple[Uncertain, dict[str, list[Values]]]:
    """The intervals and each cause's effect, without an answer; by policy, predicted and drawn values.

    judged: the deciding metric, and whether more is better. question: `evaluate`'s, without its draw. moving: the
    number of worlds of which each cause is moved alone, by default all.
    """
    metric, higher = judged
    check_num(num)
    unknowns = {name: known_causes(s) for name, s in worlds.items()}
    varied = dict(list(unknowns.items())[:moving])
    work: dict[str, Draw] = {}
    for policy, world in worlds.items():
        work[f"{policy}|0"] = world, 0
        for i in range(1, num + 1):
            work[f"{policy}|{i}"] = moved(world, drawn(unknowns[policy], i, world.seed)), i
        for cause in varied.get(policy, ()):
            for sign in (-1, 1):
                work[f"{policy}|{cause.name}|{sign}"] = moved(world, ((cause.name, float(sign)),)), 0
    answers: dict[str, Values] = {}

    def question_of(draw: Draw) -> Json:
        return {**asked_of(draw[0]), **question, "draw": draw[1]}

    with closing((memo or Memo()).run(pool or Pool(), evaluate, work, question_of)) as outcomes:
        for outcome in outcomes:
            if outcome.error is not None:
                raise DsimError(f"in the ensemble: {outcome.error}")
            answers[outcome.key] = outcome.result()
            progress(len(answers), len(work))
    values = {p: [answers[f"{p}|{i}"] for i in range(num + 1)] for p in worlds}
    effects = {}
    for policy, causes_alone in varied.items():
        moves = []
        for c in causes_alone:
            low, high = (answers[f"{policy}|{c.name}|{sign}"][metric] for sign in (-1, 1))
            moves.append(Effect(cause=c.name, why=c.why, assumed=c.assumed, low=low, high=high))
        finite = [move for move in moves if math.isfinite(move.swing)]
        effects[policy] = tuple(sorted(finite, key=lambda move: (-move.swing, move.cause)))
    intervals = {p: {name: interval([v[name] for v in draws]) for name in draws[0]} for p, draws in values.items()}
    uncertain = Uncertain(num=num, level=level(num), metric=metric, higher=higher, intervals=intervals, effects=effects)
    return uncertain, values


def check_num(num: int | None, worlds: Sequence[World] = ()) -> None:
    """DsimError unless the worlds can have an ensemble of `num` draws."""
    if num is not None and not 2 <= num <= MAX_DRAWS:
        raise DsimError(f"ensemble is {num}, expected 2 to {MAX_DRAWS} draws")
    if num is not None and any(world.pools or world.scaler != FIXED for world in worlds):
        raise DsimError(f"ensemble is {num} and the fleet has pools or a scaler, expected one pool of a fixed count")


def level(num: int) -> float:
    """90 % from 19 draws on."""
    return min(LEVEL, (num - 1) / (num + 1))


def interval(values: Sequence[float]) -> Spread:
    """The first value, with an interval of the n others, whose k-th is the quantile k / (n + 1)."""
    draws = np.sort([value for value in values[1:] if not math.isnan(value)])
    if len(draws) < 2:
        return Spread(finite(values[0]), None, None)
    rank = int((1 - level(len(draws))) / 2 * (len(draws) + 1) + 1e-9)  # between two draws the outer one
    return Spread(finite(values[0]), finite(draws[rank - 1]), finite(draws[-rank]))


def paired(values: Sequence[Values], rival: Sequence[Values]) -> dict[str, Spread]:
    """The ratio of two policies by metric, draw by draw; infinite where the other is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {name: np.divide([v[name] for v in values], [v[name] for v in rival]) for name in rival[0]}
    return {name: interval(list(draws)) for name, draws in ratios.items()}


def deciding(world: World) -> tuple[str, bool]:
    """The deciding metric, and whether more is better."""
    slos = [Slo.parse(text) for text in world.slos]
    for slo in slos:
        if slo.stat is not None and slo.share is None and slo.slo_class is None:
            return f"{slo.metric}_ms.{slo.stat}", False
    if slos:
        return "slo_attainment", True
    if world.concurrency is not None:
        return "output_throughput", True
    return "norm_latency_ms.p90", False


def _replay(requests: Trace, metrics: Sequence[str], draw: Draw) -> Values:
    """At module level, for pickling."""
    summary = draw[0].run(requests)
    values = {name: value(summary, name) for name in metrics}
    return {name: math.nan if number is None else number for name, number in values.items()}


def _ranked(values: dict[str, float], higher: bool) -> list[str]:
    """The best first; ties in order, NaN last."""
    sign = 1 - 2 * higher
    return sorted(values, key=lambda p: (math.isnan(values[p]), sign * values[p]))
