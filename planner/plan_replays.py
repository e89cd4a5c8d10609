"""The replays of a plan, each done once."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from ..engine.errors import DsimError
from ..profiler.profile import Profile
from ..results.metrics import attainment, of_class, rows_of
from ..results.scenario import Scenario, class_column
from .backend import Pool
from .capacity import PER_REPLICA, PILOT, CapacitySearch, latency_ms
from .contents import Json
from .crossing import find
from .fewest import Fewest
from .limits import BEYOND, Shares, limited_by
from .memo import Memo
from .pool_counts import PILOT_PER_REPLICA, severity_of
from .replicate import Reading, judge, judged, replication
from .settings import score

SEEN = ("ttft", "e2el", "norm_latency", "tpot_chunk")  # clients' percentiles in ms
OWN_WIDTH, OWN_SHARPNESS = 0.15, 0.04  # log rate, of the search for a fleet's capacity
NEXT_WIDTH = 0.04  # ... if another replication's is known


@dataclass(frozen=True)
class Posed(Scenario):
    """A scenario with a profile object, and steps `slower` times as long."""

    given_profile: Profile | None = None
    slower: float = 1.0

    def file_profile(self) -> Profile:
        return super().file_profile() if self.given_profile is None else self.given_profile

    def loaded_profile(self) -> Profile:
        profile = super().loaded_profile()
        return profile if self.slower == 1.0 else replace(profile, latency=profile.latency.scaled(self.slower))


@dataclass(frozen=True)
class Task:
    """A setting's score, a pilot, a replay, or a fleet's capacity."""

    kind: str  # of TASKS
    candidate: int
    rate: float  # req/s
    replicas: int
    slower: float = 1.0
    index: int = 0  # replication; try: rung
    known: float | None = None  # own: severity at the rate, already replayed
    start: float | None = None  # own, try: first rate; None: the plan's
    whole: bool = False  # trace, even if --num-requests is less

    @property
    def key(self) -> str:
        """Unique in a plan."""
        kind = f"{self.kind} whole" if self.whole else self.kind
        return f"{kind} {self.candidate} {self.rate!r} {self.replicas} {self.slower!r} {self.index}"


class Replays:
    """Answers each task once."""

    def __init__(
        self,
        searches: Sequence[CapacitySearch],
        whole: Sequence[CapacitySearch],
        pool: Pool,
        memo: Memo,
        on_progress: Callable[[], object],
    ) -> None:
        self.num_replays = 0  # stored ones included
        self._searches = {False: searches, True: whole}
        self._pool, self._memo, self._on_progress = pool, memo, on_progress
        self._known: dict[str, Json] = {}

    def __call__(self, tasks: Iterable[Task]) -> list[Json]:
        """Findings in the tasks' order; `error` if dsim refuses a task."""
        tasks = list(tasks)
        new = {t.key: (self._searches[t.whole][t.candidate], t) for t in tasks if t.key not in self._known}
        with closing(self._memo.run(self._pool, _do, new)) as outcomes:
            for outcome in outcomes:
                if outcome.trace is not None:
                    raise RuntimeError(f"in a worker:\n{outcome.trace}")
                if outcome.error is not None and not outcome.refused:
                    raise DsimError(outcome.error)
                found: Json = {"error": outcome.error} if outcome.value is None else outcome.value
                self._known[outcome.key] = found
                self.num_replays += found.get("replays", 0)
                self._on_progress()
        return [self._known[task.key] for task in tasks]


def fleet(search: CapacitySearch, replicas: int, slower: float = 1.0) -> CapacitySearch:
    """The search on `replicas`, with enough requests for each."""
    scenario = replace(search.scenario, replicas=replicas)
    if slower != 1.0:
        assert isinstance(scenario, Posed)
        scenario = replace(scenario, slower=slower)
    return replace(search, scenario=scenario, num_requests=max(search.num_requests, PER_REPLICA * replicas))


def _do(memo: Memo, work: tuple[CapacitySearch, Task]) -> Json:
    search, task = work
    return TASKS[task.kind](memo, search, task)


def _pilot(memo: Memo, search: CapacitySearch, task: Task) -> Json:
    """Approximate replicas for the rate; null above `task.replicas`."""
    used = 0
    value = math.nan
    size = Fewest(most=task.replicas, stride=2.0)
    while size.open:
        short = search.shortened(max(search.shortened().num_requests, PILOT_PER_REPLICA * size.at))
        short = replace(short, scenario=replace(search.scenario, replicas=size.at))
        reading = short.requests(PILOT, memo)(task.rate)
        used += 1
        value = reading.values[int(np.argmax(reading.severities))]
        # A growing queue shows what one replica serves.
        growing = size.high is None and not reading.stable
        size.decide(reading.holds, math.ceil(size.at * task.rate / reading.throughput) if growing else None)
    return {"replicas": size.replicas, "value": None if math.isnan(value) else value, "replays": used}


def _replay(memo: Memo, search: CapacitySearch, task: Task) -> Json:
    """A fleet's criteria, limit, and what clients see."""
    own = fleet(search, task.replicas, task.slower)
    found: Json = memo.replay(lambda: own.inputs(task.index, task.rate, "a fleet"), lambda: _of_fleet(own, task))
    return found


def _of_fleet(search: CapacitySearch, task: Task) -> Json:
    own, requests = replication(search.scenario, task.index, search.num_requests, search.block)
    setting = own.setting()
    shares = Shares(setting) if task.index == 0 else None
    timed = requests.time_scaled(1 / task.rate)
    result = own.simulate_whole(timed, None if shares is None else shares.append)
    reading = judge(search.criteria, timed, result, task.rate, own.missing_passes)
    seen = judged(len(timed))
    window = rows_of(result.table.columns, seen)
    window["slo_class"] = class_column(timed)[seen]
    found: Json = {
        "attained": {
            str(slo): share
            for criterion in search.criteria
            for slo in criterion.slos
            if slo.stat is None
            and not math.isnan(share := attainment(of_class(window, slo), slo, missing_passes=own.missing_passes))
        },
        "values": [None if math.isnan(v) else v for v in reading.values],
        "judged": [len(of_class(window, criterion.slos[0])["status"]) for criterion in search.criteria],
        "severity": severity_of(reading),
        "stable": reading.stable,
        "rejected": reading.rejected,
        "replays": 1,
    }
    if shares is not None:
        spent = shares.shares()
        limit = limited_by(spent, result.totals.preemptions / len(timed), setting)
        found |= {"limited_by": limit.name, "limiting_setting": limit.setting, "assumed": spent[BEYOND]}
        found["doubted"] = shares.doubted()
        found["latency_ms"] = latency_ms(window, SEEN)
    return found


def _own(memo: Memo, search: CapacitySearch, task: Task) -> Json:
    """The highest rate that meets the SLOs, and the criterion broken above it."""
    own = fleet(search, task.replicas, task.slower)
    ask = own.requests(task.index, memo)
    replays = 0

    def read(rate: float) -> Reading:
        nonlocal replays
        if task.known is not None and task.known <= 0 and math.isclose(rate, task.rate, rel_tol=1e-9):
            return Reading(rate, (math.nan,), (task.known,), True, rate, 0.0)
        replays += 1
        return ask(rate)

    width = OWN_WIDTH if task.start is None else NEXT_WIDTH
    found = find(read, own.criteria, task.start or task.rate, width, OWN_SHARPNESS)
    return {"rate": found.rate, "binding": found.binding, "replays": replays}


def _try(memo: Memo, search: CapacitySearch, task: Task) -> Json:
    """The rate that a replica serves, on replays of the rung's length."""
    rate, replays = score(search, task.index, task.start or task.rate, memo)
    return {"rate": rate, "replays": replays}


TASKS: dict[str, Callable[[Memo, CapacitySearch, Task], Json]] = {
    "try": _try, "pilot": _pilot, "replay": _replay, "own": _own
}  # fmt: skip
