"""The replicas of a running fleet: its pools run them, and a receiver hands them requests.

What changes a fleet is a component with a small interface: a `Receiver` (`Routed` below, `split.Split`) and a scaler
(`autoscaler.Fixed`, `autoscaler.Autoscaler`). SimPy holds the events between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..engine.engine import Engine
from ..engine.errors import PolicyError
from ..engine.journal import RequestTable, StepRecorder, StepTotals
from ..engine.request import Request
from .clock import Clock
from .group import Group, Member
from .pools import Fleet, Pool
from .replica import Replica, Timeline
from .routers.router import Router
from .sources import OpenLoop, Source
from .step_model import StepModel

AnyReplica = Replica | Member

MOST_REPLICAS = 32_767  # of a run: a journal has 16 bits for a replica's number


class Receiver:
    """Hands the requests that come to replicas."""

    busy = False  # requests are on their way between replicas

    def submit(self, request: Request) -> bool:
        """Take an arriving request; False if no replica can ever serve it."""
        raise NotImplementedError

    def new_replica(self, timeline: Timeline, engine: Engine, pool: Pool) -> Replica:
        return Replica(timeline, engine)

    def add(self, replica: AnyReplica) -> None:
        """Let a new replica take requests."""

    def retire(self, replica: AnyReplica) -> None:
        """Let a replica take no more requests but those on their way to it."""

    def catch_up(self) -> None:
        """Hand out what came by now, before a scaler looks."""

    def resume(self) -> None:
        """Go on with the replicas that now take requests."""


class Routed(Receiver):
    """Hands each request to the replica that a router chooses."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.engines: list[Engine] = []  # that take requests, by number
        self._replicas: list[AnyReplica] = []  # theirs
        self._taker: Group | None = None  # a pool with all requests, which chooses in compiled code

    def submit(self, request: Request) -> bool:
        return self._replicas[self.router.route(self.engines, request)].submit(request)

    def add(self, replica: AnyReplica) -> None:
        self._replicas.append(replica)
        self.engines.append(replica.engine)

    def retire(self, replica: AnyReplica) -> None:
        self._replicas.remove(replica)
        self.engines.remove(replica.engine)

    def hand_all(self, source: OpenLoop, group: Group, table: RequestTable, scales: bool) -> None:
        """Hand all requests to the group of all replicas, if the router can choose in compiled code."""
        figures = self.router.compiled(len(self.engines), table.asked.input_length, scales)
        if figures is not None:
            source.hand_to(group, self.engines[0], figures)
            self._taker = group

    def catch_up(self) -> None:
        if self._taker is not None:
            self._taker.catch_up()

    def resume(self) -> None:
        if self._taker is not None:
            self._taker.take_by(self.engines)


@dataclass(eq=False)
class Members:
    """The replicas of one pool."""

    pool: Pool
    table: RequestTable
    timeline: Timeline
    together: bool  # one group runs them
    group: Group | None = None
    numbers: list[int] = field(default_factory=list)  # of all replicas so far
    ready: list[AnyReplica] = field(default_factory=list)
    draining: list[AnyReplica] = field(default_factory=list)

    @property
    def replicas(self) -> list[AnyReplica]:
        return [*self.ready, *self.draining]


class Servers:
    """The replicas of a fleet while a run lasts.

    next_change: when a scaler may change their number (s).
    """

    def __init__(
        self, env: Clock, fleet: Fleet, receiver: Receiver, source: Source, *, tables: Sequence[RequestTable],
        step_models: Sequence[StepModel], new_engine: Callable[[Pool, RequestTable, int], Engine],
        recorder: StepRecorder | None, finished: Callable[[int, float], None], ahead: bool,
    ) -> None:  # fmt: skip
        """Tables: the one that each pool's engines write.

        new_engine: of a replica of this number. finished: as in Timeline. ahead: replicas may take requests from the
        source before they come.
        """
        self._env, self._fleet, self._new_engine, self._recorder = env, fleet, new_engine, recorder
        self._finished = finished
        self._receiver = receiver
        self._source = source
        self.next_change: Callable[[], float] = lambda: np.inf
        self._number = 0  # of the next replica
        self._stopped = StepTotals()  # of replicas that are gone
        self._ahead = ahead and not fleet.links
        self._every = 1  # a replica takes one request of so many, in turn
        self._chosen = None  # [requests] replica of each
        if isinstance(receiver, Routed) and fleet.scaling is None:
            num_requests = len(tables[0].rows)
            self._chosen = receiver.router.in_advance(num_requests, fleet.num_replicas)
            if receiver.router.takes_turns:
                self._every = fleet.num_replicas
            if fleet.num_replicas == 1 and fleet.routing.is_shipped:
                self._chosen = np.zeros(num_requests, np.int64)
        self.pools = [self._members(*each) for each in zip(fleet.pools, tables, step_models, strict=True)]

    def _members(self, pool: Pool, table: RequestTable, step_model: StepModel) -> Members:
        fleet, source = self._fleet, self._source
        finished, horizon = self._finished, self._next_event
        if fleet.prefills(pool):  # the end of a prefill is not that of a request
            finished = _ignore
        alone = fleet.scaling is None and fleet.num_replicas == 1
        if fleet.links or not (source.foresees or alone):  # the next request may come at the end of another replica's
            horizon = self._now
        reports = bool(fleet.links) or not source.foresees
        timeline = Timeline(self._env, step_model, self._recorder, finished, horizon=horizon, until_finish=reports)
        return Members(pool, table, timeline, self._ahead and self._chosen is None)

    def _now(self, replica: int) -> float:
        return self._env.now

    def _next_event(self, replica: int) -> float:
        return min(self._source.next_time(replica, self._every), self.next_change())

    def start(self) -> None:
        """Start the first replicas; if they can, they take their requests before they come."""
        for members in self.pools:
            for _ in range(members.pool.count):
                self.add(members)
        source, receiver, group = self._source, self._receiver, self.pools[0].group
        if not (self._ahead and isinstance(source, OpenLoop) and isinstance(receiver, Routed)):
            return
        if self._chosen is not None:
            if not any(engine.asks_python for engine in receiver.engines):
                source.hand_over(receiver.engines, self._chosen)
        elif group is not None and len(self.pools) == 1:
            receiver.hand_all(source, group, self.pools[0].table, self._fleet.scaling is not None)

    def add(self, members: Members) -> None:
        """Put a pool's replica into service."""
        if self._number > MOST_REPLICAS:
            raise PolicyError(f"the run starts replica {self._number + 1}, expected at most {MOST_REPLICAS + 1}")
        engine = self._new_engine(members.pool, members.table, self._number)
        members.together = members.together and not engine.runs_alone
        replica: AnyReplica
        if members.together:
            members.group = members.group or Group(members.timeline)
            replica = members.group.add(engine)
        else:
            replica = self._receiver.new_replica(members.timeline, engine, members.pool)
        members.ready.append(replica)
        members.numbers.append(self._number)
        self._number += 1
        self._receiver.add(replica)

    def drain(self, members: Members) -> AnyReplica:
        """Let a pool's newest replica take no more requests, and stop once idle."""
        replica = members.ready.pop()
        members.draining.append(replica)
        self._receiver.retire(replica)
        replica.drain()
        return replica

    def remove(self, members: Members, replica: AnyReplica) -> None:
        """Remove a replica that has drained."""
        members.draining.remove(replica)
        self._stopped.merge(replica.engine.totals)

    @property
    def idle(self) -> bool:
        """Whether all has been served, and nothing is still to come."""
        waits = self._receiver.busy or not self._source.exhausted
        return not waits and all(replica.engine.idle for members in self.pools for replica in members.replicas)

    @property
    def totals(self) -> StepTotals:
        """The steps' totals over all replicas; KV pool: of the replicas when the run began."""
        totals = StepTotals()
        totals.merge(self._stopped)
        for members in self.pools:
            for replica in members.replicas:
                totals.merge(replica.engine.totals)
            if members.group is not None:
                members.group.replicas.add_bins(totals)
        totals.num_pages = sum(pool.count * pool.setting.limits.num_pages for pool in self._fleet.pools)
        return totals

    def close(self) -> None:
        """Release the replicas, so that their memory is free at once."""
        for members in self.pools:
            if members.group is not None:
                members.group.replicas.close()
            for replica in members.replicas:
                self._receiver.retire(replica)
            members.ready.clear()
            members.draining.clear()


def _ignore(count: int, now: float) -> None:
    """Of `finished`."""
