"""Serve a recorded run's requests again, with recorded or other latencies and commits."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..engine.engine import Engine, Limits
from ..engine.errors import DsimError
from ..engine.journal import RequestTable
from ..engine.loop import serve
from ..engine.prefix import caches_prefixes
from ..engine.replay import Ends, replay
from ..engine.request import requests_of
from ..engine.spec import Policy
from ..engine.step import StepOutcome, StepPlan
from ..profiler.profile import Profile
from ..profiler.samples import Bools
from ..results.metrics import rows_of
from ..results.run import Columns, Run
from ..sim.setting import Setting
from .latencies import Prices
from .recorded_commits import Commits
from .steps import Journal

CommitsOf = Callable[[StepPlan], Bools]  # committed positions, [rows, width]


@dataclass(frozen=True)
class Recording:
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
        return self.policy.width

    def engine(self, table: RequestTable, replica: int) -> Engine:
        return self.setting.engine(table, replica=replica, emit=self.emit, eos=self.eos, limits=self.limits)


def recording_of(run: Run, name: str, profile: Profile) -> Recording:
    """Without recorded limits, with its setting's."""
    policy = run.policy(name)
    if caches_prefixes(policy):
        raise DsimError(f"{run.folder}: {name} reused pages, and a run does not keep what its requests begin with")
    info = run.info
    workload = next((model.workload for model in info.commit_models if model.policy == name), None)
    frontend = info.profile.frontend if info.profile is not None else 0.0
    setting = Setting(policy, replace(profile, frontend=frontend), workload)
    return Recording(setting, info.limits.get(name, setting.limits), info.emit.split(" ")[0], info.eos)


def witness(recording: Recording, run: Run, journal: Journal, commits: Commits) -> None:
    """Replay a journal and record its commits; DsimError if a plan differs."""
    table = _table(journal.requests)
    for replica in np.unique(journal.steps["replica"]).tolist():
        engine = recording.engine(table, replica)
        for line in replay(engine, replica, journal.requests, journal.steps, journal.lists, on_step=commits.record):
            raise DsimError(
                f"{run.folder}: {recording.policy.name} does not replay plan for plan with profile "
                f"{recording.profile.name}: {line}"
            )


def rerun(
    recording: Recording, requests: Columns, price: Prices, commits: CommitsOf, on_step: Callable[[], None]
) -> Columns:
    """Serve in simulated time, on the recorded replicas. `on_step` is called once a step."""
    table = _table(requests)
    for replica in np.unique(requests["replica"][requests["replica"] >= 0]).tolist():
        rows = rows_of(requests, requests["replica"] == replica)
        _serve(recording, recording.engine(table, replica), rows, price, commits, on_step)
    return table.columns


def _serve(
    recording: Recording,
    engine: Engine,
    requests: Columns,
    price: Prices,
    commits: CommitsOf,
    on_step: Callable[[], None],
) -> None:
    ends = Ends(engine.policy, requests)
    order = np.lexsort((requests["request"], requests["arrival"]))
    due = (requests["arrival"] + recording.profile.frontend)[order].tolist()  # s, at the engine
    arrivals = deque(zip(due, requests_of(requests, order), strict=True))

    def deliver(now: float) -> bool:
        while arrivals and arrivals[0][0] <= now:
            engine.submit(arrivals.popleft()[1])
        return True

    def wait(_now: float) -> float | None:
        return next((arrival for arrival, _ in arrivals), None)

    def step(plan: StepPlan) -> StepOutcome:
        committed = commits(plan)
        return StepOutcome(price(plan), committed, ends=ends.of(plan, committed))

    serve(engine, step, deliver=deliver, wait=wait, on_step=lambda *_: on_step())


def _table(requests: Columns) -> RequestTable:
    return RequestTable(int(requests["request"].max(initial=-1)) + 1)
