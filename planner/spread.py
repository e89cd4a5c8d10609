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
    num_requests: int  # that were replayed, of
    of: int


def moved_by_spread(
    scenarios: Sequence[Scenario], requests: Trace | None = None, *, names: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The entry of run.json: replays of the first requests at other spreads; None where no policy draws any.

    requests: of all scenarios; None: each has its own. names: to tell the scenarios by, their policies by default.
    Ctrl-C raises KeyboardInterrupt: a part of a replay says nothing.
    """
    told = names or [scenario.policy for scenario in scenarios]
    asked = zip(told, scenarios, strict=True)
    found = [moved for name, scenario in asked if (moved := _of_policy(name, scenario, requests)) is not None]
    if not found:
        return None
    rows = [{**vars(moved), "p90_ms": no_nan(moved.p90_ms)} for moved in found]
    return {"factors": list(FACTORS), "policies": rows}


def _of_policy(name: str, scenario: Scenario, requests: Trace | None) -> Moved | None:
    profile = scenario.loaded_profile()
    model = commit_model_of(scenario.parsed_policy(), profile, scenario.workload)
    if model is None or not model.request_spread:
        return None
    scores = [score for factor in FACTORS if (score := score_of_spread(profile, model, factor)) is not None]
    if len(scores) < len(FACTORS):
        return None
    whole = scenario.requests() if requests is None else requests
    few = whole.head(min(MOST, len(whole)))
    metrics = tuple(dict.fromkeys(Slo.parse(text).metric for text in scenario.slos)) or USUAL
    p90: dict[str, list[float]] = {metric: [] for metric in metrics if METRICS[metric].unit == "ms"}
    for score in scores:
        moved = ((SPREAD, score),) if score else ()
        varied = replace(scenario, variation=moved, slos=())
        result = varied.simulate(few)
        if result.interrupted:
            raise KeyboardInterrupt
        summary = varied.summarize(result, few)
        for metric, values in p90.items():
            values.append(float(f"{getattr(summary, f'{metric}_ms').p90:.4g}"))
    return Moved(name, model.request_spread, p90, len(few), len(whole))
