"""A recorded run once more, on a fresh engine: what it was built from, and with other latencies or commits."""

from collections.abc import Callable
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
from ..results.run import Columns, Run
from .commits import Commits
from .steps import Lists

Tick = Callable[[], None]


class Price(Protocol):
    """The latency of a step, in seconds."""

    def __call__(self, plan: StepPlan, left: Features | None = None) -> float: ...


@dataclass(frozen=True)
class World:
    """The parts that every engine of a run is built from."""

    policy: Policy
    limits: Limits
    profile: Profile
    emit: str
    eos: bool = False  # requests end at an EOS, which the engine does not foresee

    @property
    def width(self) -> int:
        """Columns of a plan's window."""
        return self.policy.block_length * (2 if self.policy.obs else 1)


def world_of(run: Run, name: str, profile: Profile) -> World:
    """The world of a run's policy. A run that did not keep its limits has its pool; the profile says the rest."""
    policy, emit = run.policy(name), run.info.get("emit", "block").split(" ")[0]
    eos = run.info.get("eos", False)
    if caches_prefixes(policy):
        raise DsimError(
            f"{run.folder}: {name} reused pages, and a run does not keep what its requests begin with (--no-parts "
            "compares without a decomposition)"
        )
    profile = replace(profile, frontend=run.info.get("profile", {}).get("frontend", 0.0))
    for kept in run.info.get("limits", []):
        if kept["policy"] == name:
            return World(policy, Limits(**{k: v for k, v in kept.items() if k != "policy"}), profile, emit, eos)
    summary = next(p for p in run.info["policies"] if p["policy"] == name)
    num_pages = summary["kv_pages"] // max(1, run.info.get("replicas", 1))
    batching = policy.batching
    max_batch = batching.max_batch
    if max_batch is None:  # as LMDeploy clamps it (block-diffusion.md 1.1)
        max_batch = batching.batch_on(profile.device, profile.default_max_batch, policy.block_length)
    budget = batching.max_prefill_tokens
    if policy.memory.num_pages is None:
        budget = profile.memory.fit(policy.memory.page_size, max_batch, budget)[1]
    limits = Limits(num_pages, profile.model.context_limit, max_batch, budget, profile.model.state_tokens)
    return World(policy, limits, profile, emit, eos)


def witness(world: World, run: Run, requests: Columns, steps: Columns, lists: Lists, commits: Commits) -> None:
    """Replay a journal plan for plan, and take down into `commits` what it committed; a DsimError where it differs."""
    table = RequestTable(int(requests["request"].max(initial=-1)) + 1)
    for replica in np.unique(steps["replica"]).tolist():
        engine = _engine(world, table, replica)
        for line in replay(engine, replica, requests, steps, lists, commits.see):
            raise DsimError(
                f"{run.folder}: {world.policy.name} does not replay plan for plan with profile {world.profile.name}: "
                f"{line} (--no-parts compares without a decomposition)"
            )


def rerun(world: World, requests: Columns, price: Price, commits: Commits, tick: Tick = lambda: None) -> Columns:
    """The requests on the twin's clock when steps take `price` and positions commit as in `commits`.

    Each goes to the replica that `requests` says. `tick` is called once a step.
    """
    table = RequestTable(int(requests["request"].max(initial=-1)) + 1)
    for replica in np.unique(requests["replica"][requests["replica"] >= 0]).tolist():
        mine = {name: column[requests["replica"] == replica] for name, column in requests.items()}
        _serve(_engine(world, table, replica), mine, world.profile.frontend, price, commits, tick)
    return table.columns


def _serve(engine: Engine, requests: Columns, delay: float, price: Price, commits: Commits, tick: Tick) -> None:
    """delay: s from a client to the engine and back (sim/twin.py)."""
    early = Ends(engine.policy, requests)
    order = np.lexsort((requests["request"], requests["arrival"]))
    coming = list(requests_of(requests, order))
    taken = 0

    def deliver(now: float) -> bool:
        nonlocal taken
        while taken < len(coming) and coming[taken].arrival + delay <= now:
            engine.submit(coming[taken])
            taken += 1
        return True

    def wait(_now: float) -> float | None:
        return None if taken == len(coming) else coming[taken].arrival + delay

    def step(plan: StepPlan) -> StepOutcome:
        committed, retained = commits.of(plan)
        left = None if retained is None else features_left(plan, retained)
        return StepOutcome(price(plan, left), committed, retained=retained, ends=early.of(plan, committed))

    serve(engine, step, deliver=deliver, wait=wait, told=lambda *_: tick())


def _engine(world: World, table: RequestTable, replica: int) -> Engine:
    return Engine(
        world.policy, world.limits, table, replica=replica, latency=world.profile.latency, emit=world.emit,
        eos=world.eos,
    )  # fmt: skip
