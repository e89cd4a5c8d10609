"""How the 90th percentiles move with the spread between requests, which decides them and which few have measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..profiler.uncertainty import SPREAD, score_of_spread
from ..report.metrics import METRICS, no_nan
from ..report.slo import Slo
from ..sim.twin import commit_model_of
from ..traces import Trace
from .scenario import Scenario

FACTORS = (0.5, 1.0, 1.5)  # of the commit model's spread, its mean yield kept
MOST = 200  # requests of a replay: it is to cost no more than a glance
USUAL = ("ttft", "norm_latency", "e2el")  # where no SLO names a metric


@dataclass(frozen=True)
class Moved:
    """A policy's 90th percentiles in ms, by metric, at each of FACTORS."""

    policy: str
    spread: float  # standard deviation of the log-odds between requests, at 1
    p90_ms: dict[str, list[float]]


def moved_by_spread(scenarios: Sequence[Scenario], requests: Trace) -> dict[str, Any] | None:
    """The entry of run.json: replays of the first requests at other spreads; None where no policy draws any.

    Ctrl-C raises KeyboardInterrupt: a part of a replay says nothing.
    """
    few = requests.head(min(MOST, len(requests)))
    found = [told for scenario in scenarios if (told := _of_policy(scenario, few)) is not None]
    if not found:
        return None
    rows = [{"policy": told.policy, "spread": told.spread, "p90_ms": no_nan(told.p90_ms)} for told in found]
    return {"factors": list(FACTORS), "num_requests": len(few), "of": len(requests), "policies": rows}


def _of_policy(scenario: Scenario, requests: Trace) -> Moved | None:
    profile = scenario.loaded_profile()
    model = commit_model_of(scenario.parsed_policy(), profile, scenario.workload)
    if model is None or not model.request_spread:
        return None
    scores = [score for factor in FACTORS if (score := score_of_spread(profile, model, factor)) is not None]
    if len(scores) < len(FACTORS):
        return None
    names = tuple(dict.fromkeys(Slo.parse(text).metric for text in scenario.slos)) or USUAL
    p90: dict[str, list[float]] = {name: [] for name in names if METRICS[name].unit == "ms"}
    for score in scores:
        moved = ((SPREAD, score),) if score else ()
        varied = replace(scenario, variation=moved, slos=())
        result = varied.simulate(requests)
        if result.interrupted:
            raise KeyboardInterrupt
        summary = varied.summarize(result, requests)
        for name, values in p90.items():
            values.append(float(f"{getattr(summary, f'{name}_ms').p90:.4g}"))
    return Moved(scenario.policy, model.request_spread, p90)
