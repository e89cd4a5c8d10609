"""A plan's fleet under profiles drawn from its profile's uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..report.digits import counted
from ..results.scenario import Scenario
from .backend import Pool
from .capacity import CapacitySearch, search_of
from .ensemble import Progress, Uncertain, Values, ask
from .memo import Memo
from .plan import whole_search
from .plan_replays import Posed, fleet
from .replicate import Criterion

HOLDS = "holds"  # 1 if the draw meets the SLOs


@dataclass(frozen=True)
class Lucky(Posed):
    """A fleet at a rate, in one replication."""

    at: float = 1.0  # req/s
    index: int = 0


def uncertain_fleet(
    scenario: Posed,
    num: int,
    *,
    attainment: float,
    num_requests: int,
    pool: Pool | None = None,
    progress: Progress | None = None,
    memo: Memo | None = None,
) -> Uncertain:
    """Replay a fleet under `num` drawn profiles, one replication each, and each cause at ±1; the first criterion
    decides."""
    assert scenario.rate is not None
    short = search_of(replace(scenario, rate=None), 0.02, attainment, num_requests)
    search = fleet(whole_search(short, attainment), scenario.replicas)
    fields = {name: getattr(search.scenario, name) for name in Posed.__dataclass_fields__}
    own = Lucky(**fields, at=scenario.rate)
    name = f"{counted(scenario.replicas, 'replica')} of {scenario.policy}"
    metric = _metric(search.criteria[0])
    replay = partial(_replay, search.criteria, search.num_requests, search.block)
    found, values = ask(replay, {name: own}, num, (metric, False), pool, progress, memo, _in_replication)
    del found.intervals[name][HOLDS]
    verb = "meet" if scenario.replicas > 1 else "meets"
    answer = f"{name} {verb} the SLOs at {scenario.rate:g} req/s"
    return replace(found, answer=answer, survives=sum(v[HOLDS] for v in values[name][1:]) / num)


def _in_replication(scenario: Scenario, index: int) -> Scenario:
    assert isinstance(scenario, Lucky)
    return replace(scenario, index=index)


def _metric(criterion: Criterion) -> str:
    """Less is better."""
    if criterion.share is None:
        return f"{criterion.text.partition('=')[0]} (ms)"
    return f"requests that miss {' or '.join(map(str, criterion.slos))} (%)"


def _replay(criteria: Sequence[Criterion], num_requests: int, block: int, memo: Memo, scenario: Scenario) -> Values:
    assert isinstance(scenario, Lucky)
    search = CapacitySearch(scenario, scenario.policy, tuple(criteria), num_requests, block)
    reading = search.requests(scenario.index, memo)(scenario.at)
    shown = [
        math.nan if math.isnan(value) else 1e3 * value if criterion.share is None else 100 * (1 - value)
        for criterion, value in zip(criteria, reading.values, strict=True)
    ]
    return {**dict(zip(map(_metric, criteria), shown, strict=True)), HOLDS: float(reading.holds)}
