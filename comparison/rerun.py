"""Serve a recorded run's requests again, with recorded or other latencies and commits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..engine.engine import Engine, Limits
from ..engine.errors import DsimError
from ..engine.journal import RequestTable
from ..engine.latency import Features
from ..engine.loop import serve
from ..engine.policy import Policy
from ..engine.prefix import caches_prefixes
from ..engine.replay import Ends, replay
from ..engine.request import requests_of
from ..engine.step import StepOutcome, StepPlan, features_left
from ..profiler.profile import Profile
from ..results.metrics import Floats, rows_of
from ..results.run import Columns, Run
from ..sim.setting import Setting
from ..traces import Trace
from .commits import Bools, Commits
from .steps import Ints, Lists, blocks_ended

Tick = Callable[[], None]
CommitsOf = Callable[[StepPlan], tuple[Bools, Bools | None]]  # committed; retained if the plan may evict


class Price(Protocol):
    """Latency, s. blocks: completed ones, if they cost."""

    def __call__(self, plan: StepPlan, left: Features | None = None, blocks: int = 0) -> float: ...


@dataclass(frozen=True)
class World:
    """What every engine of a recorded run is built from."""

    setting: Setting
    limits: Limits  # as recorded
    emit: str
    eos: bool = False  # an unforeseen EOS ends requests

    @property
    def policy(self) -> Policy:
        return self.setting.policy

    @property
    def profile(self) -> Profile:
        return self.setting.profile

    @property
    def width(self) -> int:
        return self.policy.block_length * (2 if self.policy.obs else 1)


def world_of(run: Run, name: str, profile: Profile) -> World:
    """The world of a recorded run; without recorded limits, with its setting's."""
    policy = run.policy(name)
    if caches_prefixes(policy):
        raise DsimError(f"{run.folder}: {name} reused pages, and a run does not keep what its requests begin with")
    info = run.info
    workload = next((model.workload for model in info.commit_models if model.policy == name), None)
    frontend = 0.0 if info.profile is None else info.profile.frontend
    setting = Setting(policy, replace(profile, frontend=frontend), workload)
    return World(setting, info.limits.get(name, setting.limits), info.emit.split(" ")[0], info.eos)


def witness(world: World, run: Run, requests: Columns, steps: Columns, lists: Lists, commits: Commits) -> Ints:
    """Replay a journal and record its commits; DsimError if a plan differs.

    Returns the blocks completed by each step, [steps].
    """
    ended = np.zeros(len(steps["step"]), np.int64)
    table = RequestTable(int(requests["request"].max(initial=-1)) + 1)
    for replica in np.unique(steps["replica"]).tolist():
        engine, rows = _engine(world, table, replica), iter(np.flatnonzero(steps["replica"] == replica).tolist())

        def see(plan: StepPlan, outcome: StepOutcome, rows: Iterator[int] = rows) -> None:
            commits.see(plan, outcome)
            ended[next(rows)] = blocks_ended(plan.status, outcome.committed, world.policy.block_length)

        for line in replay(engine, replica, requests, steps, lists, see):
            raise DsimError(
                f"{run.folder}: {world.policy.name} does not replay plan for plan with profile {world.profile.name}: "
                f"{line}"
            )
    return ended


def drawn(world: World, requests: Columns, seed: int) -> CommitsOf:
    """Commits that the profile draws with another seed."""
    lengths = np.ones((3, int(requests["request"].max(initial=-1)) + 1), np.int64)
    asked = np.where(requests["limited"], requests["max_tokens"], 0)
    lengths[:, requests["request"]] = requests["input_length"], requests["output_length"], asked
    limits = [limit or None for limit in lengths[2].tolist()]
    trace = Trace("rerun", np.zeros(len(limits)), lengths[0], lengths[1], {"max_tokens": limits})
    model = world.setting.step_model(world.setting.draws(seed, trace))

    def commits(plan: StepPlan) -> tuple[Bools, Bools | None]:
        outcome = model.step(plan)
        return outcome.committed, outcome.retained

    return commits


def rerun(world: World, requests: Columns, price: Price, commits: CommitsOf, tick: Tick = lambda: None) -> Columns:
    """Serve in simulated time, on the recorded replicas. `tick` is called once a step."""
    table = RequestTable(int(requests["request"].max(initial=-1)) + 1)
    reach = requests["arrival"] + world.profile.frontend
    for replica in np.unique(requests["replica"][requests["replica"] >= 0]).tolist():
        own = requests["replica"] == replica
        mine = rows_of(requests, own)
        of_blocks = world.profile.latency.host_block > 0
        _serve(_engine(world, table, replica), mine, reach[own], price, commits, tick, of_blocks)
    return table.columns


def _serve(
    engine: Engine, requests: Columns, reach: Floats, price: Price, commits: CommitsOf, tick: Tick, of_blocks: bool
) -> None:
    """reach: s, at the engine. of_blocks: whether blocks cost."""
    early = Ends(engine.policy, requests)
    order = np.lexsort((requests["request"], requests["arrival"]))
    coming, due = list(requests_of(requests, order)), reach[order].tolist()
    taken = 0

    def deliver(now: float) -> bool:
        nonlocal taken
        while taken < len(coming) and due[taken] <= now:
            engine.submit(coming[taken])
            taken += 1
        return True

    def wait(_now: float) -> float | None:
        return None if taken == len(coming) else due[taken]

    def step(plan: StepPlan) -> StepOutcome:
        committed, retained = commits(plan)
        left = None if retained is None else features_left(plan, retained)
        blocks = blocks_ended(plan.status, committed, engine.policy.block_length) if of_blocks else 0
        return StepOutcome(price(plan, left, blocks), committed, retained=retained, ends=early.of(plan, committed))

    serve(engine, step, deliver=deliver, wait=wait, told=lambda *_: tick())


def _engine(world: World, table: RequestTable, replica: int) -> Engine:
    return world.setting.engine(table, replica=replica, emit=world.emit, eos=world.eos, limits=world.limits)
