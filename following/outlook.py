"""The fleet under a window's traffic: what-ifs, headroom, and one recommendation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..report.digits import counted
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from .residuals import RULE, TRAFFIC

MORE = 1.3  # times the traffic, in a what-if
PRECISION, REPLICATIONS = 0.1, 4  # of a capacity: rough, because it runs hourly


@dataclass(frozen=True)
class WhatIf:
    """The outcome of a window's traffic on another fleet, or of more traffic on this one."""

    name: str
    replicas: int
    attainment: float | None  # share of requests that meet the SLOs; None: no SLO on requests is given
    e2el_p90: float | None  # s
    missed: str | None = None  # SLOs on the run that are missed; None: none is given


def ask(name: str, scenario: Scenario, trace: Trace) -> WhatIf:
    """Replay a trace on a fleet."""
    summary = scenario.run(trace)
    met = summary.slo_attainment if scenario.slos else math.nan
    p90 = (summary.e2el_ms.p90 or math.nan) / 1e3
    on_run = [verdict for verdict in summary.slos if verdict.met is not None]
    missed = ", ".join(verdict.slo for verdict in on_run if not verdict.met) if on_run else None
    share, e2el = (None if math.isnan(x) else round(x, 4) for x in (met, p90))
    return WhatIf(name, scenario.replicas, share, e2el, missed)


def what_ifs(scenario: Scenario, trace: Trace, replicas: int) -> list[WhatIf]:
    """Replay the traffic unchanged, with a replica less and more, and with 30 % more of it."""
    now = replace(scenario, replicas=replicas)
    outcomes = [ask("as it is", now, trace)]
    if replicas > 1:
        outcomes.append(ask("a replica less", replace(now, replicas=replicas - 1), trace))
    outcomes.append(ask("a replica more", replace(now, replicas=replicas + 1), trace))
    return [*outcomes, ask(f"{MORE - 1:.0%} more traffic", now, trace.time_scaled(1 / MORE))]


@dataclass(frozen=True)
class Headroom:
    """How much more traffic the fleet takes."""

    capacity: float  # req/s
    low: float  # of its interval
    high: float
    limited_by: str
    binding_slo: str
    time: float  # s since 1970, of the question
    version: int  # of the profile


def search_headroom(
    scenario: Scenario, attainment: float, folder: Path, now: float, version: int, trace: Trace
) -> dict[str, Any]:
    """The fleet's headroom as JSON, for the background.

    The traffic is written to a file of the folder, so that the user can repeat the question.
    """
    if not scenario.slos or len(trace) < 2:
        return {}
    from ..traces.write import write

    file = write(trace, folder / "traffic.jsonl", force=True)
    room = headroom(replace(scenario, trace=str(file)), attainment, now, version)
    return {"headroom": room and vars(room)}


def headroom(scenario: Scenario, target: float, now: float, version: int) -> Headroom | None:
    """The fleet's capacity under its SLOs with its trace's lengths, by the search of `dsim capacity`."""
    from ..planner.capacity import PER_REPLICA, capacity  # imported here: it loads SciPy, as the next
    from ..planner.replicate import criteria_of, to_allow_a_miss

    least = to_allow_a_miss(criteria_of([Slo.parse(text) for text in scenario.slos], target))
    try:
        result = capacity(
            scenario, precision=PRECISION, attainment=target, num_requests=max(PER_REPLICA * scenario.replicas, least),
            max_replications=REPLICATIONS, jobs=1, curve=False,
        )  # fmt: skip
    except DsimError as error:  # an SLO holds at every rate, or at none
        if "holds at no rate" not in str(error):
            return None
        return Headroom(0.0, 0.0, 0.0, "the SLOs hold at no rate", str(error), now, version)
    return Headroom(
        result.rate.value, result.rate.low, result.rate.high, result.limited_by, result.binding_slo, now, version
    )


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    do: str  # "Do nothing." is one
    why: str
    gain: str = ""
    evidence: str = ""


def advice(
    outcomes: Sequence[WhatIf], room: Headroom | None, rate: float, target: float, alarms: Mapping[str, Any],
    measured: float = 1.0, rows: tuple[float, int] | None = None,
) -> Advice:  # fmt: skip
    """What to do: one more replica if the fleet misses the SLOs or its capacity is below the traffic; else nothing.

    measured: the least share of an SLO that the server's page shows. rows: the most requests that ran on a replica
    while others waited, and those that --policy allows, where it allows more.
    """
    drifted = "; ".join(words for cause, words in alarms.items() if cause != TRAFFIC)
    if RULE in alarms or (measured < target and drifted):
        limit = f" the limit of running requests ({rows[0]:g} while others wait, not {rows[1]})," if rows else ""
        why = f"{measured:.1%} of its requests meet an SLO, and it is not as its twin: {drifted}"
        if RULE in alarms:
            why = f"{drifted}: its scheduler is not the one that --policy names"
        return Advice(f"Check{limit} the server's flags and version.", why)
    now = next((outcome for outcome in outcomes if outcome.name == "as it is"), None)
    if now is None or (now.attainment is None and now.missed is None):
        return Advice(
            "Do nothing.", "No SLO is given, so nothing can be missed." if outcomes else "No window is over yet."
        )
    more = next(outcome for outcome in outcomes if outcome.name == "a replica more")
    share, gain = 1.0, ""
    met = f"{now.missed} is missed" if now.missed else "no SLO is missed"
    if now.attainment is not None:
        share = now.attainment
        gain = f"{share:.1%} to {more.attainment or 0.0:.1%} of requests within the SLOs"
        met = f"{share:.1%} of requests meet the SLOs, of {target:.1%} wanted" + (f"; {met}" if now.missed else "")
    if share < target or now.missed or (room is not None and room.capacity < rate):
        return Advice(f"Run {counted(more.replicas, 'replica')}.", met, gain, "a replay of the last two windows")
    return Advice("Do nothing.", met)
