"""Open and warm up a server's fleet: a twin in real time, or a model on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..device.on_device import check_live, serving_on
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
from ..results.manifest import Manifest
from ..results.manifest_of import info_of, law_told
from ..results.metrics import Columns, Summary, summarize
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..sim.routers import routing
from ..sim.setting import Setting
from ..sim.step_model import StepModel
from ..traces import Trace
from .clock import Clock
from .fleet import Fleet, Text
from .words import Bytes, Filler, Tokenized, Words

if TYPE_CHECKING:
    from ..profiler.canvas import Opened

MAX_REQUESTS = 250_000  # in a server's life: rows of the journal's table


@dataclass(frozen=True)
class Behind:
    """A fleet ready to start, and what its run's manifest says."""

    fleet: Fleet
    executors: Sequence[Executor]
    text: Text | None
    words: Words
    spec: str
    about: str  # one line
    header: str
    manifest: Manifest = field(default_factory=Manifest)

    def start(self) -> None:
        self.fleet.start(self.executors, self.text)

    def columns(self) -> Columns:
        """Received requests, as in the journal."""
        return {name: column[: self.fleet.num_requests] for name, column in self.fleet.table.columns.items()}

    def summarize(self, totals: StepTotals, slos: Sequence[Slo]) -> Summary:
        return summarize(self.spec, self.columns(), totals, slos, replicas=len(self.fleet.engines))

    def run_json(self, summary: Summary, slos: Sequence[Slo]) -> Manifest:
        n = self.fleet.num_requests
        arrival = self.columns()["arrival"]
        duration = float(arrival[-1] - arrival[0]) if n else 0.0
        trace: Any = {
            "name": "what clients sent", "num_requests": n, "arrival": "as received",
            "rate": (n - 1) / duration if duration > 0 else 0.0,
        }  # fmt: skip
        more: Any = {"trace": trace, "slos": [str(slo) for slo in slos], "policies": [summary.to_json()]}
        if self.fleet.journal_failure is not None:
            more["journal_failure"] = str(self.fleet.journal_failure)
        return Manifest(**{**self.manifest, **more})


def open_twin(
    scenario: Scenario, *, speed: float = 1.0, tokenizer: str | None = None,
    append: Append | None = None, metrics_as: str | None = None,
) -> Behind:  # fmt: skip
    """The twin of a scenario's policy, profile and replicas; its text is filler.

    speed: simulated s per real s. metrics_as: engine whose metrics are published.
    """
    clock = Clock(speed)
    if not 1 <= scenario.replicas <= 64:
        raise DsimError(f"replicas is {scenario.replicas}, expected 1 to 64: each is a thread")
    setting = scenario.setting().check()
    profile, policy, limits = setting.profile, setting.policy, setting.limits
    draws = setting.draws(scenario.seed, _unknown())
    table = RequestTable(MAX_REQUESTS)
    asked = caches_prefixes(policy) or scenario.routing().kind.goes_by_prefix
    prefixes = ToldPrefixes(policy.memory.page_size, MAX_REQUESTS) if asked else None
    numbers = range(scenario.replicas)
    engines = [setting.engine(table, replica=r, emit=scenario.emit, prefixes=prefixes) for r in numbers]
    model = setting.step_model(draws)
    _warm_up(setting, model)
    clock.start()
    fleet = Fleet(
        engines, scenario.routing().new(prefixes, seed=scenario.seed), table, clock,
        draws=draws if isinstance(draws, CommitDraws) else None, append=append, prefixes=prefixes,
        frontend=profile.frontend, metrics_as=metrics_as, simulates=True,
    )  # fmt: skip
    words = Filler(None if tokenizer is None else Tokenized(tokenizer))
    said = "" if speed == 1 else f"; times are simulated, {speed:g} times as fast as the clock"
    about = f"the twin of {profile.model.name} on {profile.device.name}, {scenario.policy}"
    manifest = _manifest(
        scenario, limits, profile, setting, "twin",
        {"device": f"twin of {profile.device.name}", "model": profile.model.name, "speed": speed},
    )  # fmt: skip
    executors = [PacedTwin(model, clock) for _ in engines]
    header = f"twin; the text is filler{said}"
    return Behind(fleet, executors, None, words, scenario.policy, about + said, header, manifest)


def open_live(
    loaded: Opened, scenario: Scenario, *, profile: Profile | None = None, commits: str | None = None,
    append: Append | None = None, metrics_as: str | None = None,
) -> Behind:  # fmt: skip
    """A model on its device. profile: for drawn commits and elastic chunks."""
    from ..live.prompts import random_prompts  # these load PyTorch
    from ..live.session import open_executor

    commits = commits or ("model" if loaded.trained else "twin")
    check_live(scenario, loaded, profile, commits)
    config = loaded.model.config
    warm_up = random_prompts(config, scenario.seed)
    serving, drawing = serving_on(loaded, scenario, profile, commits, _unknown(), warm_up)
    draws, limits = serving.draws, serving.limits
    table = RequestTable(MAX_REQUESTS)
    fleet = Fleet(
        [serving.engine(table, scenario.emit)], routing("round-robin").new(), table, Clock(),
        draws=draws if isinstance(draws, CommitDraws) else None, append=append,
        vocab=config.vocab, metrics_as=metrics_as,
    )  # fmt: skip
    half = limits.context_limit // 2
    largest = [Request(0, 0.0, limits.context_limit - half, half)]
    executor = open_executor(replace(serving, prompts=fleet.prompt), largest, warm_up)
    words = _words(loaded)
    about = f"{config.name} on {loaded.device}, {scenario.policy}" + (f", weights {loaded.made}" if loaded.made else "")
    told = None if profile is None else replace(profile, frontend=0.0)  # of an engine behind another
    manifest = _manifest(scenario, limits, told, drawing, commits, loaded.settings)
    return Behind(fleet, [executor], executor.text, words, scenario.policy, about, "live", manifest)


def _words(loaded: Opened) -> Words:
    """The model's tokenizer; filler if random weights have none."""
    from ..live.prompts import tokenizer_folder  # loads PyTorch

    if loaded.model.config.vocab < 512:
        return Bytes()
    folder = tokenizer_folder(loaded.name)
    if not loaded.trained and not (folder / "tokenizer.json").is_file():
        return Filler()
    return Tokenized(str(folder))


def _manifest(
    scenario: Scenario, limits: Limits, profile: Profile | None, drawing: Setting | None, decided: str,
    settings: dict[str, Any],
) -> Manifest:  # fmt: skip
    """drawing: the setting that draws commits; None: the weights decide."""
    found = Manifest(
        question="What did its clients see?", dsim=__version__, driver="live", commits=decided, live=settings,
        limits=[{"policy": scenario.policy, **asdict(limits)}], replicas=scenario.replicas, router=scenario.router,
        emit=scenario.emit, seed=scenario.seed, closed_loop=False, interrupted=False,
        missing_passes=True,
    )  # fmt: skip
    if profile is not None:
        found["profile"] = info_of(profile, [scenario.parsed_policy()])
    commits = None if drawing is None else drawing.commits
    if drawing is not None and drawing.law is not None:
        found["commit_models"] = [law_told(drawing.policy, drawing.profile, drawing.law)]
    if commits is not None:
        found["commit_models"] = [
            {
                "policy": scenario.policy, "workload": commits.workload, "block_length": commits.block_length,
                "threshold": commits.threshold, "source": commits.source,
                "extrapolated_from": commits.extrapolated_from,
            }
        ]  # fmt: skip
    return found


_WARM = 8


def _warm_up(setting: Setting, model: StepModel) -> None:
    """A few overlapping requests: no client waits for compilation."""
    lengths = 30 + 7 * np.arange(_WARM)
    if isinstance(model.draws, CommitDraws):
        model.draws.seat(np.arange(_WARM), lengths, lengths)
    engine = setting.engine(RequestTable(_WARM))
    coming = [Request(i, float(i), int(n), int(n)) for i, n in enumerate(lengths)]
    rehearse(setting.policy, setting.limits, coming, setting.profile.latency)
    recorder = StepRecorder(lambda columns, lists: None, setting.policy.width, 16)

    def deliver(_now: float) -> bool:
        if not coming and engine.idle:
            return False
        if coming:
            engine.submit(coming.pop(0))
        return True

    def told(plan: StepPlan, outcome: StepOutcome, done: npt.NDArray[np.int32], _now: float) -> None:
        recorder.record(0, plan, outcome, done)

    serve(engine, model.step, deliver=deliver, wait=lambda now: None, told=told)


def _unknown() -> Trace:
    """A row for each possible request; lengths are set on arrival."""
    ones = np.ones(MAX_REQUESTS, np.int64)
    return Trace("served", np.zeros(len(ones)), ones, ones)


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
