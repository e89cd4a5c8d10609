"""What `dsim live` serves with, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.errors import DsimError
from ..files.read import quoted
from ..results.scenario import Scenario
from .on_device import LiveSetting

NOT_ON_A_DEVICE = ("yields", "frontend", "router", "concurrency", "sessions", "drain")  # that change no live run
WITH_RECORDS = ("tiny", "tiny-both-ways")  # shipped, trained on own prompts


def check_scenarios(scenarios: Sequence[Scenario]) -> None:
    """DsimError if scenarios, which differ in policy alone, ask for what a device cannot do."""
    first = scenarios[0]
    for name in NOT_ON_A_DEVICE:
        value, default = getattr(first, name), getattr(Scenario, name)
        if value != default:
            raise DsimError(f"{name} is {quoted(value)}, expected {quoted(default)}: a device supports no other")
    for scenario in scenarios:
        scenario.parsed_policy()


def live_setting(
    scenarios: Sequence[Scenario], *, model: str | None, random_weights: str | None, profiled: bool,
    commits: str | None, prompts: str | None, device: str | None, graphs: bool | None, mask_token_id: int | None,
    block_length: int | None, tokenizer: str | None, temperature: float,
) -> LiveSetting:  # fmt: skip
    """Open the model and check that the device can run each scenario; arguments as of `dsim live`. Raises DsimError.

    profiled: use the scenarios' profile.
    """
    from ..live.config_file import named  # they load PyTorch
    from ..live.sampling import Sampling
    from ..live.weights import is_canvas
    from ..profiler.measure import open_any

    first = scenarios[0]
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
    profile = first.loaded_profile() if profiled else None
    if commits == "model" and prompts is None and loaded.trained and name in WITH_RECORDS:
        prompts = "records"
    if commits == "model" and prompts is None:
        raise DsimError(f"commits is model and no prompts are given: expected --prompts FILE for {name}")
    setting = LiveSetting(loaded, profile, commits, prompts, tokenizer, sampling)
    for scenario in scenarios:
        setting.check(scenario)
    return setting
