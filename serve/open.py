"""Open and warm up a server's fleet: a twin in real time, or a model on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..engine.commits import CommitDraws
from ..engine.engine import Limits
from ..engine.errors import DsimError
from ..engine.journal import Append, RequestTable, StepRecorder, StepTotals
from ..engine.loop import Executor, serve
from ..engine.prefix import ToldPrefixes, caches_prefixes
from ..engine.rehearsal import rehearse
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from ..profiler.profile import Profile
from ..results.metrics import Columns, Summary, summarize
from ..results.on_device import LiveSetting
from ..results.provenance import commit_infos, profile_info
from ..results.run_info import LiveInfo, RunInfo, TraceInfo
from ..results.slo import Slo
from ..results.world import World
from ..sim.routers import routing
from ..sim.setting import Setting
from ..sim.step_model import StepModel
from ..traces import Trace
from .real_time import Clock
from .served import Fleet, Text
from .words import Bytes, Filler, Tokenized, Words

if TYPE_CHECKING:
    from ..profiler.measure import Opened

MAX_REQUESTS = 250_000  # in a server's life: rows of the journal's table


@dataclass(frozen=True)
class Behind:
    """A fleet ready to start, and what its run says."""

    fleet: Fleet
    executors: Sequence[Executor]
    text: Text | None
    words: Words
    spec: str
    about: str  # one line
    header: str
    info: RunInfo

    @property
    def model(self) -> str:
        assert self.info.live is not None
        return self.info.live.model

    def start(self) -> None:
        self.fleet.start(self.executors, self.text)

    def columns(self) -> Columns:
        """Received requests, as in the journal."""
        return {name: column[: self.fleet.num_requests] for name, column in self.fleet.table.columns.items()}

    def summarize(self, totals: StepTotals, slos: Sequence[Slo]) -> Summary:
        return summarize(self.spec, self.columns(), totals, slos, replicas=len(self.fleet.engines))

    def run_info(self, summary: Summary, slos: Sequence[Slo]) -> RunInfo:
        gaps = np.diff(self.columns()["arrival"])
        rate = 1.0 / float(gaps.mean()) if gaps.sum() > 0 else None
        return replace(
            self.info,
            trace=replace(self.info.trace, num_requests=self.fleet.num_requests, rate=rate),
            slos=tuple(map(str, slos)),
            policies=(summary,),
        )


def open_twin(
    world: World,
    *,
    speed: float = 1.0,
    tokenizer: str | None = None,
    append: Append | None = None,
    metrics_as: str | None = None,
) -> Behind:
    """The twin of a world's policy, profile and replicas; its text is filler.

    speed: simulated s per real s. metrics_as: engine whose metrics are published.
    """
    clock = Clock(speed)
    if not 1 <= world.replicas <= 64:
        raise DsimError(f"replicas is {world.replicas}, expected 1 to 64: each is a thread")
    setting = world.setting().check()
    profile, policy, limits = setting.profile, setting.policy, setting.limits
    draws = setting.draws(world.seed, _unknown())
    table = RequestTable(MAX_REQUESTS)
    prefixes = None
    if caches_prefixes(policy) or world.routing().kind.goes_by_prefix:
        prefixes = ToldPrefixes(policy.memory.page_size, MAX_REQUESTS)
    numbers = range(world.replicas)
    engines = [setting.engine(table, replica=r, emit=world.emit, prefixes=prefixes) for r in numbers]
    model = setting.step_model(draws)
    _warm_up(setting, model)
    clock.start()
    fleet = Fleet(
        engines,
        world.routing().new(prefixes, seed=world.seed),
        table,
        clock,
        draws=draws,
        append=append,
        prefixes=prefixes,
        frontend=profile.frontend,
        metrics_as=metrics_as,
        simulates=True,
    )
    words = Filler() if tokenizer is None else Filler(Tokenized(tokenizer))
    pace = f"; times are simulated, {speed:g} times as fast as the clock" * (speed != 1)
    about = f"the twin of {profile.model.name} on {profile.device.name}, {world.policy}"
    settings = {"device": f"twin of {profile.device.name}", "model": profile.model.name, "speed": speed}
    info = _info(world, limits, profile, setting, "twin", settings)
    return Behind(
        fleet=fleet,
        executors=[PacedTwin(model, clock) for _ in engines],
        text=None,
        words=words,
        spec=world.policy,
        about=about + pace,
        header=f"twin; the text is filler{pace}",
        info=info,
    )


def open_live(
    loaded: Opened,
    world: World,
    *,
    profile: Profile | None = None,
    commits: str | None = None,
    append: Append | None = None,
    metrics_as: str | None = None,
) -> Behind:
    """A model on its device. profile: for drawn commits and elastic chunks."""
    from ..live.prompts import random_prompts  # these load PyTorch
    from ..live.session import open_executor

    commits = commits or {True: "model", False: "twin"}[loaded.trained]
    live = LiveSetting(loaded, profile, commits)
    live.check(world)
    config = loaded.model.config
    warm_up = random_prompts(config, world.seed)
    serving, drawing = live.serving(world, _unknown(), warm_up)
    draws, limits = serving.draws, serving.limits
    table = RequestTable(MAX_REQUESTS)
    fleet = Fleet(
        [serving.engine(table, world.emit)],
        routing("round-robin").new(),
        table,
        Clock(),
        draws=draws,
        append=append,
        vocab=config.vocab,
        metrics_as=metrics_as,
    )
    half = limits.context_limit // 2
    largest = [Request(0, 0.0, limits.context_limit - half, half)]
    executor = open_executor(replace(serving, prompts=fleet.prompt), largest, warm_up)
    about = f"{config.name} on {loaded.device}, {world.policy}"
    if loaded.derived:
        about += f", weights {loaded.derived}"
    return Behind(
        fleet=fleet,
        executors=[executor],
        text=executor.text,
        words=_words(loaded),
        spec=world.policy,
        about=about,
        header="live",
        info=_info(world, limits, profile, drawing, commits, loaded.settings),
    )


def _words(loaded: Opened) -> Words:
    """The model's tokenizer; filler if random weights have none."""
    from ..live.prompts import tokenizer_folder  # loads PyTorch

    if loaded.model.config.vocab < 512:
        return Bytes()
    folder = tokenizer_folder(loaded.name)
    if not loaded.trained and not (folder / "tokenizer.json").is_file():
        return Filler()
    return Tokenized(str(folder))


def _info(
    world: World,
    limits: Limits,
    profile: Profile | None,
    drawing: Setting | None,
    decided: str,
    settings: dict[str, Any],
) -> RunInfo:
    """drawing: the setting that draws commits; None: the weights decide."""
    remaining = dict(settings)
    identity = {name: remaining.pop(name, "") for name in ("device", "model", "dtype", "weights")}
    profiles: dict[str, Any] = {}
    models: tuple[Any, ...] = ()
    if profile is not None:
        profiles = {world.policy: profile_info(profile)}
    if profile is not None and drawing is None:  # a device has no front end
        profiles = {world.policy: replace(profile_info(profile), frontend=0.0)}
    if drawing is not None:
        models = tuple(commit_infos(drawing.policy, drawing.profile, drawing.drawn))
    return RunInfo(
        trace=TraceInfo("what clients sent", arrival="as received"),
        dsim=__version__,
        driver="live",
        commits=decided,
        live=LiveInfo(**identity, settings=remaining),
        profiles=profiles,
        commit_models=models,
        limits={world.policy: limits},
        replicas=world.replicas,
        router=world.router,
        emit=world.emit,
        seed=world.seed,
    )


_WARM = 8


def _warm_up(setting: Setting, model: StepModel) -> None:
    """A few overlapping requests: no client waits for compilation."""
    lengths = 30 + 7 * np.arange(_WARM)
    if isinstance(model.draws, CommitDraws):
        model.draws.seat(np.arange(_WARM), lengths, lengths)
    engine = setting.engine(RequestTable(_WARM))
    queue = [Request(i, float(i), int(n), int(n)) for i, n in enumerate(lengths)]
    rehearse(setting.policy, setting.limits, queue, setting.profile.latency)
    recorder = StepRecorder(lambda columns, lists: None, setting.policy.width, 16)

    def deliver(_now: float) -> bool:
        if not queue and engine.idle:
            return False
        if queue:
            engine.submit(queue.pop(0))
        return True

    def on_step(plan: StepPlan, outcome: StepOutcome, done: Any, _now: float) -> None:
        recorder.record(0, plan, outcome, done)

    serve(engine, model.step, deliver=deliver, wait=lambda now: None, on_step=on_step)


def _unknown() -> Trace:
    """A row for each possible request; lengths are set on arrival."""
    lengths = np.ones(MAX_REQUESTS, np.int64)
    return Trace("served", np.zeros(len(lengths)), lengths, lengths)


class PacedTwin:
    """Steps take as long as the profile predicts."""

    def __init__(self, model: StepModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock

    def step(self, plan: StepPlan) -> StepOutcome:
        """Returns when the step, counted from its planning, is over."""
        outcome = self._model.step(plan)
        self._clock.sleep_until(plan.now + outcome.latency)
        return outcome

    def host(self, plan: StepPlan) -> float:
        """s of a step in which the device waits for the host."""
        latency, features = self._model.latency, plan.features
        if latency.overlap or features.continues:
            return 0.0
        return features.num_forwards * latency.host_step + latency.host_request * features.batch
