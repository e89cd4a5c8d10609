"""Serve a recorded run's requests again, with recorded or other latencies and commits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..engine.engine import Engine, Limits
from ..engine.errors import DsimError
from ..engine.journal import RequestTable
from ..engine.loop import serve
from ..engine.policy import Policy
from ..engine.prefix import caches_prefixes
from ..engine.replay import Ends, replay
from ..engine.request import requests_of
from ..engine.step import StepOutcome, StepPlan, features_left
from ..profiler.profile import Profile
from ..results.metrics import rows_of
from ..results.run import Columns, Run
from ..sim.setting import Setting
from ..traces import Trace
from .commits import Bools, Commits
from .latencies import Prices
from .steps import Journal

CommitsOf = Callable[[StepPlan], tuple[Bools, Bools | None]]  # committed; retained if the plan may evict


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
        return self.policy.block_length * (2 if self.policy.obs else 1)

    def engine(self, table: RequestTable, replica: int) -> Engine:
        return self.setting.engine(table, replica=replica, emit=self.emit, eos=self.eos, limits=self.limits)


def recording_of(run: Run, name: str, profile: Profile) -> Recording:
    """Without recorded limits, with its setting's."""
    policy = run.policy(name)
    if caches_prefixes(policy):
        raise DsimError(f"{run.folder}: {name} reused pages, and a run does not keep what its requests begin with")
    info = run.info
    workload = next((model.workload for model in info.commit_models if model.policy == name), None)
    frontend = 0.0 if info.profile is None else info.profile.frontend
    setting = Setting(policy, replace(profile, frontend=frontend), workload)
    return Recording(setting, info.limits.get(name, setting.limits), info.emit.split(" ")[0], info.eos)


def witness(recording: Recording, run: Run, journal: Journal, commits: Commits) -> None:
    """Replay a journal and record its commits; DsimError if a plan differs."""
    table = _table(journal.requests)
    for replica in np.unique(journal.steps["replica"]).tolist():
        engine = recording.engine(table, replica)
        for line in replay(engine, replica, journal.requests, journal.steps, journal.lists, commits.record):
            raise DsimError(
                f"{run.folder}: {recording.policy.name} does not replay plan for plan with profile "
                f"{recording.profile.name}: {line}"
            )


def drawn(recording: Recording, requests: Columns, seed: int) -> CommitsOf:
    """Commits that the profile draws with another seed."""
    lengths = np.ones((3, len(_table(requests).rows)), np.int64)
    limits = np.where(requests["limited"], requests["max_tokens"], 0)
    lengths[:, requests["request"]] = requests["input_length"], requests["output_length"], limits
    extras = {"max_tokens": [limit or None for limit in lengths[2].tolist()]}
    trace = Trace("rerun", np.zeros(lengths.shape[1]), lengths[0], lengths[1], extras)
    model = recording.setting.step_model(recording.setting.draws(seed, trace))

    def commits(plan: StepPlan) -> tuple[Bools, Bools | None]:
        outcome = model.step(plan)
        return outcome.committed, outcome.retained

    return commits


def rerun(
    recording: Recording,
    requests: Columns,
    price: Prices,
    commits: CommitsOf,
    on_step: Callable[[], None] = lambda: None,
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
    arrivals = list(requests_of(requests, order))
    due = (requests["arrival"] + recording.profile.frontend)[order].tolist()  # s, at the engine
    count = 0

    def deliver(now: float) -> bool:
        nonlocal count
        while count < len(arrivals) and due[count] <= now:
            engine.submit(arrivals[count])
            count += 1
        return True

    def wait(_now: float) -> float | None:
        return None if count == len(arrivals) else due[count]

    def step(plan: StepPlan) -> StepOutcome:
        committed, retained = commits(plan)
        features = None if retained is None else features_left(plan, retained)
        return StepOutcome(price(plan, features), committed, retained=retained, ends=ends.of(plan, committed))

    serve(engine, step, deliver=deliver, wait=wait, told=lambda *_: on_step())


def _table(requests: Columns) -> RequestTable:
    return RequestTable(int(requests["request"].max(initial=-1)) + 1)
