"""Fixed or scaled: one setting on a trace, with the fewest fixed replicas and with each scaler."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.errors import DsimError, cut
from ..results.metrics import COMPLETED, good_requests
from ..results.scaling import behaviour
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..sim.scalers import FIXED
from .backend import Pool
from .contents import Json, asked_of
from .fewest import Fewest
from .memo import Memo

INTERVAL = 900.0  # s, of attainment over time
FEW = 20  # arrivals needed to judge an interval
ORACLE = "oracle"
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the oracle
FIRST_LOADS = (0.7, 0.9)  # in parallel

Progress = Callable[[str, int, int], object]  # fleet, replays done, replays expected


@dataclass(frozen=True)
class Scaled:
    """A run of a fixed fleet or a scaler."""

    scaler: str  # SPEC
    replicas: int  # at the start
    attainment: float  # share of arrivals that meet all SLOs
    worst: float  # ... in the worst interval; NaN: too few arrivals
    gpu_hours: float  # paid
    flaps: int
    rises: int  # of the load
    answered: int  # rises followed by a new serving replica before the next rise
    reaction: float  # s, mean time until then; NaN: none
    intervals: tuple[float, ...] = ()  # attainment; NaN: too few arrivals
    changes: tuple[tuple[float, int, int], ...] = ()  # s, serving replicas, paid replicas

    def to_json(self) -> Json:
        """NaN becomes null."""
        lists = {"intervals": list(map(_plain, self.intervals)), "changes": list(map(list, self.changes))}
        return {name: _plain(value) for name, value in (asdict(self) | lists).items()}


@dataclass(frozen=True)
class Comparison:
    """The fewest fixed replicas that meet the goal, and each scaler from there."""

    goal: float  # attainment
    fixed: Scaled
    scaled: tuple[Scaled, ...]
    arrivals: tuple[int, ...] = ()  # by interval

    @property
    def best(self) -> Scaled:
        """The cheapest run that meets the goal, without the oracle, which knows the future."""
        real = [one for one in self.scaled if not one.scaler.startswith(ORACLE)]
        good = [one for one in (self.fixed, *real) if one.attainment >= self.goal]
        return min(good, key=lambda one: one.gpu_hours, default=self.fixed)

    def to_json(self) -> Json:
        rows = [one.to_json() for one in (self.fixed, *self.scaled)]
        return {
            "goal": self.goal, "best": self.best.scaler, "rows": rows, "interval": INTERVAL,
            "arrivals": list(self.arrivals),
        }  # fmt: skip


def compare_scalers(
    scenario: Scenario, scalers: Sequence[str] | None = None, *, startup: float | str = 0.0, goal: float = 0.99,
    most: int = 64, guess: int = 1, memo: Memo | None = None, pool: Pool | None = None,
    progress: Progress = lambda doing, done, of: None,
) -> Comparison:  # fmt: skip
    """Replay a scenario of one pool with each scaler, by default the shipped ones.

    Runs begin with the fewest fixed replicas, at most `most`, that reach the goal; guess: their number. startup: of a
    replica. The oracle is added at the highest of LOADS that meets the goal. DsimError if no SLO judges requests, or
    `most` replicas miss the goal.
    """
    slos = [slo for slo in map(Slo.parse, scenario.slos) if slo.stat is None]
    if not slos:
        raise DsimError(f"SLOs are {cut(', '.join(scenario.slos)) or 'none'}, expected one of each request, as ttft=2s")
    runs = _Runs(scenario, startup, slos, memo or Memo(), pool or Pool(jobs=1), progress)
    size = Fewest(most=most, at=min(guess, most), stride=2.0)
    if size.at > 1:
        runs([(FIXED, size.at), (FIXED, size.at - 1)])  # in parallel
    while size.open:
        size.decide(runs.one(FIXED, size.at).attainment >= goal)
    if size.replicas is None:
        reached = runs.one(FIXED, most).attainment
        raise DsimError(f"{most} replicas meet the SLOs for {reached:.1%} of requests, expected {goal:.1%}")
    fixed = runs.one(FIXED, size.replicas)
    names = defaults(slos, most, runs.busy(size.replicas), runs.gpus) if scalers is None else list(scalers)
    oracles = [] if any(name.partition(",")[0] == ORACLE for name in names) else [_oracle(x, most) for x in FIRST_LOADS]
    found = runs([(name, size.replicas) for name in (*oracles, *names)])[len(oracles) :]
    if oracles:
        found.append(_best_oracle(runs, size.replicas, most, goal))
    return Comparison(goal, fixed, tuple(found), tuple(_arrivals(scenario.requests().arrival).tolist()))


def defaults(slos: Sequence[Slo], most: int, busy: float, gpus: int) -> list[str]:
    """Shipped scalers without the oracle, bounded by the SLOs.

    busy: mean requests at a fixed replica, hpa's target. gpus: per replica.
    """
    bounds, budget = bounds_of(slos), most * gpus
    return [
        f"hpa,target={max(1.0, busy):.3g},most={most}",
        f"dynamo-load,mode=sla{bounds},budget={budget},throughput_every=180",
        f"dynamo-throughput{bounds},budget={budget}",
        f"wva-v2,most={most}",
        f"queued-forwards,most={most}",
    ]


def bounds_of(slos: Sequence[Slo]) -> str:
    """Fields `ttft` and `itl` of Dynamo's scalers."""
    bounds = {slo.metric: slo.bound for slo in slos}
    itl = next((bounds[name] for name in ("tpot", "itl", "norm_latency", "tpot_chunk") if name in bounds), None)
    return "".join(f",{name}={value:g}" for name, value in (("ttft", bounds.get("ttft")), ("itl", itl)) if value)


def _oracle(load: float, most: int) -> str:
    return f"{ORACLE},load={load},most={most}"


def _best_oracle(runs: "_Runs", replicas: int, most: int, goal: float) -> Scaled:
    """The oracle at the highest load that meets the goal, by bisection; else at the lowest."""
    good, bad = -1, len(LOADS)
    tried = [LOADS.index(load) for load in FIRST_LOADS]
    while bad - good > 1:
        at = tried.pop() if tried and good < tried[-1] < bad else (good + bad) // 2
        if runs.one(_oracle(LOADS[at], most), replicas).attainment >= goal:
            good = at
        else:
            bad = at
    return runs.one(_oracle(LOADS[max(0, good)], most), replicas)


class _Runs:
    """Each replay once."""

    def __init__(
        self, scenario: Scenario, startup: float | str, slos: Sequence[Slo], memo: Memo, pool: Pool, progress: Progress
    ) -> None:
        self._scenario, self._startup = scenario, startup
        self._memo, self._pool, self._progress = memo, pool, progress
        self._replay = partial(_replay, slos)
        self._known: dict[tuple[str, int], Json] = {}
        self.gpus = scenario.setting().profile.device.count

    def one(self, scaler: str, replicas: int) -> Scaled:
        return self([(scaler, replicas)])[0]

    def __call__(self, asked: Sequence[tuple[str, int]]) -> list[Scaled]:
        """asked: scaler, first replicas. New runs are replayed in parallel."""
        new = [one for one in dict.fromkeys(asked) if one not in self._known]
        done, of = len(self._known), len(self._known) + len(new)
        if new:
            self._progress(_named(*new[0]), done, of)
        found = self._memo.map(self._pool, self._replay, [self._of(*one) for one in new])
        for i, (one, answer) in enumerate(zip(new, found, strict=True)):
            self._known[one] = answer
            self._progress(_named(*new[min(i + 1, len(new) - 1)]), done + i + 1, of)
        return [_scaled(*one, self._known[one]) for one in asked]

    def busy(self, replicas: int) -> float:
        """The mean number of requests at a fixed replica."""
        return float(self._known[FIXED, replicas]["busy"])

    def _of(self, scaler: str, replicas: int) -> Scenario:
        startup = 0.0 if scaler == FIXED else self._startup
        return replace(self._scenario, scaler=scaler, replicas=replicas, startup=startup)


def _named(scaler: str, replicas: int) -> str:
    return f"{replicas} fixed" if scaler == FIXED else scaler.partition(",")[0]


def _scaled(scaler: str, replicas: int, found: Json) -> Scaled:
    known: Json = {name: nan if value is None else value for name, value in found.items() if name != "busy"}
    known["intervals"] = tuple(nan if share is None else share for share in found["intervals"])
    known["changes"] = tuple(tuple(change) for change in found["changes"])
    return Scaled(scaler, replicas, **known)


def _replay(slos: Sequence[Slo], memo: Memo, own: Scenario) -> Json:
    found: Json = memo.replay(lambda: asked_of(own, kind="scaled 2", interval=INTERVAL), lambda: _run(own, slos))
    return found


def _run(own: Scenario, slos: Sequence[Slo]) -> Json:
    result = own.simulate_whole(own.requests())
    columns = result.table.columns
    good = good_requests(columns, slos, missing_passes=own.missing_passes)
    assert good is not None
    arrival, end = columns["arrival"], result.totals.end
    paid = own.replicas * end if result.replica_time is None else result.replica_time
    did = behaviour(result.changes, arrival)
    many, met = _arrivals(arrival), _arrivals(arrival, good)
    shares = [float(met[i] / many[i]) if many[i] >= FEW else None for i in range(len(many))]
    took = (columns["finish"] - arrival)[columns["status"] == COMPLETED].sum()
    return {
        "attainment": float(good.mean()), "worst": min((x for x in shares if x is not None), default=None),
        "gpu_hours": paid * own.setting().profile.device.count / 3600, "flaps": int(did.flaps), "rises": did.rises,
        "answered": did.answered, "reaction": _plain(did.reaction), "busy": float(took / max(end, 1e-9) / own.replicas),
        "intervals": shares, "changes": [[float(time), ready, paid] for time, _, ready, paid in result.changes],
    }  # fmt: skip


def _arrivals(arrival: "npt.NDArray[np.float64]", weights: Any = None) -> "npt.NDArray[Any]":
    """Arrivals, or the sum of their weights, in each interval."""
    return np.bincount(((arrival - arrival.min()) / INTERVAL).astype(np.int64), weights)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value
