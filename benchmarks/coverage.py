"""How often 90 % intervals hold the truth, absolute and as ratios: `python benchmarks/coverage.py [PART ...]`.

PART: requests, plans, or an experiment; by default all, in some 11 minutes of one core.

requests: synthetic truths of the seconds of a lone request, and of the ratio of two settings, in closed form. A truth's
causes are drawn apart from the ensemble's, by the stated widths, or as published: one of two codes with different
floors, the ratio of two workloads' published yields of that model, a measured front end, the rest as stated. What has
one owner (one card, code or model) is drawn once for both settings.

plans: `uncertain_fleets` of two GPUs; each truth is a profile drawn by the stated widths, and the fewest replicas that
meet the SLO under it, the median of five replications.

EXPERIMENT: rows of research/reproduce with a published value, without memory and capacities, replayed as predicted and
under drawn profiles (as `--ensemble`); and the ratios of a predicted series over each other series at one place. A
published lower bound (`1800+`) is held if the interval reaches it, and has no ratio. A published value that several
series predict counts once, by the first.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy.special import ndtri

from dsim.engine.errors import DsimError
from dsim.engine.latency import Features
from dsim.planner.backend import Pool
from dsim.planner.capacity import search_of
from dsim.planner.ensemble import Scores, drawn, interval, known_causes, moved
from dsim.planner.uncertain_fleet import COST, REPLICAS, sized, uncertain_fleets
from dsim.profiler import uncertainty as u
from dsim.profiler.calibrate import mean_yield
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.profile import load
from dsim.research.reproduce.experiment import AT_LEAST, CALIBRATED, PREDICTED, read, shipped
from dsim.research.reproduce.measures import OVER, of_run
from dsim.research.reproduce.points import SeededRun
from dsim.results.spread import Spread
from dsim.results.world import World
from dsim.sim.setting import Setting

DRAWS, TRUTHS, PLANS = 19, 400, 30
FRONT_ENDS = (0.0048, 0.025, 0.034, 0.037, 0.044)  # s, measured between client and engine
# Tokens a step or forward by workload, at one block length and threshold (profiler/published.json).
YIELDS = {
    "SDAR-8B": (2.28, 4.31, 2.2, 2.2, 2.2, 2.6, 1.67, 1.5), "LLaDA-8B": (3.25, 1.97, 2.13, 2.56),
    "DiffusionGemma-26B-A4B": tuple(256 / forwards for forwards in (27.0, 15.5, 14.6, 16.5, 27.0)),
}  # fmt: skip
PAIRS = {  # policy and profile of each
    "two scripts on one GPU": (("vanilla", "l40s-llada-8b"), ("dllm-cache", "l40s-llada-8b")),
    "one script on two GPUs": (("dllm-cache", "l40s-llada-8b"), ("dllm-cache", "rtx4090-48gb-llada-8b")),
    "two engines on one GPU, canvases": (
        ("vllm-diffusion", "h200x2-diffusiongemma"), ("vllm-diffusion", "h200x2-diffusiongemma/sglang"),
    ),
    "two GPUs, canvases": (("vllm-diffusion", "h200x2-diffusiongemma"), ("vllm-diffusion", "h100-diffusiongemma-fp8")),
    "one code on two GPUs, blocks": (("optimus", "h100-sdar-8b"), ("optimus", "h200-sdar-8b")),
    "two engines on one GPU, blocks": (
        ("lmdeploy-bd32", "h100-sdar-8b/lmdeploy"), ("lmdeploy-bd32", "h100-sdar-8b/sglang"),
    ),
}  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", metavar="requests|plans|EXPERIMENT")
    asked.add_argument("--most-requests", type=int, default=4, help="of a replay, or 4 a client if those are more")
    asked.add_argument("--draws", type=int, default=DRAWS, help="of each row of an experiment")
    options = asked.parse_args()
    for name in options.names or ["requests", "plans", *shipped()]:
        if name == "requests":
            requests()
        elif name == "plans":
            plans()
        else:
            published(name, options.most_requests, options.draws)


def requests() -> None:
    """By pair of settings: the coverage of the first one's seconds, and of the ratio."""
    for pair, places in PAIRS.items():
        settings = [World("azure-conv", policy=policy, profile=profile).setting() for policy, profile in places]
        known, timers = [u.causes(own.profile, own.drawn) for own in settings], [timed(own) for own in settings]
        rng, widths = np.random.default_rng(11), []
        held = {(kind, what): 0 for kind in ("stated", "published") for what in ("absolute", "ratio")}
        for i in range(TRUTHS):
            draws = np.array([
                [seconds(drawn(of, k, i)) for seconds, of in zip(timers, known, strict=True)]
                for k in range(1, DRAWS + 1)
            ])  # fmt: skip
            spreads = [interval([math.nan, *draws[:, 0]]), interval([math.nan, *(draws[:, 0] / draws[:, 1])])]
            shared: dict[tuple[str, str], float] = {}
            for kind in ("stated", "published"):
                scores = [drawn(of, 0, i) if kind == "stated" else truth(of, rng, shared) for of in known]
                first, second = (seconds(of) for seconds, of in zip(timers, scores, strict=True))
                held[kind, "absolute"] += holds(spreads[0], first)
                held[kind, "ratio"] += holds(spreads[1], first / second)
            widths.append([spread.high / spread.low for spread in spreads])
        cells = [f"{what}, {kind} {100 * num / TRUTHS:.1f} %" for (kind, what), num in held.items()]
        print(f"requests | {pair} | {' | '.join(cells)} | high over low {shown(widths)}", flush=True)


def shown(widths: Sequence[Sequence[float]]) -> str:
    """Medians."""
    return " and ".join(f"{width:.2f}" for width in np.median(widths, axis=0))


def holds(spread: Spread, value: float) -> bool:
    low, high = (math.inf if end is None else end for end in (spread.low, spread.high))
    return low <= value <= high


def truth(known: Sequence[u.Cause], rng: np.random.Generator, shared: dict[tuple[str, str], float]) -> Scores:
    """Scores, one of a list of published values where there is one; shared: by cause and owner."""
    for cause in known:
        if (cause.name, cause.owner) not in shared:
            shared[cause.name, cause.owner] = _published_score(cause, rng)
    return tuple((cause.name, shared[cause.name, cause.owner]) for cause in known)


def _published_score(cause: u.Cause, rng: np.random.Generator) -> float:
    name = cause.name
    if name == u.IMPLEMENTATION:
        return float(rng.choice([-1, 0, 0, 1])) * math.sqrt(2)  # two codes are this far apart
    if name == u.WORKLOAD:
        first, second = rng.choice(YIELDS[cause.owner], 2, replace=False)
        return math.log(first / second) / u.YIELD_SPREAD
    if name == u.FRONT_END:
        share = float(rng.choice(FRONT_ENDS)) / u.MOST_FRONT_END
        return float(np.clip(ndtri(np.clip(share, 1e-6, 1 - 1e-6)), -5, 5))
    return float(rng.normal())


def timed(setting: Setting) -> Callable[[Scores], float]:
    """s of a lone request: front end, and one canvas, 128 tokens in blocks of 32, or 128 single-token passes."""
    width = 32 if setting.profile.family == "block-diffusion" else 512
    scores = np.linspace(-6, 6, 25)  # of the yield; a simulated mean takes too long for each draw
    steps = [_steps(setting, float(score)) for score in scores]

    def seconds(causes: Scores) -> float:
        yields = {name: score for name, score in causes if name in (u.YIELD, u.WORKLOAD, u.SPREAD)}
        others = tuple((name, score) for name, score in causes if name not in yields)
        profile = u.varied(setting.profile, others, setting.drawn)
        score = yields.get(u.WORKLOAD, 0.0) + yields.get(u.YIELD, 0.0) * u.PUBLISHED_YIELD / u.YIELD_SPREAD
        step = profile.latency.step(Features(width, 0, width * 512, width, width, width, 0))
        return profile.frontend + float(np.interp(score, scores, steps)) * step

    return seconds


def _steps(setting: Setting, score: float) -> float:
    if setting.drawn is None:
        return 128.0
    profile = u.varied(setting.profile, ((u.WORKLOAD, score),), setting.drawn)
    return mean_forwards(profile.canvas_laws[0]) + 1.0 if setting.law else 128 / mean_yield(profile.commits[0])


def plans() -> None:
    """A fleet and its rival on another GPU: the replicas, the cost, and the ratio of costs."""
    weights, rate, num = (2.0, 3.5), 30.0, 400
    fleets = [
        World("azure-conv", arrival="poisson", lengths="fixed:512,64", slos=("p90:e2el=6s",), policy="lmdeploy-bd32",
              profile_object=load(profile), replicas=4)
        for profile in ("a100-sdar-8b/graphs", "h100-sdar-8b")
    ]  # fmt: skip
    search = search_of(fleets[0], 0.02, 0.9, num)

    def sizes(fleet: Sequence[World]) -> list[float]:
        return [
            float(np.median([sized(search, rate, (own, 1 + DRAWS + i))[REPLICAS] for i in range(5)])) for own in fleet
        ]

    planned = [replace(own, rate=rate, replicas=int(size)) for own, size in zip(fleets, sizes(fleets), strict=True)]
    held, widths = {REPLICAS: 0, COST: 0, "ratio of costs": 0}, []
    for i in range(PLANS):
        own = {fleet.file_profile().name: replace(fleet, seed=i) for fleet in planned}
        found = uncertain_fleets(own, weights, DRAWS, attainment=0.9, num_requests=num, pool=Pool(jobs=1))
        true = sizes([moved(fleet, drawn(known_causes(fleet), 0, i)) for fleet in fleets])
        costs = [size * weight for size, weight in zip(true, weights, strict=True)]
        first, [rival] = found.intervals[found.best], found.ratios.values()
        held[REPLICAS] += holds(first[REPLICAS], true[0])
        held[COST] += holds(first[COST], costs[0])
        held["ratio of costs"] += holds(rival[COST], costs[0] / costs[1])
        widths.append([spread.high / spread.low for spread in (first[COST], rival[COST])])
    cells = " | ".join(f"{what} {100 * hits / PLANS:.0f} %" for what, hits in held.items())
    counts = " and ".join(str(fleet.replicas) for fleet in planned)
    print(f"plans | {counts} replicas | {cells} | high over low {shown(widths)}", flush=True)


def published(name: str, most: int, draws: int) -> None:
    """Each row's interval and each ratio's, and whether it holds the published value."""
    told: dict[tuple[str, str], dict[str, tuple[str, float]]] = {}  # by measure and place: each series' status, value
    runs = {}
    for series in read(name).series:
        for run in series.runs:
            runs[series.name, run.at] = run
            for measure in series.measures:
                value = series.published.get(measure, {}).get(run.at)
                if value is not None and OVER not in measure and measure not in ("peak_memory", "capacity"):
                    told.setdefault((measure, run.at), {})[series.name] = series.status(measure, value), value
    for (measure, at), rows in told.items():
        if all(status == CALIBRATED for status, _ in rows.values()):
            continue
        place, values = f"{name} | {at} | {measure}", {}
        for series_name, (status, value) in rows.items():
            try:
                world = SeededRun(runs[series_name, at], (measure,), 0).world
                values[series_name] = replayed(world, measure, most, draws)
            except DsimError as error:
                print(f"{place} | {series_name} | failed: {error}", flush=True)
                continue
            if status != CALIBRATED:
                line("absolute", f"{place} | {series_name}", value, interval(values[series_name]), status == AT_LEAST)
        for first, second in combinations(values, 2):
            statuses = {rows[first][0], rows[second][0]}
            if PREDICTED not in statuses or AT_LEAST in statuses or rows[first][1] == rows[second][1]:
                continue  # equal values: one published run, modelled twice
            if rows[first][0] != PREDICTED:
                first, second = second, first
            ratio = interval([a / b for a, b in zip(values[first], values[second], strict=True)])
            line("ratio", f"{place} | {first} over {second}", rows[first][1] / rows[second][1], ratio, False)
    print("held until here: " + ", ".join(f"{kind} {num} of {of}" for kind, (num, of) in COUNTED.items()), flush=True)


COUNTED = {"absolute": [0, 0], "ratio": [0, 0]}  # held, judged
JUDGED: set[tuple[str, str, float]] = set()  # kind, measure and published value


def replayed(world: World, measure: str, most: int, draws: int) -> list[float]:
    """As predicted, and of each draw."""
    least = max(most, 4 * (world.concurrency or 1))
    world = replace(world, num_requests=min(least, world.num_requests or least))
    requests, known = world.requests(), known_causes(world)

    def value(own: World) -> float:
        result = own.simulate_whole(requests)
        return of_run(measure, own.summarize(result, requests), result)

    drawn_each = (value(moved(world, drawn(known, i, world.seed))) for i in range(1, draws + 1))
    return [value(world), *drawn_each]


def line(kind: str, place: str, told: float, spread: Spread, bound: bool) -> None:
    """bound: `told` is a lower bound."""
    held = told <= spread.high and (bound or spread.low <= told)
    value = kind, place.split(" | ")[2], told
    if kind == "ratio" or value not in JUDGED:
        COUNTED[kind][0] += held
        COUNTED[kind][1] += 1
    JUDGED.add(value)
    error = f"{spread.value:.4g} ({100 * (spread.value / told - 1):+.0f} %)"
    ends = f"{spread.low:.4g} to {spread.high:.4g}, {'holds' if held else 'misses'}"
    print(f"{kind} | {place} | {told:.4g} | {error} | {ends}", flush=True)


if __name__ == "__main__":
    main()
