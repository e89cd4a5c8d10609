"""Replicas of a pool run together: one compiled call runs all that are due before the next arrival."""

import math
from collections.abc import Sequence

import simpy

from ..engine.engine import Engine
from ..engine.replicas import Replicas
from ..engine.request import Request
from ..engine.state import Inbox
from .replica import Timeline


class Member:
    """A replica of a group, with `Replica`'s interface."""

    def __init__(self, group: "Group", engine: Engine, place: int, stopped: simpy.Event) -> None:
        self.engine = engine
        self.stopped = stopped  # after `drain`, when its last request has ended
        self.place = place
        self._group = group

    def submit(self, request: Request) -> bool:
        """Hand the engine a request; False if it can never fit."""
        accepted = self.engine.submit(request)
        self._group.touched(self.place)
        return accepted

    def drain(self) -> None:
        """End after its last request; no more may come."""
        self._group.drain(self)


class Group:
    """Replicas of one setting with known arrival times and no other influence.

    The same result as a `Replica` process each.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._env = timeline.env
        self.replicas = Replicas()
        self._draining: list[Member] = []
        self._done = 0  # finished requests
        self._alarm = math.nan  # s, of the next run
        self._woken = False

    def add(self, engine: Engine) -> Member:
        return Member(self, engine, self.replicas.add(engine), self._env.event())

    def take(self, inbox: Inbox, figures: tuple[str, ...]) -> None:
        """Hand these requests to replicas as they come (Replicas.take)."""
        self.replicas.take(inbox, figures)
        self._wake()

    def take_by(self, engines: Sequence[Engine]) -> None:
        """Have these replicas take the requests handed over; run all again."""
        self.replicas.take_by(engines)
        self._wake()

    def catch_up(self) -> None:
        """Hand out what has come; begin steps that began before."""
        while not self._run(-math.inf, self._env.now):
            pass

    def touched(self, place: int) -> None:
        """Run a replica with a new request, after this moment's other arrivals."""
        if self.replicas.due[place] == math.inf:
            self.replicas.due[place] = self._env.now
        self._wake()

    def drain(self, member: Member) -> None:
        self._draining.append(member)
        self._wake()

    def _run(self, now: float, horizon: float) -> bool:
        model = self._timeline.step_model
        return self.replicas.run(now, horizon, model.arrays, model.cost, self._timeline.recorder)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._call_at(self._env.now)

    def _call_at(self, time: float) -> None:
        self._env.at(time).callbacks.append(self._on_time)

    def _on_time(self, _event: simpy.Event) -> None:
        # Usually all steps that end now ran with an earlier arrival.
        if self._woken or self._draining or self.replicas.due.min() in (math.inf, self._env.now):
            self._advance()

    def _advance(self) -> None:
        env, replicas, horizon = self._env, self.replicas, self._timeline.horizon
        self._woken = False
        over = self._run(env.now, horizon(0))
        completed = replicas.num_completed
        if completed > self._done:
            self._timeline.finished(completed - self._done, env.now)
            self._done = completed
        if not over:
            self._wake()  # so that a long run can be stopped
            return
        following = float(replicas.due.min())
        if following == math.inf:
            following = replicas.clock
            if replicas.more_come:
                following = horizon(0)
        if env.now < following < math.inf and following != self._alarm:
            self._alarm = following
            self._call_at(following)
        for member in [member for member in self._draining if member.engine.idle]:
            if member.engine.clock > env.now:
                self._call_at(member.engine.clock)
                continue
            self._draining.remove(member)
            self._done -= member.engine.num_completed
            replicas.remove(member.place)
            member.stopped.succeed()
