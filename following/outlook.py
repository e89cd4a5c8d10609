"""The fleet under a window's traffic: what-ifs, capacity, and one recommendation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..planner.candidate import world_at
from ..report.table import counted
from ..results.world import World
from ..traces import Trace
from .residuals import RULE, TRAFFIC

LARGEST = 16.0  # times the traffic, in a search of the capacity; its inverse is the smallest
BISECTIONS = 3  # between the last two: they end 9 % apart


@dataclass(frozen=True)
class WhatIf:
    """The outcome of a window's traffic on a fleet."""

    name: str
    replicas: int
    attainment: float | None  # share of requests that meet the SLOs; None: no SLO on requests is given
    e2el_p90: float | None  # s
    missed: str = ""  # SLOs on the run that are missed

    def meets(self, target: float) -> bool:
        """Whether `target` of the requests meet the SLOs, and the run meets its own."""
        return not self.missed and (self.attainment is None or self.attainment >= target)


def ask(name: str, world: World, trace: Trace) -> WhatIf:
    """Replay a trace on a fleet."""
    summary = world.run(trace)
    p90, share = summary.e2el_ms.p90, summary.slo_attainment
    return WhatIf(
        name=name,
        replicas=world.replicas,
        attainment=share and round(share, 4),
        e2el_p90=p90 and round(p90 / 1e3, 4),
        missed=", ".join(verdict.slo for verdict in summary.slos if verdict.met is False),
    )


def what_ifs(world: World, trace: Trace, replicas: int) -> list[WhatIf]:
    """Replay the traffic unchanged, and with a replica less and more."""
    fleets = {"as it is": replicas, "a replica less": replicas - 1, "a replica more": replicas + 1}
    return [ask(name, world_at(world, {"replicas": num}), trace) for name, num in fleets.items() if num]


def capacity(world: World, trace: Trace, rate: float, target: float) -> float | None:
    """The traffic that the fleet takes within its SLOs (req/s), within 9 %; None for less than two requests.

    The requests are replayed at other rates than `rate`, twice as high or low as the last, then between.
    """
    if len(trace) < 2:
        return None

    def meets(factor: float) -> bool:
        return ask("", world, trace.time_scaled(1 / factor)).meets(target)

    low = 1.0
    while low < LARGEST and meets(2 * low):
        low *= 2
    while low < 2 and not meets(low):
        low /= 2
        if low * LARGEST < 1:
            return 0.0
    high = 2 * low
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if meets(middle):
            low = middle
        else:
            high = middle
    return low * rate


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    action: str  # "Do nothing." is one
    reason: str


def advice(
    outcomes: Sequence[WhatIf],
    room: float | None,
    rate: float,
    target: float,
    alarms: Mapping[str, str],
    measured: float = 1.0,
) -> Advice:
    """What to do: one more replica if the fleet misses the SLOs or its capacity is below the traffic; else nothing.

    room: the fleet's capacity (req/s), if it is known. alarms: the open ones' words, by cause. measured: the least
    share of an SLO that the server's page shows.
    """
    drifted = "; ".join(words for cause, words in alarms.items() if cause != TRAFFIC)
    if RULE in alarms:
        reason = f"{drifted}: its scheduler is not the one that --policy names"
        return Advice("Check the server's flags and version.", reason)
    if measured < target and drifted:
        reason = f"{measured:.1%} of its requests meet an SLO, and it is not as its twin: {drifted}"
        return Advice("Check the server's flags and version.", reason)
    by_name = {outcome.name: outcome for outcome in outcomes}
    now, larger = by_name["as it is"], by_name["a replica more"]
    reasons = []
    if now.attainment is not None:
        reasons.append(f"{now.attainment:.1%} of requests meet the SLOs, of {target:.1%} wanted")
    if now.missed:
        reasons.append(f"{now.missed} is missed")
    reason = "; ".join(reasons) or "no SLO is missed"
    if now.meets(target) and (room is None or room >= rate):
        return Advice("Do nothing.", reason)
    if larger.attainment is not None:
        reason += f"; with one more replica {larger.attainment:.1%} would"
    return Advice(f"Run {counted(larger.replicas, 'replica')}.", reason)
