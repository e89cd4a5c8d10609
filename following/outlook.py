"""The fleet under a window's traffic: what-ifs, headroom, and one recommendation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..report.table import counted
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from .residuals import RULE, TRAFFIC

MORE = 1.3  # times the traffic, in a what-if
CLEARLY = 0.05  # share of requests by which a server and its twin differ
HOUR = 12  # windows
SOON = 60.0  # minutes until growth reaches the capacity, below which the advice is to add a replica
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
    p90 = summary.e2el_ms.p90
    on_run = [verdict for verdict in summary.slos if verdict.met is not None]
    missed = ", ".join(verdict.slo for verdict in on_run if not verdict.met) if on_run else None
    share = None if summary.slo_attainment is None else round(summary.slo_attainment, 4)
    return WhatIf(name, scenario.replicas, share, None if p90 is None else round(p90 / 1e3, 4), missed)


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


def growth(times: Sequence[float], rates: Sequence[float]) -> float:
    """The traffic's growth over the last hour (req/s a minute); 0 where it is not clear."""
    x, y = np.array(times[-HOUR:]) / 60, np.array(rates[-HOUR:])
    if len(x) < HOUR // 2:
        return 0.0
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    error = math.sqrt(float((left**2).sum()) / max(1, len(x) - 2) / float((x * x).sum()))
    return slope if abs(slope) > 2 * error else 0.0


def contradicted(slos: Mapping[str, Sequence[Sequence[float | None]]]) -> bool:
    """Whether the server meets an SLO for clearly fewer requests than its twin. slos: bounds of both shares."""
    shares = [(measured[1], twin[0]) for measured, twin in slos.values()]
    return any(own is not None and said is not None and own + CLEARLY < said for own, said in shares)


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    do: str  # "Do nothing." is one
    why: str
    gain: str = ""
    evidence: str = ""


def advice(
    outcomes: Sequence[WhatIf], room: Headroom | None, rate: float, grows: float, target: float,
    alarms: Mapping[str, Any], measured: float = 1.0, rows: tuple[float, int] | None = None, contradicts: bool = False,
) -> Advice:  # fmt: skip
    """What to do: one more replica if the fleet misses the SLOs or growth soon reaches its capacity; else nothing.

    measured: the least share of an SLO that the server's page shows. rows: the most requests that ran on a replica
    while others waited, and those that --policy allows, where it allows more. contradicts: as of `contradicted`.
    """
    drifted = "; ".join(words for cause, words in alarms.items() if cause != TRAFFIC)
    if RULE in alarms or (measured < target and (drifted or contradicts)):
        limit = f" the limit of running requests ({rows[0]:g} while others wait, not {rows[1]})," if rows else ""
        return Advice(
            f"Check{limit} the server's flags and version.",
            f"{drifted}: its scheduler is not the one that --policy names"
            if RULE in alarms
            else f"{measured:.1%} of its requests meet an SLO, and it is not as its twin: "
            + (drifted or "no alarm is open yet"),
        )  # fmt: skip
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
    if room is not None and grows > 0 and (minutes := (room.capacity - rate) / grows) < SOON:
        return Advice(
            f"Run {counted(more.replicas, 'replica')} within {max(0.0, minutes):.0f} minutes.",
            f"traffic grows by {60 * grows:.2g} req/s an hour, and the fleet takes {room.capacity:.3g} req/s",
            f"about {room.capacity * more.replicas / now.replicas:.3g} req/s within the SLOs",
            "the rates of the last hour, and a search of the fleet's capacity",
        )  # fmt: skip
    return Advice("Do nothing.", met)
