"""The fleet under a window's traffic: what-ifs, capacity, and one recommendation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    missed: str | None = None  # SLOs on the run that are missed; None: none is given

    def meets(self, target: float) -> bool:
        """Whether `target` of the requests meet the SLOs, and the run meets its own."""
        return not self.missed and (self.attainment is None or self.attainment >= target)


def ask(name: str, world: World, trace: Trace) -> WhatIf:
    """Replay a trace on a fleet."""
    summary = world.run(trace)
    p90 = summary.e2el_ms.p90
    on_run = [verdict for verdict in summary.slos if verdict.met is not None]
    missed = ", ".join(verdict.slo for verdict in on_run if not verdict.met) if on_run else None
    share = None if summary.slo_attainment is None else round(summary.slo_attainment, 4)
    return WhatIf(name, world.replicas, share, None if p90 is None else round(p90 / 1e3, 4), missed)


def what_ifs(world: World, trace: Trace, replicas: int) -> list[WhatIf]:
    """Replay the traffic unchanged, and with a replica less and more."""
    fleets = {"as it is": replicas, "a replica less": replicas - 1, "a replica more": replicas + 1}
    return [ask(name, world_at(world, {"replicas": num}), trace) for name, num in fleets.items() if num]


def capacity(world: World, trace: Trace, rate: float, target: float) -> float | None:
    """The traffic that the fleet takes within its SLOs (req/s), within 9 %; None without an SLO.

    The requests are replayed at other rates than `rate`, twice as high or low as the last, then between.
    """
    if not world.slos or len(trace) < 2:
        return None

    def meets(factor: float) -> bool:
        return ask("", world, trace.time_scaled(1 / factor)).meets(target)

    low = 1.0
    if meets(low):
        while low < LARGEST and meets(2 * low):
            low *= 2
    else:
        low /= 2
        while not meets(low):
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

    do: str  # "Do nothing." is one
    why: str
    gain: str = ""
    evidence: str = ""


def advice(
    outcomes: Sequence[WhatIf], room: float | None, rate: float, target: float, alarms: Mapping[str, Any],
    measured: float = 1.0, rows: tuple[float, int] | None = None,
) -> Advice:  # fmt: skip
    """What to do: one more replica if the fleet misses the SLOs or its capacity is below the traffic; else nothing.

    room: the fleet's capacity (req/s), if it is known. measured: the least share of an SLO that the server's page
    shows. rows: the most requests that ran on a replica while others waited, and those that --policy allows, where it
    allows more.
    """
    drifted = "; ".join(words for cause, words in alarms.items() if cause != TRAFFIC)
    if RULE in alarms or (measured < target and drifted):
        limit = f" the limit of running requests ({rows[0]:g} while others wait, not {rows[1]})," if rows else ""
        reason = f"{measured:.1%} of its requests meet an SLO, and it is not as its twin: {drifted}"
        if RULE in alarms:
            reason = f"{drifted}: its scheduler is not the one that --policy names"
        return Advice(f"Check{limit} the server's flags and version.", reason)
    now = next((outcome for outcome in outcomes if outcome.name == "as it is"), None)
    if now is None or (now.attainment is None and now.missed is None):
        return Advice(
            "Do nothing.", "No SLO is given, so nothing can be missed." if outcomes else "No window is over yet."
        )
    larger = next(outcome for outcome in outcomes if outcome.name == "a replica more")
    share, gain = 1.0, ""
    met = f"{now.missed} is missed" if now.missed else "no SLO is missed"
    if now.attainment is not None:
        share = now.attainment
        gain = f"{share:.1%} to {larger.attainment or 0.0:.1%} of requests within the SLOs"
        met = f"{share:.1%} of requests meet the SLOs, of {target:.1%} wanted" + (f"; {met}" if now.missed else "")
    if share < target or now.missed or (room is not None and room < rate):
        return Advice(f"Run {counted(larger.replicas, 'replica')}.", met, gain, "a replay of the last two windows")
    return Advice("Do nothing.", met)
