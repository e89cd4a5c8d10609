"""A setting's outcome on a part of the trace: objectives and missed SLOs."""

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from ..engine import chance
from ..engine.errors import TraceError
from ..results.metrics import SloVerdict, Summary
from ..results.slo import Slo
from ..results.world import World
from ..traces import Trace
from .candidate import Candidate
from .contents import Json, asked_of
from .replicate import resample

OBJECTIVES = {"goodput": "req/s", "throughput": "tok/s", "cost": "$ per 1000 good requests", "latency": "ms"}
HIGHER = ("goodput", "throughput")
TRAIN = 0.6  # share of the trace, by time, that the search uses
MIN_REQUESTS = 20  # of a part
INFEASIBLE = 1.0  # of a setting not replayed
BLOCKS = 16  # of redrawn held-out traffic
RERANK, CONFIRM = 231, 232  # purposes of draws


@dataclass(frozen=True)
class Part:
    """The traffic of a replay."""

    kind: str  # search; rerank: same part, other luck; confirm: held-out part
    index: int = 0  # replication

    @property
    def held_out(self) -> bool:
        return self.kind == "confirm"


@dataclass(frozen=True)
class ReplayOutcome:
    """The objective's value, and by how much the worst SLO on the run was missed."""

    value: float
    violation: float = 0.0  # relative to the bound; 0: all hold
    missed: str = ""  # the worst
    attainment: float = math.nan  # share of good arrivals
    latency: float = 0.0  # ms, p90 of norm_latency: breaks ties


@dataclass(frozen=True)
class Evaluator:
    """Replays a candidate on the search's part of the trace, or the held-out part."""

    objective: str
    gpu_hour: float | None

    def __call__(self, cell: tuple[Candidate, Part]) -> Json:
        """The fields of a ReplayOutcome."""
        world = _lucky(cell)
        requests = traffic(world, cell[1].held_out)
        return asdict(self.outcome(world, world.run(requests), requests.rate))

    def question(self, cell: tuple[Candidate, Part]) -> Json:
        held_out = cell[1].held_out
        return asked_of(_lucky(cell), held_out=held_out, of=self.objective, gpu_hour=self.gpu_hour)

    def outcome(self, world: World, summary: Summary, offered: float) -> ReplayOutcome:
        """The objective and missed SLOs of a run; offered: req/s."""
        slos = map(Slo.parse, world.slos)
        misses = [(_miss(slo, verdict), str(slo)) for slo, verdict in zip(slos, summary.slos, strict=True)]
        violation, missed = max(misses, default=(0.0, ""))
        value = self._value(world.num_gpus, summary, offered)
        latency = _number(summary.norm_latency_ms.p90, 1e9)
        attained = _number(summary.slo_attainment, math.nan)
        return ReplayOutcome(
            value=value, violation=violation, missed=missed * (violation > 0), attainment=attained, latency=latency
        )

    def _value(self, gpus: int, summary: Summary, offered: float) -> float:
        # Per time of arrivals: per run time, a shorter tail alone would gain.
        rate = summary.request_throughput
        # Without SLOs on requests, completed ones are good; SLOs on the run are constraints.
        if summary.slo_attainment is not None and not math.isnan(offered):
            rate = summary.slo_attainment * offered
        if self.objective == "throughput":
            return _number(summary.output_throughput, 0.0)
        if self.objective == "goodput":
            return _number(rate, 0.0)
        if self.objective == "cost":
            assert self.gpu_hour is not None
            # Without good requests, price half a request.
            least = 0.5 / (summary.duration_s or 5e8)
            return gpus * self.gpu_hour / (3.6 * max(_number(rate, 0.0), least))
        return _number(summary.norm_latency_ms.p90, 1e9)


def _lucky(cell: tuple[Candidate, Part]) -> World:
    """The candidate's world with the replay's luck."""
    world, part = cell[0].world, cell[1]
    if part.kind == "search":
        return world
    purpose = {"confirm": CONFIRM, "rerank": RERANK}[part.kind]
    return replace(world, seed=int(chance.key(world.seed, purpose, part.index)[0] >> np.uint64(2)))


def traffic(world: World, held_out: bool) -> Trace:
    """Unchanged for the search; held out, redrawn by the seed."""
    return _traffic(replace(world, policy="", replicas=1), held_out)


def split(trace: Trace) -> tuple[Trace, Trace]:
    """The first part by time, and the rest."""
    cut = int(np.searchsorted(trace.arrival, TRAIN * trace.duration, side="right"))
    rows = np.arange(len(trace))
    for part, purpose in ((rows[:cut], "the search"), (rows[cut:], "confirmation")):
        if len(part) < MIN_REQUESTS:
            size = f"{len(part)} requests for {purpose}"
            raise TraceError(f"{trace.name} leaves {size}, expected at least {MIN_REQUESTS}")
    return trace.take(rows[:cut]), trace.take(rows[cut:])


def _miss(slo: Slo, verdict: SloVerdict) -> float:
    """Relative to the bound; 0 if the SLO is met or judges requests."""
    if verdict.met is None or verdict.met:
        return 0.0
    if slo.share is not None:
        return max(1 - (verdict.attainment or 0.0) / slo.share, 1e-9)
    if verdict.observed_ms is None:
        return INFEASIBLE
    return max(verdict.observed_ms / (1e3 * slo.bound) - 1, 1e-9)


@lru_cache(maxsize=8)
def _traffic(world: World, held_out: bool) -> Trace:
    requests = split(world.requests())[int(held_out)]
    if not held_out or world.arrival != "trace":
        return requests  # an arrival process draws by the seed anyway
    # Independent blocks: the gain's interval must cover other traffic.
    n = len(requests)
    return requests.in_order(resample(n, n, max(1, n // BLOCKS), world.seed, evenly=False))


def _number(value: float | None, missing: float) -> float:
    if value is None or math.isnan(value):
        return missing
    return value
