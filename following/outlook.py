"""What a window's traffic means for the fleet: what if, headroom, one recommendation, and what the twin would do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..results.metrics import no_nan
from ..results.scenario import Scenario
from ..traces import Trace
from .residuals import RULE

MORE = 1.3  # times the traffic, of a what-if
HOUR = 12  # windows
SOON = 60.0  # minutes of growth until the capacity is reached, below which a replica is to be added
PRECISION, REQUESTS, REPLICATIONS = 0.1, 1000, 2  # of a capacity: rough, for it is asked often


@dataclass(frozen=True)
class WhatIf:
    """A window's traffic on another fleet, or more of it on this one."""

    name: str
    replicas: int
    policy: str
    gpus: int
    attainment: float | None  # share of requests that meet the SLOs; None: no SLO is given
    e2el_p90: float | None  # s

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = no_nan(vars(self))
        return found


def what_ifs(scenario: Scenario, trace: Trace, replicas: int, others: Sequence[str]) -> list[WhatIf]:
    """The traffic as it is; with a replica less and more; 30 % more of it; and under other policies."""

    def ask(name: str, own: Scenario, requests: Trace) -> WhatIf:
        summary = own.run(requests)
        met = summary.slo_attainment if own.slos else math.nan
        p90 = (summary.e2el_ms.p90 or math.nan) / 1e3
        gpus = own.replicas * own.setting().profile.device.count
        return WhatIf(
            name, own.replicas, own.policy, gpus, *(None if math.isnan(x) else round(x, 4) for x in (met, p90))
        )

    now = replace(scenario, replicas=replicas)
    found = [ask("as it is", now, trace)]
    if replicas > 1:
        found.append(ask("a replica less", replace(now, replicas=replicas - 1), trace))
    found.append(ask("a replica more", replace(now, replicas=replicas + 1), trace))
    found.append(ask(f"{MORE - 1:.0%} more traffic", now, trace.time_scaled(1 / MORE)))
    return found + [ask(other, replace(now, policy=other), trace) for other in others]


@dataclass(frozen=True)
class Shadow:
    """The fleet that the twin would have run through a window, compared with the fleet in force."""

    replicas: int
    policy: str
    agrees: bool
    attainment: float  # regret: the twin's fleet's predicted share within the SLOs, less that of the fleet in force
    gpu_hours: float  # regret: of the fleet in force, less those of the twin's fleet

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def shadow(found: Sequence[WhatIf], target: float, hours: float) -> Shadow | None:
    """The fleet of those asked about with the fewest GPUs that meets the SLOs, or the best; None without SLOs.

    The fleet in force stays where none is smaller, or better by attainment where none meets them.
    """
    now, *others = [w for w in found if not w.name.endswith("traffic")]
    if now.attainment is None:
        return None

    def rank(own: WhatIf) -> tuple[bool, float, bool]:
        met = own.attainment or 0.0
        return met < target, own.gpus if met >= target else -met, own is not now

    best = min((now, *others), key=rank)
    gained = (best.attainment or 0.0) - now.attainment
    return Shadow(best.replicas, best.policy, best is now, gained, (now.gpus - best.gpus) * hours)


@dataclass(frozen=True)
class Headroom:
    """How much more traffic the fleet takes."""

    capacity: float  # req/s
    low: float  # of its interval
    high: float
    limited_by: str
    binding_slo: str
    time: float  # s since 1970, when it was asked
    version: int  # of the profile

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def headroom(
    scenario: Scenario, trace: Trace, replicas: int, target: float, folder: Path, now: float, version: int
) -> Headroom | None:
    """The fleet's capacity under its SLOs with the traffic's lengths, by the search of `dsim capacity`; None: no SLO.

    The traffic is written to a file of the folder, so that a person can ask the same again.
    """
    if not scenario.slos or len(trace) < 2:
        return None
    from ..planner.capacity import capacity  # imported here: it loads SciPy
    from ..traces.write import write

    path = write(trace, folder / "traffic.jsonl", force=True)
    own = replace(scenario, trace=str(path), replicas=replicas)
    try:
        found = capacity(
            own, precision=PRECISION, attainment=target, num_requests=max(REQUESTS, 100 * replicas),
            max_replications=REPLICATIONS, jobs=1, curve=False,
        )  # fmt: skip
    except DsimError as error:  # an SLO that holds at every rate, or at none
        if "holds at no rate" not in str(error):
            return None
        return Headroom(0.0, 0.0, 0.0, "the SLOs hold at no rate", str(error), now, version)
    return Headroom(
        found.rate.value, found.rate.low, found.rate.high, found.limited_by, found.binding_slo, now, version
    )  # fmt: skip


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


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    do: str  # "Do nothing." is one
    why: str
    flags: str = ""  # to copy
    gain: str = ""
    price: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def advice(
    found: Sequence[WhatIf], room: Headroom | None, rate: float, grows: float, target: float,
    alarms: Mapping[str, Any], hourly: float | None = None, flags: Mapping[str, str] | None = None,
) -> Advice:  # fmt: skip
    """What to do. hourly: price of a replica for an hour. flags: of other policies, to launch them."""
    if RULE in alarms:
        return Advice(
            "Check the server's flags and version.",
            f"{alarms[RULE]}, while prices and yield agree: its scheduler is not the one that --policy names.",
        )
    now = next((w for w in found if w.name == "as it is"), None)
    if now is None or now.attainment is None:
        return Advice(
            "Do nothing.", "No SLO is given, so nothing can be missed." if found else "No window is over yet."
        )
    met = f"{now.attainment:.1%} of requests meet the SLOs, of {target:.1%} wanted"
    price = "" if hourly is None else f"{hourly:g} an hour"
    more = next(w for w in found if w.name == "a replica more")
    if now.attainment < target:
        others = [w for w in found if w.policy != now.policy and (w.attainment or 0.0) >= target]
        if others:
            best = max(others, key=lambda w: w.attainment or 0.0)
            return Advice(
                f"Change the settings to {best.policy}.", met, (flags or {}).get(best.policy, ""),
                f"{now.attainment:.1%} to {best.attainment:.1%}",
            )  # fmt: skip
        return Advice(
            f"Run {more.replicas} replicas.",
            met,
            gain=f"{now.attainment:.1%} to {more.attainment or 0.0:.1%}",
            price=price,
        )
    if room is not None and grows > 0 and (minutes := (room.capacity - rate) / grows) < SOON:
        return Advice(
            f"Run {more.replicas} replicas within {max(0.0, minutes):.0f} minutes.",
            f"traffic grows by {60 * grows:.2g} req/s an hour, and the fleet takes {room.capacity:.3g} req/s",
            price=price,
        )  # fmt: skip
    less = next((w for w in found if w.name == "a replica less"), None)
    if less is not None and (less.attainment or 0.0) >= target and room is not None:
        fewer = room.capacity * less.replicas / now.replicas
        if fewer > MORE * rate:
            return Advice(
                f"{less.replicas} replicas are enough.",
                f"they meet the SLOs for {less.attainment:.1%} of requests and take about {fewer:.3g} req/s, "
                f"{fewer / rate - 1:.0%} more than came", price=f"-{price}" if price else "",
            )  # fmt: skip
    return Advice("Do nothing.", met)
