"""The servers of a run: the replicas of a fleet's pools, which start, take requests, drain and stop."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simpy

from ..engine.engine import Engine
from ..engine.errors import PolicyError, quoted
from ..engine.journal import RequestTable, StepRecorder, StepTotals
from ..engine.outside import running_code_of
from ..engine.request import Request
from .apart import run_apart
from .arrivals import OpenLoop, Source
from .clock import DECISION, Clock
from .fleet import Fleet, Pool
from .group import Group, Member, Serving
from .pool_watch import PoolWatch
from .replica import Replica
from .routers.router import Router
from .scalers import PoolView, Scaling
from .split import Split
from .step_model import StepModel

AnyReplica = Replica | Member

MOST_REPLICAS = 32_767  # of a run: a journal has 16 bits for a replica's number


class Change(NamedTuple):
    """The replicas of a pool from a time on."""

    time: float  # s
    pool: str
    ready: int  # that take requests
    provisioned: int  # paid: starting, ready or draining


@dataclass(frozen=True, eq=False)
class Starting:
    """A replica that is starting."""

    ready: float  # s, when it will take requests


@dataclass
class _Members:
    """The replicas of one pool."""

    pool: Pool
    step_model: StepModel
    watch: PoolWatch | None  # None: nothing scales
    alone: bool | None = None  # each replica runs by itself; None: not known yet
    group: Group | None = None  # runs its replicas together
    ready: list[AnyReplica] = field(default_factory=list)
    draining: list[AnyReplica] = field(default_factory=list)
    starting: list["Starting"] = field(default_factory=list)  # the newest last


class Servers:
    """The replicas of a fleet while a run lasts. Its router chooses the replica of each request.

    new_engine: the engine of a pool's replica of a number. finished: called with the requests that end, and the time.
    cached: prompt tokens of each request that a prefix cache held. seed: of start-ups. split: of a fleet with links; it
    hands requests to the replicas in the router's place.
    """

    def __init__(
        self, env: Clock, fleet: Fleet, router: Router, step_models: list[StepModel],
        new_engine: Callable[[Pool, int], Engine], recorder: StepRecorder | None,
        finished: Callable[[int, float], None], table: RequestTable,
        cached: npt.NDArray[Any] | None = None, seed: int = 0, split: Split | None = None,
    ) -> None:  # fmt: skip
        self._env = env
        self._fleet = fleet
        self._router = router
        self._new_engine = new_engine
        self._recorder = recorder
        self._finished = finished
        self._seed = seed
        self._split = split
        self._members = [
            _Members(pool, model, None if fleet.scaling is None else self._new_watch(pool, table, cached))
            for pool, model in zip(fleet.pools, step_models, strict=True)
        ]
        self._number = 0  # of the next replica
        self._replicas: list[AnyReplica] = []  # that take requests, by number
        self._engines = Serving()  # theirs
        self._apart = False  # its replicas are started together, when all are there
        self._pool_of: list[_Members] = []  # theirs
        self._starts = 0  # by a scaler
        # Gets all requests, in a run with a scaler.
        self._taker: Group | None = None
        self._taken = 0  # requests it had taken at the last tick
        self._totals = StepTotals()
        self._next_tick = math.inf
        self._paid = 0.0  # replica-seconds up to `_paid_until`
        self._paid_until = 0.0
        self.changes: list[Change] = []
        self._table = table

    def _new_watch(self, pool: Pool, table: RequestTable, cached: npt.NDArray[Any] | None) -> PoolWatch:
        if self._split is None:
            return PoolWatch(pool, table, cached)
        role = "prefill" if self._fleet.prefills(pool) else "decode"
        return PoolWatch(pool, self._split.table_of(pool), cached, role)

    def start(self, source: Source, ahead: bool = True, threads: int = 1) -> None:
        """Start the first replicas and the scaler.

        source: of the requests to come. ahead: replicas may take them from it before they come. threads: run
        independent replicas.
        """
        self._source = source
        chosen = self._router.in_advance(len(self._table.rows), self._fleet.num_replicas)
        if chosen is None and self._fleet.num_replicas == 1 and self._fleet.routing.is_shipped:
            chosen = np.zeros(len(self._table.rows), np.int64)
        changes = self._fleet.scaling is not None
        separate = not changes and chosen is not None
        ahead = ahead and isinstance(source, OpenLoop) and self._split is None
        self._together, self._apart = ahead and not separate, ahead and separate
        for members in self._members:
            for _ in range(members.pool.count):
                self._add(members)
        group = self._engines.group
        if ahead and isinstance(source, OpenLoop):
            if self._apart and chosen is not None:
                self._start_apart(source, chosen, threads)
            elif group is not None:
                choosing = self._router.compiled(len(self._engines), self._table.asked.input_length, changes)
                if choosing is not None:
                    source.hand_to(group, self._engines[0], choosing)
                    self._taker = group if changes else None
        if self._fleet.scaling is not None:
            self._next_tick = self._env.now
            self._env.process(self._scale(self._fleet.scaling))

    def _start_apart(self, source: OpenLoop, chosen: npt.NDArray[np.int64], threads: int) -> None:
        """Start replicas whose requests are chosen in advance; if they can, they take them before they come."""
        replicas = [replica for replica in self._replicas if isinstance(replica, Replica)]
        if any(engine.asks_python for engine in self._engines):
            for replica in replicas:
                replica.begin()
            return
        source.hand_over(self._engines, chosen)
        threads = threads if self._recorder is None else 1  # one journal
        self._env.process(run_apart(self._env, replicas, source.next_time(), threads))

    def submit(self, request: Request) -> bool:
        """Hand a request to the router's choice; False if that replica can never serve it."""
        if self._split is not None:
            return self._split.submit(request)
        chosen = self._router.route(self._engines, request)
        watch = self._pool_of[chosen].watch
        if watch is not None:
            watch.add_requests(request.index)
        return self._replicas[chosen].submit(request)

    @property
    def totals(self) -> StepTotals:
        """The steps' totals over all replicas; KV pool: of the replicas when the run began."""
        totals = StepTotals()
        totals.merge(self._totals)
        for replica in self._all():
            totals.merge(replica.engine.totals)
        for members in self._members:
            if members.group is not None:
                members.group.replicas.add_bins(totals)
        totals.num_pages = sum(pool.count * pool.setting.limits.num_pages for pool in self._fleet.pools)
        return totals

    def close(self) -> None:
        """Release the replicas, so that their memory is free at once."""
        self._note_taken()
        for members in self._members:
            if members.group is not None:
                members.group.replicas.close()
            members.ready.clear()
            members.draining.clear()
        for collection in (self._replicas, self._engines, self._pool_of):
            collection.clear()

    def replica_time(self, end: float) -> float:
        """Replica-seconds paid up to a time (s)."""
        return self._paid + self._provisioned * max(0.0, end - self._paid_until)

    # ---- one replica -----------------------------------------------------------------------------------------

    def _add(self, members: _Members) -> None:
        """Put a pool's replica into service."""
        if self._number > MOST_REPLICAS:
            raise PolicyError(f"the run starts replica {self._number + 1}, expected at most {MOST_REPLICAS + 1}")
        engine = self._new_engine(members.pool, self._number)
        replica = self._new_replica(members, engine)
        self._number += 1
        members.ready.append(replica)
        self._replicas.append(replica)
        self._engines.append(engine)
        self._pool_of.append(members)
        if self._split is not None:
            assert isinstance(replica, Replica)
            self._split.add(replica, members.pool, members.watch)

    def _new_replica(self, members: _Members, engine: Engine) -> AnyReplica:
        if members.alone is None:
            members.alone = not self._together or engine.runs_alone
        if not members.alone:
            if members.group is None:
                members.group = Group(
                    self._env, members.step_model, self._recorder, self._finished, self._horizon(self._number),
                )  # fmt: skip
                self._engines.group = members.group if len(self._members) == 1 else None
            return members.group.add(engine)
        split = self._split
        prefills = split is not None and split.prefills(members.pool)  # the end of a prefill is not that of a request
        replica = Replica(
            self._env, engine, members.step_model, self._recorder, self._finished if not prefills else lambda *_: None,
            self._horizon(self._number), split is not None or not self._source.foresees,
        )  # fmt: skip
        if not self._apart:
            replica.begin()
        return replica

    def _horizon(self, number: int) -> Callable[[], float]:
        """When an outside event may first change a replica."""
        source, env, count = self._source, self._env, self._fleet.num_replicas
        fixed = self._fleet.scaling is None
        if self._split is not None or (not source.foresees and not (fixed and count == 1)):
            return lambda: env.now  # the next request may come at the end of another replica's
        if not fixed:
            return lambda: min(source.next_time(), self._next_tick, self._next_ready)
        if self._router.takes_turns:
            return lambda: source.next_time(number, count)
        return source.next_time

    def _start_one(self, members: _Members) -> None:
        """Begin to start a replica of a pool."""
        starting = Starting(self._env.now + members.pool.startup.draw(self._seed, self._starts))
        members.starting.append(starting)
        self._env.process(self._become_ready(members, starting))
        self._starts += 1

    def _become_ready(self, members: _Members, starting: Starting) -> Generator[simpy.Event, Any, None]:
        yield self._env.at(starting.ready, DECISION)
        if starting in members.starting:  # it was not cancelled
            members.starting.remove(starting)
            self._add(members)
            self._note(members)
            self._take_by_ready()

    @property
    def _next_ready(self) -> float:
        """When the next starting replica will take requests."""
        return min((server.ready for members in self._members for server in members.starting), default=math.inf)

    def _take_by_ready(self) -> None:
        """Give handed-over requests to the ready replicas."""
        if self._taker is not None:
            self._taker.take_by(self._engines)

    def _catch_up(self) -> None:
        """Hand out the handed-over requests that came by now."""
        if self._taker is not None:
            self._taker.catch_up()
            self._note_taken()

    def _note_taken(self) -> None:
        """Note the requests that replicas have taken since the last time."""
        if self._taker is None:
            return
        new = range(self._taken, self._taker.replicas.num_taken)
        self._taken = new.stop
        watch = self._members[0].watch
        if watch is not None:
            watch.add_requests(*new)

    def _drain_one(self, members: _Members) -> None:
        """Let a pool's newest replica take no more requests, and stop once idle."""
        replica = members.ready.pop()
        members.draining.append(replica)
        index = self._replicas.index(replica)
        for collection in (self._replicas, self._engines, self._pool_of):
            collection.pop(index)
        if self._split is not None:
            assert isinstance(replica, Replica)
            self._split.retire(replica)
        replica.drain()
        self._env.process(self._stop(members, replica))

    def _stop(self, members: _Members, replica: AnyReplica) -> Generator[simpy.Event, Any, None]:
        yield replica.stopped
        self._pay()
        members.draining.remove(replica)
        self._totals.merge(replica.engine.totals)
        self._note(members)

    # ---- the number of replicas ------------------------------------------------------------------------------

    def _scale(self, scaling: Scaling) -> Generator[simpy.Event, Any, None]:
        scaler, env = scaling.scaler.begin(), self._env
        for members in self._members:
            self._note(members)
        ticks = 0
        while True:
            self._next_tick = ticks * scaler.every
            yield env.at(self._next_tick, DECISION)
            ticks += 1
            self._catch_up()
            at_rest = self._split is None or self._split.idle
            if self._source.exhausted and at_rest and all(replica.engine.idle for replica in self._all()):
                self._next_tick = math.inf
                return
            views = [self._view(members) for members in self._members]
            with running_code_of(f"scaler {scaling.spec}, asked at {env.now:g} s"):
                targets = scaler.targets(env.now, views)
            self._resize(self._checked(scaling.spec, targets))
            self._take_by_ready()

    def _checked(self, spec: str, targets: Any) -> list[int]:
        try:
            counts = [int(target) for target in targets]
            ok = len(counts) == len(self._members) and min(counts) >= 0 and sum(counts) >= 1
        except (TypeError, ValueError):
            ok = False
        if not ok:
            raise PolicyError(
                f"scaler {spec} returned {quoted(targets)} at {self._env.now:g} s, expected a number of replicas for "
                f"each of {len(self._members)} pools, at least 1 in all"
            )
        return counts

    def _view(self, members: _Members) -> PoolView:
        assert members.watch is not None
        ready, draining = ([r.engine for r in replicas] for replicas in (members.ready, members.draining))
        return members.watch.view(self._env.now, ready, len(members.starting), draining)

    def _resize(self, targets: list[int]) -> None:
        """Start or drain replicas. One decoding replica keeps taking requests until another is ready."""
        self._pay()
        for members, target in zip(self._members, targets, strict=True):
            missing = target - len(members.ready) - len(members.starting)
            for _ in range(missing):
                self._start_one(members)
            cancelled = min(max(0, -missing), len(members.starting))
            del members.starting[len(members.starting) - cancelled :]
            drained = min(max(0, -missing) - cancelled, len(members.ready))
            if not self._fleet.prefills(members.pool):
                decoding = sum(len(m.ready) for m in self._members if not self._fleet.prefills(m.pool))
                drained = min(drained, max(0, decoding - 1))
            for _ in range(drained):
                self._drain_one(members)
            if missing > 0 or cancelled or drained:
                self._note(members)

    def _all(self) -> list[AnyReplica]:
        return [replica for members in self._members for replica in (*members.ready, *members.draining)]

    @property
    def _provisioned(self) -> int:
        return sum(_provisioned(members) for members in self._members)

    def _pay(self) -> None:
        self._paid = self.replica_time(self._env.now)
        self._paid_until = self._env.now

    def _note(self, members: _Members) -> None:
        change = Change(self._env.now, members.pool.name, len(members.ready), _provisioned(members))
        if self.changes and self.changes[-1][:2] == change[:2]:
            self.changes.pop()
        self.changes.append(change)


def _provisioned(members: _Members) -> int:
    return len(members.starting) + len(members.ready) + len(members.draining)
