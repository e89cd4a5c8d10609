"""Fixed or scaled: one setting on a trace's own arrivals, with the fewest fixed replicas and with each scaler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np

from ..engine.errors import DsimError, cut
from ..results.metrics import COMPLETED, good_requests
from ..results.scaling import behaviour
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..sim.scalers import FIXED
from ..traces import Trace
from .contents import asked_of
from .fewest import Fewest
from .memo import Memo

INTERVAL = 900.0  # s of arrivals whose attainment counts on its own
FEW = 20  # arrivals: an interval of fewer says nothing
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # that the oracle tries


@dataclass(frozen=True)
class Scaled:
    """A fleet of a trace: fixed, or with one scaler."""

    scaler: str  # its SPEC
    replicas: int  # when the run begins
    attainment: float  # share of arrivals that meet all SLOs of a request
    worst: float  # ... of the worst interval; NaN: no interval has enough arrivals
    gpu_hours: float  # paid for
    flaps: int
    rises: int  # of the load
    answered: int  # ... after which a replica came before the next
    reaction: float  # s, mean of these; NaN: none

    def to_json(self) -> dict[str, Any]:
        """Plain values; null for NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """The fewest fixed replicas that meet the goal, and the same setting with each scaler."""

    goal: float  # attainment
    fixed: Scaled
    scaled: tuple[Scaled, ...]

    @property
    def best(self) -> Scaled:
        """The cheapest that meets the goal, without the oracle: no operator has it."""
        real = [one for one in self.scaled if not one.scaler.startswith("oracle")]
        good = [one for one in (self.fixed, *real) if one.attainment >= self.goal]
        return min(good, key=lambda one: one.gpu_hours, default=self.fixed)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [one.to_json() for one in (self.fixed, *self.scaled)]
        return {"goal": self.goal, "rows": rows, "best": self.best.scaler}


def compare_scalers(
    scenario: Scenario, scalers: Sequence[str] | None = None, *, startup: float | str = 0.0, goal: float = 0.99,
    most: int = 64, memo: Memo | None = None, progress: Callable[[str], object] = lambda doing: None,
) -> Comparison:  # fmt: skip
    """Replay a scenario of one pool with each scaler, by default the shipped ones. startup: of a replica.

    Every run begins with the fewest fixed replicas, at most `most`, whose attainment is the goal. DsimError without an
    SLO of a request, or where `most` do not reach the goal.
    """
    slos = [slo for slo in map(Slo.parse, scenario.slos) if slo.stat is None]
    if not slos:
        raise DsimError(f"SLOs are {cut(', '.join(scenario.slos)) or 'none'}, expected one of each request, as ttft=2s")
    runs = _Runs(scenario, startup, slos, memo or Memo(), progress)
    size = Fewest(most=most, stride=2.0)
    while size.open:
        size.decide(runs(FIXED, size.at).attainment >= goal, None)
    if size.replicas is None:
        reached = runs(FIXED, most).attainment
        raise DsimError(f"{most} replicas meet the SLOs for {reached:.1%} of requests, expected {goal:.1%}")
    fixed = runs(FIXED, size.replicas)
    names = defaults(slos, size.replicas, most, runs) if scalers is None else list(scalers)
    found = [runs(name, size.replicas) for name in names]
    if scalers is None:
        oracles = [runs(f"oracle,load={load},most={most}", size.replicas) for load in LOADS]
        met = [one for one in oracles if one.attainment >= goal]
        found.append(min(met, key=lambda one: one.gpu_hours) if met else oracles[0])
    return Comparison(goal, fixed, tuple(found))


def defaults(slos: Sequence[Slo], replicas: int, most: int, runs: "_Runs") -> list[str]:
    """The shipped scalers but for the oracle, told the SLOs. hpa holds the load of the fixed fleet's replicas."""
    bounds = {slo.metric: slo.bound for slo in slos}
    itl = next((bounds[name] for name in ("tpot", "itl", "norm_latency", "tpot_chunk") if name in bounds), None)
    told = "".join(f",{name}={value:g}" for name, value in (("ttft", bounds.get("ttft")), ("itl", itl)) if value)
    budget = most * runs.gpus
    return [
        f"hpa,target={max(1.0, runs.busy(replicas)):.3g},most={most}",
        f"dynamo-load,mode=sla{told},budget={budget}",
        f"dynamo-load,mode=throughput,budget={budget}",
        f"dynamo-load,mode=latency,budget={budget}",
        f"dynamo-load,mode=sla{told},budget={budget},throughput_every=180",
        f"dynamo-throughput{told},budget={budget}",
        f"wva-v2,most={most}",
        f"queued-forwards,most={most}",
    ]


class _Runs:
    """Replays of one setting, each once."""

    def __init__(
        self, scenario: Scenario, startup: float | str, slos: Sequence[Slo], memo: Memo,
        progress: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._scenario, self._startup, self._slos = scenario, startup, slos
        self._memo, self._progress = memo, progress
        self._requests: Trace | None = None
        self._known: dict[tuple[str, int], Mapping[str, Any]] = {}
        self.gpus = scenario.setting().profile.device.count  # of a replica

    def __call__(self, scaler: str, replicas: int) -> Scaled:
        known: dict[str, Any] = {n: nan if v is None else v for n, v in self._found(scaler, replicas).items()}
        del known["busy"]
        return Scaled(scaler, replicas, **known)

    def busy(self, replicas: int) -> float:
        """Requests that wait or run at a replica of the fixed fleet, in the mean."""
        return float(self._found(FIXED, replicas)["busy"])

    def _found(self, scaler: str, replicas: int) -> Mapping[str, Any]:
        if (scaler, replicas) not in self._known:
            self._progress(f"{replicas} replicas" if scaler == FIXED else scaler.partition(",")[0])
            startup = 0.0 if scaler == FIXED else self._startup
            own = replace(self._scenario, scaler=scaler, replicas=replicas, startup=startup)
            self._known[scaler, replicas] = self._memo.replay(
                lambda: asked_of(own, kind="scaled", interval=INTERVAL), lambda: self._replay(own)
            )
        return self._known[scaler, replicas]

    def _replay(self, own: Scenario) -> dict[str, Any]:
        if self._requests is None:
            self._requests = self._scenario.requests()
        result = own.simulate_whole(self._requests)
        columns = result.table.columns
        good = good_requests(columns, self._slos, missing_passes=own.missing_passes)
        assert good is not None
        arrival = columns["arrival"]
        paid = own.replicas * result.totals.end if result.replica_time is None else result.replica_time
        did = behaviour(result.changes, arrival)
        worst = _worst(arrival, good)
        took = (columns["finish"] - arrival)[columns["status"] == COMPLETED].sum()
        return {
            "attainment": float(good.mean()), "worst": None if isnan(worst) else worst,
            "gpu_hours": paid * self.gpus / 3600, "flaps": int(did.flaps), "rises": did.rises, "answered": did.answered,
            "reaction": None if isnan(did.reaction) else did.reaction,
            "busy": float(took / max(result.totals.end, 1e-9) / own.replicas),
        }  # fmt: skip


def _worst(arrival: Any, good: Any) -> float:
    """The attainment of the worst interval."""
    place = ((arrival - arrival.min()) / INTERVAL).astype(np.int64)
    many, met = np.bincount(place), np.bincount(place, good)
    return float((met[many >= FEW] / many[many >= FEW]).min(initial=1.0)) if (many >= FEW).any() else nan
