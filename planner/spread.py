"""How the p90s move with the spread between requests: one cause of an ensemble, at fixed scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine.errors import DsimError
from ..profiler.profile import Profile
from ..profiler.uncertainty import SPREAD, score_of_spread
from ..report.spread import no_spread
from ..results.metrics import METRICS, no_nan
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from .ensemble import replayed
from .memo import Memo

FACTORS = (0.5, 1.0, 1.5)  # of the commit model's or law's spread; the mean yield stays
MOST = 200  # requests of a replay
USUAL = ("ttft", "norm_latency", "e2el")  # if no SLO names a metric


@dataclass(frozen=True)
class Moved:
    """A policy's p90 in ms, by metric, at each of FACTORS."""

    policy: str
    spread: float  # standard deviation between requests (factor 1)
    p90_ms: dict[str, list[float]]
    num_requests: int  # replayed, of `of`
    of: int


def moved_by_spread(
    scenarios: Sequence[Scenario], requests: Trace | None = None, *, names: Sequence[str] = (), memo: Memo | None = None
) -> dict[str, Any] | None:
    """For run.json: replays of the first requests at other spreads, or why there are none.

    None if no policy draws yields. requests: default each scenario's. names: default the policies.
    """
    told = names or [scenario.policy for scenario in scenarios]
    asked = zip(told, scenarios, strict=True)
    found = [
        moved for name, scenario in asked if (moved := _of_policy(name, scenario, requests, memo or Memo())) is not None
    ]
    rows = [{**vars(moved), "p90_ms": no_nan(moved.p90_ms)} for moved in found if isinstance(moved, Moved)]
    if rows:
        return {"factors": list(FACTORS), "policies": rows}
    reasons = list(dict.fromkeys(why for why in found if isinstance(why, str)))
    return no_spread("; ".join(reasons)) if reasons else None


def beside_live(scenarios: Sequence[Scenario], requests: Trace, profile: Profile | None) -> dict[str, Any] | None:
    """For a run on a device: the twin replays its requests, or the entry says why not."""
    if all(scenario.parsed_policy().rows.commits == "tokens" for scenario in scenarios):
        return None
    if profile is None:
        why = "no profile of this device was given (--profile)"
    elif scenarios[0].ends_at_eos:
        why = "answers ended where the weights said, which the twin does not know beforehand"
    else:
        try:
            return moved_by_spread(scenarios, requests)
        except DsimError as error:
            why = str(error)
    return no_spread(why)


def _of_policy(name: str, scenario: Scenario, requests: Trace | None, memo: Memo) -> Moved | str | None:
    """The result, why there is none, or None if no yields are drawn."""
    setting = scenario.setting()
    profile, model = setting.profile, setting.drawn
    if model is None:
        return None
    if not model.request_spread:
        return f"in {profile.name} requests of {model.workload} do not differ"
    scores = [score for factor in FACTORS if (score := score_of_spread(profile, model, factor)) is not None]
    if len(scores) < len(FACTORS):
        return f"{profile.name} is sure of how requests of {model.workload} differ"
    whole = scenario.requests() if requests is None else requests
    few = whole.head(min(MOST, len(whole)))
    metrics = tuple(dict.fromkeys(Slo.parse(text).metric for text in scenario.slos)) or USUAL
    p90: dict[str, list[float]] = {metric: [] for metric in metrics if METRICS[metric].unit == "ms"}
    for score in scores:
        moved = ((SPREAD, score),) if score else ()
        varied = replace(scenario, variation=moved, slos=())
        found = replayed(varied, [f"{metric}_ms.p90" for metric in p90], memo, few)
        for metric, values in p90.items():
            values.append(float(f"{found[f'{metric}_ms.p90']:.4g}"))
    return Moved(name, model.request_spread, p90, len(few), len(whole))
