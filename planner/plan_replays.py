"""The replays of a plan: what each is asked, what it shows, and that none is done twice."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..engine.plain import plain
from ..files.interrupt import uninterrupted
from ..files.read import json_of, parsing, shown
from ..profiler.profile import Profile
from ..results.metrics import attainment, latencies, of_class
from ..results.scenario import Scenario, class_column
from .backend import Pool
from .capacity import PER_REPLICA, PILOT, PILOT_BLOCKS, PILOT_FEWEST, PILOT_SHARE, CapacitySearch, find, percentiles
from .ledger import Json, Ledger
from .limits import Shares, limited_by
from .race import LIMIT
from .replicate import Reading, judge, judged, replication
from .settings import score

SEEN = ("ttft", "norm_latency", "tpot_chunk")  # what clients see: percentiles in ms
PERCENTS = ("p50", "p90", "p99")
OWN_WIDTH, OWN_SHARPNESS = 0.15, 0.04  # in log rate: the search for a fleet's own capacity
NEXT_WIDTH = 0.04  # likewise, where another replication's capacity is known
PILOT_PER_REPLICA = 100  # requests


@dataclass(frozen=True)
class Posed(Scenario):
    """A scenario with a profile at hand, whose steps take so many times as long as it says."""

    given_profile: Profile | None = None
    slower: float = 1.0

    def base_profile(self) -> Profile:
        return super().base_profile() if self.given_profile is None else self.given_profile

    def loaded_profile(self) -> Profile:
        profile = super().loaded_profile()
        return profile if self.slower == 1.0 else replace(profile, latency=profile.latency.scaled(self.slower))


@dataclass(frozen=True)
class Task:
    """A piece of work of one candidate: a setting's score, a pilot, a replay, or a fleet's own capacity."""

    kind: str  # of TASKS
    candidate: int
    rate: float  # req/s
    replicas: int
    slower: float = 1.0
    index: int = 0  # of the replication; try: of the rung
    known: float | None = None  # own: the severity at the rate, which a replay told
    start: float | None = None  # own, try: the rate to begin at; None: the rate asked for
    whole: bool = False  # on the whole trace, where --num-requests asks for shorter replays

    @property
    def key(self) -> str:
        """The key that tells it from the plan's others."""
        kind = f"{self.kind} whole" if self.whole else self.kind
        return f"{kind} {self.candidate} {self.rate!r} {self.replicas} {self.slower!r} {self.index}"

    @staticmethod
    def is_first(key: str) -> bool:
        """Whether a key is of the first replication."""
        return key.endswith(" 0")


class Replays:
    """Answers tasks, from the ledger where it holds them, from a pool of processes otherwise."""

    def __init__(
        self,
        searches: Sequence[CapacitySearch],
        whole: Sequence[CapacitySearch],
        pool: Pool,
        ledger: Ledger | None,
        on_progress: Callable[[], object],
    ) -> None:
        self.num_replays = 0  # behind all answers so far, those that the ledger gave included
        self._searches = {False: searches, True: whole}
        self._pool, self._ledger, self._on_progress = pool, ledger, on_progress
        entries = [] if ledger is None else ledger.entries
        self._kept: dict[str, Json] = {entry["task"]: entry["found"] for entry in entries if "task" in entry}
        self._known: dict[str, Json] = {}

    def __call__(self, tasks: Iterable[Task]) -> list[Json]:
        """The finding of each task, in their order; `error` in place of it where dsim refuses."""
        tasks = list(tasks)
        for task in tasks:
            if task.key not in self._known and task.key in self._kept:
                self._check_kept(task)
                self._add(task.key, self._kept[task.key])
        new = {task.key: (self._search(task), task) for task in tasks if task.key not in self._known}
        with closing(self._pool.run(_do, new)) as outcomes:
            for outcome in outcomes:
                if outcome.trace is not None:
                    raise RuntimeError(f"in a worker:\n{outcome.trace}")
                if outcome.error is not None and not outcome.refused:
                    raise DsimError(outcome.error)
                found: Json = {"error": outcome.error} if outcome.value is None else outcome.value
                with uninterrupted():
                    if self._ledger is not None:
                        self._ledger.append({"task": outcome.key, "found": found})
                    self._add(outcome.key, found)
                self._on_progress()
        return [self._known[task.key] for task in tasks]

    def _search(self, task: Task) -> CapacitySearch:
        return self._searches[task.whole][task.candidate]

    def _check_kept(self, task: Task) -> None:
        """DsimError where the ledger's finding is of other criteria than the task's."""
        found, num = self._kept[task.key], len(self._search(task).criteria)
        if "error" not in found and (len(found.get("values", range(num))) != num or found.get("binding", 0) >= num):
            assert self._ledger is not None
            raise DsimError(f"{self._ledger.path}: {task.key} is not of {num} criteria (--force replays it again)")

    def _add(self, key: str, found: Json) -> None:
        self._known[key] = found
        self.num_replays += found.get("replays", 0)


def entry_of(where: str, line: bytes) -> Json:
    """A line of a plan's ledger."""
    with parsing(where, "a finished replay (delete the line to replay it again, or pass --force)"):
        entry = json_of(line)
        match entry:
            case {"plan": str()}:
                pass
            case {"task": str(), "found": dict() as found}:
                _check_found(entry["task"], found)
            case _:
                raise ValueError("it has neither plan nor task and found")
    return dict(entry)


# What each kind of task finds, beside what is checked below.
FOUND: dict[str, dict[str, type]] = {
    "try": {"rate": float, "replays": int}, "pilot": {"replays": int},
    "own": {"rate": float, "binding": int, "replays": int},
    "replay": {"severity": float, "stable": bool, "rejected": float, "replays": int},
}  # fmt: skip


def _check_found(task: str, found: Json) -> None:
    """ValueError, or what a value of another type raises, unless this is what the task finds."""
    if "error" in found:
        plain(found["error"], str)
        return
    kind = task.split()[0]
    for name, of in FOUND[kind].items():
        try:
            plain(found[name], of)
        except ValueError as error:
            raise ValueError(f"{name} is {shown(found[name])}, expected {error}") from None
    if kind == "pilot":
        _check_numbers([found["value"]])
        if found["replicas"] is not None:
            plain(found["replicas"], int, 1)
    if kind == "replay":
        _check_numbers(found["values"])
        for num in found["judged"]:
            plain(num, int, 0)
        for share in found["attained"].values():
            plain(share, float)
        if Task.is_first(task):
            plain(found["limited_by"], str)
            plain(found["limiting_setting"], str)
            for name in SEEN:
                _check_numbers([(found["latency_ms"][name] or dict.fromkeys(PERCENTS))[p] for p in PERCENTS])


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if value is not None:
            plain(value, float)


def fleet(search: CapacitySearch, replicas: int, slower: float = 1.0) -> CapacitySearch:
    """The search of a candidate with so many replicas; enough requests for each."""
    scenario = replace(search.scenario, replicas=replicas)
    if slower != 1.0:
        assert isinstance(scenario, Posed)
        scenario = replace(scenario, slower=slower)
    return replace(search, scenario=scenario, num_requests=max(search.num_requests, PER_REPLICA * replicas))


def severity_of(reading: Reading) -> float:
    """How far the worst SLO is beyond its bound, as a log; LIMIT where the queue grows without end."""
    return LIMIT if not reading.stable else float(np.clip(max(reading.severities), -LIMIT, LIMIT))


def _do(work: tuple[CapacitySearch, Task]) -> Json:
    search, task = work
    return TASKS[task.kind](search, task)


def _pilot(search: CapacitySearch, task: Task) -> Json:
    """About how many replicas the rate needs, at most `task.replicas`, by short replays; null if more."""
    used = 0
    value = math.nan

    def enough(replicas: int) -> Reading:
        nonlocal used, value
        fewer = max(min(search.num_requests, PILOT_FEWEST), search.num_requests // PILOT_SHARE)
        fewer = max(fewer, PILOT_PER_REPLICA * replicas)
        short = replace(search, num_requests=fewer, block=min(search.block, -(-fewer // PILOT_BLOCKS)))
        short = replace(short, scenario=replace(search.scenario, replicas=replicas))
        used += 1
        reading = short.requests(PILOT)(task.rate)
        value = reading.values[int(np.argmax(reading.severities))]
        return reading

    low, step = 0, 1
    at = 1
    while True:
        reading = enough(at)
        if reading.holds:
            break
        low = at
        if low == task.replicas:
            return {"replicas": None, "value": None if math.isnan(value) else value, "replays": used}
        # A queue that grows says how much one replica serves.
        guess = math.ceil(at * task.rate / reading.sustained) if not reading.stable and reading.sustained > 0 else 0
        at = min(max(guess, low + step), task.replicas)
        step *= 2
    high = at
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle).holds else (middle, high)
    return {"replicas": high, "value": None if math.isnan(value) else value, "replays": used}


def _replay(search: CapacitySearch, task: Task) -> Json:
    """One replay of a fleet: its criteria's values, what limits it, and what clients see."""
    own_search = fleet(search, task.replicas, task.slower)
    own, requests = replication(own_search.scenario, task.index, own_search.num_requests, own_search.block)
    setting = own.setting()
    shares = Shares(setting) if task.index == 0 else None
    timed = requests.time_scaled(1 / task.rate)
    result = own.simulate_whole(timed, None if shares is None else shares.append)
    reading = judge(search.criteria, timed, result, task.rate, own.missing_passes)
    seen = judged(len(timed))
    window = {name: column[seen] for name, column in result.table.columns.items()}
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
        known = latencies(window)
        found |= {"limited_by": limit.name, "limiting_setting": limit.setting}
        found["latency_ms"] = {name: percentiles(1e3 * known[name]) for name in SEEN}
    return found


def _own(search: CapacitySearch, task: Task) -> Json:
    """The rate up to which a fleet meets the SLOs in a replication, and the criterion that is violated above it."""
    own = fleet(search, task.replicas, task.slower)
    ask = own.requests(task.index)
    replays = 0

    def read(rate: float) -> Reading:
        nonlocal replays
        if task.known is not None and task.known <= 0 and math.isclose(rate, task.rate, rel_tol=1e-9):
            return Reading(rate, (math.nan,), (task.known,), 0.0, True, rate, 0.0)
        replays += 1
        return ask(rate)

    width = OWN_WIDTH if task.start is None else NEXT_WIDTH
    found = find(read, own.criteria, task.start or task.rate, width, OWN_SHARPNESS)
    return {"rate": found.rate, "binding": found.binding, "replays": replays}


def _try(search: CapacitySearch, task: Task) -> Json:
    """The rate that one replica of a setting serves, on the rung's short replays."""
    rate, replays = score(search, task.index, task.start or task.rate)
    return {"rate": rate, "replays": replays}


TASKS: dict[str, Callable[[CapacitySearch, Task], Json]] = {
    "try": _try, "pilot": _pilot, "replay": _replay, "own": _own
}  # fmt: skip
