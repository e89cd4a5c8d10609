"""What changes the number of replicas during a run: nothing, or a scaler that is asked at ticks."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy

from ..engine.errors import PolicyError, quoted
from ..engine.outside import running_code_of
from .clock import DECISION, Clock
from .pool_watch import PoolWatch
from .scalers import Scaling
from .servers import AnyReplica, Members, Receiver, Servers


class Change(NamedTuple):
    """The replicas of a pool from a time on."""

    time: float  # s
    pool: str
    ready: int  # that take requests
    provisioned: int  # paid: starting, ready or draining


class Fixed:
    """Keeps each pool's number of replicas."""

    changes: Sequence[Change] = ()

    def replica_time(self, end: float) -> float | None:
        """Replica-seconds paid up to a time (s), if the number changes."""
        return None


@dataclass(eq=False)
class _Scaled:
    """A pool, what a scaler sees of it, and when each starting replica will take requests (s), the newest last."""

    members: Members
    watch: PoolWatch
    starting: dict[object, float] = field(default_factory=dict)

    @property
    def provisioned(self) -> int:
        return len(self.starting) + len(self.members.replicas)


class Autoscaler(Fixed):
    """Asks a scaler at ticks, and starts and drains replicas.

    watch: makes what the scaler sees of a pool.
    """

    def __init__(
        self, env: Clock, servers: Servers, receiver: Receiver, scaling: Scaling, watch: Callable[[Members], PoolWatch]
    ) -> None:
        self._env, self._servers, self._receiver, self._scaling = env, servers, receiver, scaling
        self._pools = [_Scaled(members, watch(members)) for members in servers.pools]
        self.changes: list[Change] = []
        self._next_tick = env.now
        self._paid = 0.0  # replica-seconds up to `_paid_until`
        self._paid_until = 0.0
        servers.next_change = self._next_change
        env.process(self._run())

    def replica_time(self, end: float) -> float:
        return self._paid + sum(pool.provisioned for pool in self._pools) * max(0.0, end - self._paid_until)

    def _next_change(self) -> float:
        """The next tick, or when a starting replica will take requests."""
        return min(self._next_tick, *(time for pool in self._pools for time in pool.starting.values()), math.inf)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        scaler, spec, env = self._scaling.scaler.begin(), self._scaling.spec, self._env
        for pool in self._pools:
            self._note(pool)
        ticks = 0
        while True:
            self._next_tick = ticks * scaler.every
            yield env.at(self._next_tick, DECISION)
            ticks += 1
            self._receiver.catch_up()
            if self._servers.idle:
                self._next_tick = math.inf
                return
            views = [pool.watch.view(env.now, pool.members, len(pool.starting)) for pool in self._pools]
            with running_code_of(f"scaler {spec}, asked at {env.now:g} s"):
                targets = scaler.targets(env.now, views)
            self._resize(self._checked(targets))
            self._receiver.resume()

    def _checked(self, targets: Any) -> list[int]:
        counts: list[int] = []
        with suppress(TypeError, ValueError):
            counts = [int(target) for target in targets]
        if len(counts) != len(self._pools) or min(counts) < 0 or sum(counts) < 1:
            raise PolicyError(
                f"scaler {self._scaling.spec} returned {quoted(targets)} at {self._env.now:g} s, expected a number of "
                f"replicas for each of {len(self._pools)} pools, at least 1 in all"
            )
        return counts

    def _resize(self, targets: list[int]) -> None:
        """Start or drain replicas. One decoding replica keeps taking requests until another is ready."""
        self._pay()
        for pool, target in zip(self._pools, targets, strict=True):
            ready, starting = pool.members.ready, pool.starting
            missing = target - len(ready) - len(starting)
            for _ in range(missing):
                self._start_one(pool)
            cancelled = min(max(0, -missing), len(starting))
            for _ in range(cancelled):
                starting.popitem()
            drained = min(max(0, -missing) - cancelled, len(ready))
            if pool.watch.role != "prefill":
                decoding = sum(len(other.members.ready) for other in self._pools if other.watch.role != "prefill")
                drained = min(drained, max(0, decoding - 1))
            for _ in range(drained):
                self._env.process(self._stop(pool, self._servers.drain(pool.members)))
            if missing > 0 or cancelled or drained:
                self._note(pool)

    def _start_one(self, pool: _Scaled) -> None:
        start = object()
        pool.starting[start] = self._env.now + pool.members.pool.startup
        self._env.process(self._become_ready(pool, start))

    def _become_ready(self, pool: _Scaled, start: object) -> Generator[simpy.Event, Any, None]:
        yield self._env.at(pool.starting[start], DECISION)
        if pool.starting.pop(start, None) is not None:  # it was not cancelled
            self._servers.add(pool.members)
            self._note(pool)
            self._receiver.resume()

    def _stop(self, pool: _Scaled, replica: AnyReplica) -> Generator[simpy.Event, Any, None]:
        yield replica.stopped
        self._pay()
        self._servers.remove(pool.members, replica)
        self._note(pool)

    def _pay(self) -> None:
        self._paid = self.replica_time(self._env.now)
        self._paid_until = self._env.now

    def _note(self, pool: _Scaled) -> None:
        members = pool.members
        change = Change(self._env.now, members.pool.name, len(members.ready), pool.provisioned)
        if self.changes and self.changes[-1][:2] == change[:2]:
            self.changes.pop()
        self.changes.append(change)
