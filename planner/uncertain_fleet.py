"""A plan's fleet and its rivals under profiles drawn from their uncertainty: sizes, costs, and the ratio of costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..report.table import counted
from ..results.spread import Uncertain
from ..results.world import World
from .candidates import PlanCandidate
from .capacity import CapacitySearch, search_of
from .ensemble import Draw, Values, ask, interval, paired
from .plan import fleet_worlds
from .plan_replays import PRECISION, fleet
from .plan_result import Fleet, Planned
from .race import Fewest
from .replicate import Criterion, Reading

REPLICAS, COST, GPUS = "replicas needed", "cost an hour", "GPUs needed"
MOST_TIMES = 4  # the planned replicas, where a draw's search ends


def plan_ensemble(
    planned: Planned, world: World, candidates: Sequence[PlanCandidate], num: int, **options: Any
) -> Uncertain:
    """The recommendation and its rivals under `num` drawn profiles. options: see `uncertain_fleets`."""
    fleets = rivals(planned)
    worlds = fleet_worlds(replace(world, rate=planned.rate), candidates, list(fleets.values()))
    weights = [replica_cost(planned, row) for row in fleets.values()]
    size = {"num_requests": planned.num_requests, "spare": planned.recommended.spare}
    by_name, cost = dict(zip(fleets, worlds, strict=True)), (GPUS, COST)[planned.priced]
    return uncertain_fleets(by_name, weights, num, **size, cost=cost, **options)


def rivals(planned: Planned) -> dict[str, Fleet]:
    """The recommendation, the runner-up, and the next GPU's cheapest fleet; dropped ones of an estimated size."""
    best, *rivals = planned.ranking
    dropped = [replace(row, replicas=row.about or row.least) for row in planned.left_out if row.about or row.least]
    rivals += sorted(dropped, key=lambda row: (row.replicas or 0) * replica_cost(planned, row))
    another_gpu = [row for row in rivals if row.device != best.device]
    rows = (best, *rivals[:1], *another_gpu[:1])
    return {f"{counted(row.replicas or 0, 'replica')} of {row.name}": row for row in rows}


def replica_cost(planned: Planned, fleet: Fleet) -> float:
    """Of an hour, or in GPUs without prices."""
    if not planned.priced:
        return fleet.gpus_per_replica
    return fleet.gpus_per_replica * (fleet.price or 0.0)


def uncertain_fleets(
    fleets: Mapping[str, World],
    weights: Sequence[float],
    num: int,
    *,
    attainment: float,
    num_requests: int,
    spare: int = 0,
    cost: str = COST,
    **options: Any,
) -> Uncertain:
    """Search each fleet's size under `num` drawn profiles, one replication each, and move each cause of the first.

    fleets: by name, at one rate, the recommended one first. weights: the cost of a replica of each. cost: its name. The
    first criterion decides. options: pool, progress and memo of `ask`.
    """
    best, *runners_up = fleets
    first, rate = fleets[best].replicas, fleets[best].rate or 0.0
    unpaced = {name: replace(world.located(), rate=None) for name, world in fleets.items()}
    search = search_of(unpaced[best], PRECISION, attainment, num_requests)
    judged = _metric(search.criteria[0]), False
    question = {**search.inputs, "rate": rate}
    replay = partial(sized, search, rate)
    drawn, values = ask(replay, unpaced, num, judged, question=question, moving=1, **options)
    costs = {
        name: [{cost: (draw[REPLICAS] + spare) * weight} for draw in values[name]]
        for name, weight in zip(fleets, weights, strict=True)
    }
    for name, draws in costs.items():
        drawn.intervals[name][cost] = interval([draw[cost] for draw in draws])
    return replace(
        drawn,
        answer=f"{best} {('meet', 'meets')[first == 1]} the SLOs at {rate:g} req/s",
        survives=sum(draw[REPLICAS] <= first for draw in values[best][1:]) / num,
        best=best,
        ratios={name: paired(costs[best], costs[name]) for name in runners_up},
    )


def _metric(criterion: Criterion) -> str:
    """Less is better."""
    if criterion.share is None:
        return f"{criterion.text.partition('=')[0]} (ms)"
    return f"requests that miss {' or '.join(map(str, criterion.slos))} (%)"


def sized(model: CapacitySearch, rate: float, draw: Draw) -> Values:
    """The criteria on the planned fleet, and the fewest replicas that meet them; infinite: the search ended.

    model: a search of the same traffic. The draw's number is its replication; in 0 the size is the plan's.
    """
    world, index = draw
    search = replace(model, world=world)

    def read(replicas: int) -> Reading:
        return fleet(search, replicas).requests(index)(rate)

    reading = read(world.replicas)
    values = {}
    for criterion, value in zip(search.criteria, reading.values, strict=True):
        values[_metric(criterion)] = 100 * (1 - value) if criterion.share is not None else 1e3 * value
    size = Fewest(limit=MOST_TIMES * world.replicas, trial=world.replicas, stride=2.0)
    size.decide(reading.holds)
    while index and size.open:
        size.decide(read(size.trial).holds)
    values[REPLICAS] = float(world.replicas) if index == 0 else float(size.replicas or math.inf)
    return values
