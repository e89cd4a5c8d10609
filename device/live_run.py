"""Serve scenarios on this machine's device, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..files.read import quoted
from ..planner.record import Watch, record
from ..report.run import RunResult
from ..results.scenario import Scenario
from ..traces import Trace
from .on_device import LiveSetting

NOT_ON_A_DEVICE = (
    "yields",
    "frontend",
    "router",
    "concurrency",
    "sessions",
    "drain",
)  # that change no live run
WITH_RECORDS = ("tiny", "tiny-both-ways")  # shipped, trained on own prompts


@dataclass(frozen=True)
class LiveRun:
    """Scenarios that differ in policy, their requests, and a ready device."""

    scenarios: Sequence[Scenario]
    requests: Trace
    live: LiveSetting

    def serve(
        self,
        out: Path | None,
        *,
        force: bool = False,
        about: dict[str, Any] | None = None,
        watch: Watch = lambda name: nullcontext(),
    ) -> RunResult:
        """In real time, into a run's folder. about: more fields of the run."""
        of_device = self.live.about()
        return record(
            self.scenarios, self.requests, self.live.serve, out=out, force=force, keeps=True, watch=watch,
            about=lambda results: {**of_device(results), **(about or {})},
        )  # fmt: skip


def live_run(
    scenarios: Sequence[Scenario],
    *,
    model: str | None = None,
    random_weights: str | None = None,
    profiled: bool = False,
    commits: str | None = None,
    prompts: str | None = None,
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    ready: Callable[[], object] = lambda: None,
) -> LiveRun:
    """Open the model and check that the device can run each scenario; arguments as of `dsim live`.

    profiled: use the scenarios' profile. ready: called between reading the trace and the model. Raises DsimError.
    """
    first = scenarios[0]
    for name in NOT_ON_A_DEVICE:
        value, default = getattr(first, name), getattr(Scenario, name)
        if value != default:
            raise DsimError(f"{name} is {quoted(value)}, expected {quoted(default)}: a device supports no other")
    for scenario in scenarios:
        scenario.parsed_policy()
    requests = first.requests()
    ready()
    from ..live.config_file import named  # they load PyTorch
    from ..live.sampling import Sampling
    from ..live.weights import is_canvas
    from ..profiler.measure import open_any

    sampling = Sampling(temperature, first.seed) if temperature else None
    if sampling is not None and graphs:
        raise DsimError("--graphs captures steps that take the likeliest tokens, and --temperature draws them")
    name, settings = named(model, random_weights, mask_token_id, block_length)
    if is_canvas(name, settings) and sampling is not None:
        raise DsimError(
            f"{name}: its canvases are drawn by the checkpoint's own rule, and --temperature {temperature:g} is of "
            "decoders"
        )
    loaded = open_any(name, device, first.seed, graphs, settings)
    commits = commits or ("model" if loaded.trained else "twin")
    held = first.loaded_profile() if profiled else None
    if commits == "model" and prompts is None and loaded.trained and name in WITH_RECORDS:
        prompts = "records"
    if commits == "model" and prompts is None:
        raise DsimError(f"commits is model and no prompts are given: expected --prompts FILE for {name}")
    live = LiveSetting(loaded, held, commits, prompts, tokenizer, sampling)
    for scenario in scenarios:  # mistakes first
        live.check(scenario)
    return LiveRun(scenarios, requests, live)
