"""The replays of a plan, each done once."""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..results.metrics import attainment, finite, of_class
from .backend import Pool
from .candidate import beyond_tested
from .candidates import PlanCandidate
from .capacity import PER_REPLICA, PILOT, CapacitySearch, latency_ms
from .contents import Json
from .crossing import find
from .limits import BEYOND, PoolShares
from .memo import Memo
from .pool_counts import PILOT_PER_REPLICA, severity_of
from .race import Fewest, Lane
from .replicate import measure, replication
from .settings import Tried, score

PRECISION = 0.02  # of the searches; a finer one has longer replays
CLIENT_METRICS = ("ttft", "e2el", "norm_latency", "tpot_chunk")  # clients' percentiles in ms
OWN_WIDTH, OWN_SHARPNESS = 0.15, 0.04  # log rate, of the search for a fleet's capacity
NEXT_WIDTH = 0.04  # ... if another replication's is known


@dataclass(eq=False)
class Entrant:
    """A candidate of a plan, its search, and its fleets in the race."""

    candidate: PlanCandidate
    search: CapacitySearch
    tried: Tried | None = None  # settings, if this one was chosen among them
    lane: Lane = field(init=False)  # at the plan's rate
    later: list[Lane] = field(default_factory=list)  # after today, in the horizon

    @property
    def replicas(self) -> int:
        return self.lane.replicas or 0

    @cached_property
    def untested(self) -> tuple[str, ...]:
        """See `beyond_tested`."""
        return beyond_tested(self.candidate.policy, self.search.world.allow_code)


@dataclass(frozen=True)
class Task:
    """Work on an entrant: `setting_rate`, `pilot`, `fleet_replay` or `fleet_capacity`."""

    work: Callable[[CapacitySearch, "Task"], Json]
    entrant: Entrant | None  # None: in a worker
    rate: float  # req/s
    replicas: int = 1
    slower: float = 1.0
    index: int = 0  # replication; of a setting: rung
    start: float | None = field(default=None, compare=False)  # first rate of a search; None: the plan's


class Replays:
    """Answers each task once."""

    def __init__(self, pool: Pool, memo: Memo, on_progress: Callable[[], object]) -> None:
        self.num_replays = 0  # stored ones included
        self._pool, self._memo, self._on_progress = pool, memo, on_progress
        self._answers: dict[Task, Json] = {}

    def __call__(self, tasks: Iterable[Task]) -> list[Json]:
        """Answers in the tasks' order; `error` if dsim refuses a task."""
        tasks = list(tasks)
        new = list(dict.fromkeys(task for task in tasks if task not in self._answers))
        cells: dict[str, tuple[CapacitySearch, Task]] = {}
        for i, task in enumerate(new):
            assert task.entrant is not None
            cells[str(i)] = task.entrant.search, replace(task, entrant=None)
        with closing(self._memo.run(self._pool, _do, cells, _question)) as outcomes:
            for outcome in outcomes:
                answer: Json = outcome.result() if not outcome.refused else {"error": outcome.error}
                self._answers[new[int(outcome.key)]] = answer
                self.num_replays += answer.get("replays", 0)
                self._on_progress()
        return [self._answers[task] for task in tasks]


def fleet(search: CapacitySearch, replicas: int, slower: float = 1.0) -> CapacitySearch:
    """The search on `replicas`, with enough requests for each."""
    world = replace(search.world, replicas=replicas, slower=slower)
    return replace(search, world=world, num_requests=max(search.num_requests, PER_REPLICA * replicas))


def _do(cell: tuple[CapacitySearch, Task]) -> Json:
    search, task = cell
    return task.work(search, task)


def _question(cell: tuple[CapacitySearch, Task]) -> Json:
    search, task = cell
    fields = {name: value for name, value in vars(task).items() if name not in ("work", "entrant")}
    return {**search.inputs, **fields, "work": task.work.__name__}


def pilot(search: CapacitySearch, task: Task) -> Json:
    """Approximate replicas for the rate; null above `task.replicas`."""
    num_replays = 0
    size = Fewest(limit=task.replicas, stride=2.0)
    while size.open:
        short = search.shortened(max(search.shortened().num_requests, PILOT_PER_REPLICA * size.trial))
        short = replace(short, world=replace(search.world, replicas=size.trial))
        reading = short.requests(PILOT)(task.rate)
        num_replays += 1
        guess = None
        if size.high is None and not reading.stable:  # a growing queue shows what one replica serves
            guess = math.ceil(size.trial * task.rate / reading.throughput)
        size.decide(reading.holds, guess)
    return {"replicas": size.replicas, "replays": num_replays}


def fleet_replay(search: CapacitySearch, task: Task) -> Json:
    """A fleet's criteria, limit, and what clients see."""
    search = fleet(search, task.replicas, task.slower)
    world, requests = replication(search.world, task.index, search.num_requests, search.block)
    shares = PoolShares(world.fleet())
    append = {0: shares.append}.get(task.index)  # the first replication shows the limit
    reading, records, window = measure(world, search.criteria, requests, task.rate, append)
    attained = {}
    for slo in (slo for criterion in search.criteria for slo in criterion.slos if slo.stat is None):
        share = attainment(of_class(window, slo), slo)
        if not math.isnan(share):
            attained[str(slo)] = share
    answer: Json = {
        "attained": attained,
        "values": [finite(value) for value in reading.values],
        "judged": [len(of_class(window, criterion.slos[0])["status"]) for criterion in search.criteria],
        "severity": severity_of(reading),
        "stable": reading.stable,
        "rejected": reading.rejected,
        "replays": 1,
    }
    if task.index == 0:
        [limit], [of_fleet] = shares.limits(records.totals.preemptions / len(requests)), shares.by_pool
        answer |= {"limited_by": limit.name, "limiting_setting": limit.setting, "assumed": of_fleet.shares()[BEYOND]}
        answer |= {"doubted": shares.doubted(), "latency_ms": latency_ms(window, CLIENT_METRICS)}
    return answer


def fleet_capacity(search: CapacitySearch, task: Task) -> Json:
    """The highest rate that meets the SLOs, and the criterion broken above it."""
    sized = fleet(search, task.replicas, task.slower)
    width = NEXT_WIDTH if task.start is not None else OWN_WIDTH
    read = sized.requests(task.index)
    crossing = find(read, sized.criteria, task.start or task.rate, width, OWN_SHARPNESS)
    return {"rate": crossing.rate, "binding": crossing.binding, "replays": crossing.num_replays}


def setting_rate(search: CapacitySearch, task: Task) -> Json:
    """The rate that a replica serves, on replays of the rung's length."""
    rate, num_replays = score(search, task.index, task.start or task.rate)
    return {"rate": rate, "replays": num_replays}
