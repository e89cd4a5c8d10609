"""How often an ensemble's 90 % interval holds the truth: `python benchmarks/coverage.py [synthetic] [EXPERIMENT ...]`.

synthetic: truths whose causes are drawn apart from the ensemble's: by the stated widths, or as published: one of two
codes with different floors, a yield log-uniform between the published ratio and its inverse, a measured front end, the
rest as stated.

EXPERIMENT: rows of research/reproduce with a published value, without memory and capacities, replayed as predicted and
under drawn profiles (as `--ensemble`), without the causes of NEW and with all. A published lower bound (`1800+`) is
contained if the interval reaches it.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dsim.engine.errors import DsimError
from dsim.engine.latency import Features
from dsim.planner.ensemble import EOS, Scores, drawn, interval, known_causes, moved
from dsim.profiler import uncertainty as u
from dsim.profiler.canvas_law import mean_forwards
from dsim.research.reproduce.experiment import AT_LEAST, PREDICTED, read, shipped
from dsim.research.reproduce.measure import OVER, of_run
from dsim.research.reproduce.run import SeededRun
from dsim.results.scenario import Scenario
from dsim.sim.setting import Setting

NEW = (u.IMPLEMENTATION, u.WORKLOAD, u.FRONT_END, EOS)
DRAWS, TRUTHS, ROW_DRAWS = 19, 400, 199
FRONT_ENDS = (0.0, 0.0048, 0.025, 0.037, 0.044)  # s, measured means between client and engine


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", metavar="synthetic|EXPERIMENT")
    asked.add_argument("--most-requests", type=int, help="of a replay, or four times its clients where those are more")
    options = asked.parse_args()
    for name in options.names or ["synthetic", *shipped()]:
        if name == "synthetic":
            synthetic()
        else:
            published(name, options.most_requests)


def synthetic() -> None:
    """By profile."""
    for profile, policy in (("l40s-llada-8b", "vanilla"), ("h200x2-diffusiongemma", "vllm-diffusion")):
        setting = Scenario("azure-conv", policy=policy, profile=profile).setting()
        known = u.causes(setting.profile, setting.drawn)
        names = [cause.name for cause in known]
        rng, widths, held = np.random.default_rng(11), [], {"stated": 0, "published": 0}
        for i in range(TRUTHS):
            found = interval([math.nan, *(seconds(setting, drawn(known, k, i)) for k in range(1, DRAWS + 1))])
            for kind, scores in (("stated", drawn(known, 0, i)), ("published", truth(names, rng))):
                held[kind] += found.low <= seconds(setting, scores) <= found.high
            widths.append(found.high / found.low)
        shares = ", ".join(f"{100 * num / TRUTHS:.0f} % of {kind}" for kind, num in held.items())
        print(f"synthetic | {profile} | {shares} | high over low {np.median(widths):.2f}", flush=True)


def truth(names: Sequence[str], rng: np.random.Generator) -> Scores:
    """Scores; one of a list of published values."""
    scores = {name: float(rng.normal()) for name in names}
    ratio = math.log(u.FLOORS[1] / u.FLOORS[0])
    if u.IMPLEMENTATION in scores:
        scores[u.IMPLEMENTATION] = float(rng.choice([-ratio, 0.0, 0.0, ratio])) / u.FLOOR_SPREAD
    if u.WORKLOAD in scores:
        scores[u.WORKLOAD] = float(rng.uniform(-1, 1)) * math.log(u.YIELD_RATIO) / u.YIELD_SPREAD
    if u.FRONT_END in scores:
        share = float(rng.choice(FRONT_ENDS)) / u.MOST_FRONT_END
        scores[u.FRONT_END] = float(np.clip(u.ndtri(np.clip(share, 1e-6, 1 - 1e-6)), -5, 5))
    return tuple(scores.items())


def seconds(setting: Setting, scores: Scores) -> float:
    """s of a lone request: front end, and one canvas or 128 single-token passes of 512 positions."""
    profile = u.varied(setting.profile, scores, setting.drawn)
    steps = 128.0 if setting.law is None else mean_forwards(profile.canvas_laws[0]) + 1.0
    return profile.frontend + steps * profile.latency.step(Features(512, 0, 512 * 512, 512, 512, 512, 0))


def published(name: str, most: int | None) -> None:
    """Each predicted row's interval, and whether it contains the published value."""
    experiment = read(name)
    for series in experiment.series:
        for run in series.runs:
            for measure in series.measures:
                told = series.published.get(measure, {}).get(run.at)
                if told is None or OVER in measure or series.status(measure, told) not in (PREDICTED, AT_LEAST):
                    continue
                if measure in ("peak_memory", "capacity"):
                    continue
                scenario = SeededRun(run, (measure,), 0).scenario
                if most is not None:
                    least = max(most, 4 * (scenario.concurrency or 1))
                    scenario = replace(scenario, num_requests=min(least, scenario.num_requests or least))
                try:
                    bound = series.status(measure, told) == AT_LEAST
                    line(f"{name} | {series.name} | {run.at} | {measure}", scenario, measure, told, bound)
                except DsimError as error:
                    print(f"{name} | {series.name} | {run.at} | {measure} | failed: {error}", flush=True)


def line(place: str, scenario: Scenario, measure: str, told: float, bound: bool) -> None:
    """bound: `told` is a lower bound."""
    requests = scenario.requests()

    def value(own: Scenario) -> float:
        result = own.simulate_whole(requests)
        return of_run(measure, own.summarize(result, requests), result)

    at, known = value(scenario), known_causes(scenario)
    cells = []
    for of in ([cause for cause in known if cause.name not in NEW], list(known)):
        # Draws are keyed by causes' names: both intervals have the same luck.
        draws = range(1, ROW_DRAWS + 1)
        found = interval([at, *(value(moved(scenario, drawn(of, i, scenario.seed))) for i in draws)])
        holds = told <= found.high and (bound or found.low <= told)
        cells.append(f"{found.low:.4g} to {found.high:.4g}, {'holds' if holds else 'misses'}")
    ends = {c.name: [value(moved(scenario, ((c.name, score),))) for score in (-1.0, 1.0)] for c in known}
    swings = {name: abs(math.log(high / low)) for name, (low, high) in ends.items()}
    top = max(swings, key=lambda name: swings[name], default="none")
    print(f"{place} | {told:g} | {at:.4g} ({100 * (at / told - 1):+.0f} %) | {' | '.join(cells)} | {top}", flush=True)


if __name__ == "__main__":
    main()
