"""A test of spare replicas: the fleet with and without them while a replica is down at the busiest time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..results.metrics import good_requests
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from .contents import asked_of
from .memo import Memo

OUTAGE = 900.0  # s; at most a quarter of the trace
SHORTEST = 0.001  # s


def lost_replica(scenario: Scenario, spare: int, memo: Memo) -> dict[str, float] | None:
    """Share of requests that meet the SLOs while a replica is lost, `with_spare` and `without`.

    `at` and `for` (s): the outage. None if no SLO judges requests, or all come at once.
    """
    slos = [slo for slo in map(Slo.parse, scenario.slos) if slo.stat is None]
    requests = scenario.requests()
    begin, length = busiest(requests)
    if not slos or length < SHORTEST:
        return None
    outage = (f"at={begin:.3f}s,replica=0,for={length:.3f}s",)

    def attainment(replicas: int) -> float:
        own = replace(scenario, replicas=replicas, failures=outage)
        found = memo.replay(lambda: asked_of(own, kind="lost"), lambda: _attainment(own, requests, slos))
        return float(found)

    return {
        "at": begin, "for": length, "with_spare": attainment(scenario.replicas + spare),
        "without": attainment(scenario.replicas),
    }  # fmt: skip


def _attainment(scenario: Scenario, requests: Trace, slos: Sequence[Slo]) -> float:
    columns = scenario.simulate_whole(requests).table.columns
    good = good_requests(columns, slos, missing_passes=scenario.missing_passes)
    assert good is not None, "an SLO is of each request"
    return float(good.mean())


def busiest(requests: Trace) -> tuple[float, float]:
    """Begin and length (s) of the stretch in which most tokens arrive."""
    arrival = requests.arrival
    length = min(OUTAGE, float(arrival[-1] - arrival[0]) / 4)
    before = np.append(0, np.cumsum(requests.input_length + requests.output_length))
    begins = np.searchsorted(arrival, arrival + length, side="right")
    return float(arrival[int(np.argmax(before[begins] - before[:-1]))]), length


def in_words(found: Mapping[str, float], goal: float) -> str:
    """goal: required share."""
    spared, plain = (f"{100 * found[name]:.1f} %" for name in ("with_spare", "without"))
    return (
        f"with a replica down for {found['for']:.0f} s from {found['at']:.0f} s on, where most tokens arrive, {spared} "
        f"of requests meet the SLOs with the spare and {plain} without it; {100 * goal:g} % is asked"
    )
