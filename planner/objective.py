"""A setting's outcome: its replay on a part of the trace, the objectives' values, and the SLOs it missed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from ..engine import chance
from ..engine.errors import DsimError, TraceError
from ..files.read import quoted
from ..results.metrics import SloVerdict, Summary
from ..results.scenario import Scenario
from ..results.slo import METRIC_KEYS, STATS, Slo
from ..traces import Trace
from .backend import Pool
from .contents import Json, asked_of
from .fleet_space import FleetCandidate
from .memo import Memo
from .replicate import in_order, resample
from .space import Candidate

OBJECTIVES = {"goodput": "req/s", "throughput": "tok/s", "cost": "$ per 1000 good requests", "latency": "ms"}
HIGHER = ("goodput", "throughput")
LATENCY_METRIC = "p90:norm_latency"
MIN_REQUESTS = 20  # of a part of the trace
INFEASIBLE = 1.0  # violation of a setting that was not replayed
BLOCKS = 16  # in which held-out traffic is drawn
RERANK, CONFIRM = 231, 232  # purposes of draws, apart from the engine's


@dataclass(frozen=True)
class Part:
    """Which traffic a candidate is replayed on."""

    kind: str  # search, rerank (the same part of the trace, other luck) or confirm (the held-out part)
    index: int = 0  # of the replication
    share: float = 1.0  # of its requests, from the first


@dataclass(frozen=True)
class ReplayOutcome:
    """The outcome of a replay: the objectives' values, and how far the worst SLO on the run was missed."""

    values: tuple[float, ...]
    violation: float = 0.0  # relative to the bound; 0 where all hold
    missed: str = ""  # the SLO that was missed most
    attainment: float = math.nan  # share of arrivals that were good
    latency: float = 0.0  # ms, p90 of norm_latency: the tie-breaker


Tried = Candidate | FleetCandidate
Evaluate = Callable[[Tried, Part], ReplayOutcome]
Asked = Callable[[Tried, Part], Json]  # everything that an outcome depends on


class Measure:
    """Measures settings on parts of the traffic in a pool, and counts the replays."""

    def __init__(self, evaluate: Evaluate, pool: Pool, memo: Memo, asked: Asked | None) -> None:
        self.num_replays = 0
        self._evaluate = partial(_evaluate, evaluate, asked)
        self._pool, self._memo = pool, memo

    def __call__(self, work: Sequence[tuple[Tried, Part]]) -> list[ReplayOutcome]:
        """The outcomes, in the order of the work."""
        self.num_replays += len(work)
        return list(self._memo.map(self._pool, self._evaluate, work))


class Evaluator:
    """Replays a candidate on the part of the trace that the search sees, or on the part held out."""

    def __init__(
        self, scenario: Scenario, objectives: tuple[str, ...], gpu_hour: float | None, latency: str, train: float
    ) -> None:
        self.scenario = scenario.located()
        self.objectives = objectives
        self.gpu_hour = gpu_hour
        self.latency = parse_latency(latency)
        self.train = train
        self.slos = [Slo.parse(text) for text in scenario.slos]

    def __call__(self, candidate: Tried, part: Part) -> ReplayOutcome:
        """One replay."""
        own = self._posed(candidate, part)
        requests = traffic(own, part.kind == "confirm", self.train)
        if part.share < 1:
            requests = requests.head(max(1, round(part.share * len(requests))))
        summary = own.run(requests)
        return self.outcome(own.num_gpus, summary, requests.rate)

    def asked(self, candidate: Tried, part: Part) -> Json:
        """Everything that the outcome depends on."""
        return asked_of(
            self._posed(candidate, part), held_out=part.kind == "confirm", share=part.share, train=self.train,
            of=[*self.objectives, *self.latency], gpu_hour=self.gpu_hour,
        )  # fmt: skip

    def _posed(self, candidate: Tried, part: Part) -> Scenario:
        own = candidate.posed(self.scenario)
        if part.kind == "search":
            return own
        purpose = RERANK if part.kind == "rerank" else CONFIRM  # luck apart from the search's
        return replace(own, seed=int(chance.key(own.seed, purpose, part.index)[0] >> np.uint64(2)))

    def outcome(self, gpus: int, summary: Summary, offered: float) -> ReplayOutcome:
        """The objectives of a run on a number of GPUs and the SLOs that it missed; `offered` in req/s."""
        misses = [(_miss(slo, verdict), str(slo)) for slo, verdict in zip(self.slos, summary.slos, strict=True)]
        violation, missed = max(misses, default=(0.0, ""))
        values = tuple(self._value(name, gpus, summary, offered) for name in self.objectives)
        latency = _number(summary.norm_latency_ms.p90, 1e9)
        return ReplayOutcome(values, violation, missed if violation > 0 else "", summary.slo_attainment, latency)

    def _value(self, name: str, gpus: int, summary: Summary, offered: float) -> float:
        # Per time of arrivals: per time of the run a policy would gain by a shorter tail alone.
        rate = summary.slo_attainment * offered
        # If no SLO judges requests, every completed request is good, and the SLOs on the run are constraints.
        if math.isnan(rate):
            rate = summary.request_throughput
        if name == "throughput":
            return _number(summary.output_throughput, 0.0)
        if name == "goodput":
            return _number(rate, 0.0)
        if name == "cost":
            assert self.gpu_hour is not None
            # Zero good requests are priced as half of one.
            least = 0.5 / summary.duration_s if summary.duration_s > 0 else 1e-9
            hourly = gpus * self.gpu_hour
            return 1000 * hourly / (3600 * max(_number(rate, 0.0), least))
        stat, metric = self.latency
        return _number(getattr(getattr(summary, f"{metric}_ms"), stat), 1e9)


def traffic(scenario: Scenario, held_out: bool, train: float) -> Trace:
    """A part of the trace: unchanged for the search, redrawn by the seed if it is held out."""
    return _traffic(replace(scenario, policy="", replicas=1, pools=(), links=(), decider="always"), held_out, train)


def parse_latency(text: str) -> tuple[str, str]:
    """A statistic and a metric from `p90:norm_latency`."""
    stat, _, metric = text.partition(":")
    if stat not in STATS or metric not in METRIC_KEYS:
        raise DsimError(
            f"latency metric is {quoted(text)}, expected STAT:METRIC such as {LATENCY_METRIC}, of {', '.join(STATS)} "
            f"and {', '.join(METRIC_KEYS)}"
        )
    return stat, metric


def split(trace: Trace, train: float) -> tuple[Trace, Trace]:
    """The first part of a trace, by time, and the rest."""
    cut = int(np.searchsorted(trace.arrival, train * trace.duration, side="right"))
    parts = trace.take(np.arange(cut)), trace.take(np.arange(cut, len(trace))) if cut < len(trace) else None
    for part, what in zip(parts, ("the search", "confirmation"), strict=True):
        if part is None or len(part) < MIN_REQUESTS:
            found = 0 if part is None else len(part)
            raise TraceError(f"{trace.name} leaves {found} requests for {what}, expected at least {MIN_REQUESTS}")
    assert parts[1] is not None
    return parts[0], parts[1]


def _evaluate(evaluate: Evaluate, asked: Asked | None, memo: Memo, work: tuple[Tried, Part]) -> ReplayOutcome:
    if asked is None:
        return evaluate(*work)
    values, *others = memo.replay(lambda: asked(*work), lambda: list(vars(evaluate(*work)).values()))
    return ReplayOutcome(tuple(values), *others)


def _miss(slo: Slo, verdict: SloVerdict) -> float:
    """How far an SLO on the run is missed, relative to its bound; 0 if it holds, or judges requests."""
    if verdict.met is None or verdict.met:
        return 0.0
    if slo.share is not None:
        return max((slo.share - verdict.attainment) / slo.share, 1e-9) if verdict.attainment >= 0 else INFEASIBLE
    if math.isnan(verdict.observed_ms):
        return INFEASIBLE
    return max(verdict.observed_ms / (1e3 * slo.bound) - 1, 1e-9)


@lru_cache(maxsize=8)
def _traffic(scenario: Scenario, held_out: bool, train: float) -> Trace:
    requests = split(scenario.requests(), train)[int(held_out)]
    if not held_out or scenario.arrival != "trace":
        return requests  # an arrival process is drawn anew by the seed already
    # Blocks are independent, not spread evenly: the gain's interval must cover how other traffic would differ.
    n = len(requests)
    return in_order(requests, resample(n, n, max(1, n // BLOCKS), scenario.seed, evenly=False))


def _number(value: float, missing: float) -> float:
    return missing if math.isnan(value) else value
