"""The spare of a plan, tried: the fleet with and without it while a replica is down in the busiest stretch."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..results.metrics import good_requests
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from .contents import asked_of
from .memo import Memo

OUTAGE = 900.0  # s that the replica is down; a quarter of a shorter trace


def lost_replica(scenario: Scenario, spare: int, memo: Memo) -> dict[str, Any] | None:
    """The share of requests that meet the SLOs with a replica lost, with `spare` replicas more and without.

    None where no SLO is of each request. at, for: of the outage, s. with_spare, without: shares.
    """
    slos = [slo for slo in map(Slo.parse, scenario.slos) if slo.stat is None]
    if not slos:
        return None
    requests = scenario.requests()
    begin, length = busiest(requests)
    found: dict[str, Any] = {"at": begin, "for": length}
    for name, replicas in (("with_spare", scenario.replicas + spare), ("without", scenario.replicas)):
        outage = f"at={begin:.3f}s,replica=0,for={length:.3f}s"
        own = replace(scenario, replicas=replicas, failures=(outage,))

        def met(own: Scenario = own) -> float:
            columns = own.simulate_whole(requests).table.columns
            good = good_requests(columns, slos, missing_passes=own.missing_passes)
            assert good is not None, "an SLO is of each request"
            return float(good.mean())

        found[name] = memo.replay(lambda own=own: asked_of(own, kind="lost"), met)  # type: ignore[misc]
    return found


def busiest(requests: Trace) -> tuple[float, float]:
    """The stretch in which most tokens arrive: its begin and its length, s."""
    arrival = requests.arrival
    length = min(OUTAGE, float(arrival[-1] - arrival[0]) / 4)
    before = np.append(0, np.cumsum(requests.input_length + requests.output_length))
    begins = np.searchsorted(arrival, arrival + length, side="right")
    return float(arrival[int(np.argmax(before[begins] - before[:-1]))]), length


def note(found: dict[str, Any], goal: float) -> str:
    """It in words."""
    spared, plain = (f"{100 * found[name]:.1f} %" for name in ("with_spare", "without"))
    return (
        f"with a replica down for {found['for']:.0f} s from {found['at']:.0f} s on, where most tokens arrive, {spared} "
        f"of requests meet the SLOs with the spare and {plain} without it; {100 * goal:g} % is asked"
    )
