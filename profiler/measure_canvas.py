"""Measure a canvas model on its device: step latencies in SGLang's rounds, denoising steps per canvas."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..engine.commits import CanvasLaw, LawDraws
from ..engine.engine import Limits
from ..engine.errors import ModelError, ProfileError
from ..engine.latency import Features, LatencyModel
from ..engine.policy import Policy, parse
from ..engine.request import Request
from ..engine.step import Phase
from ..files.memory import free_memory
from ..files.read import cut_words
from ..live.canvas_model import CanvasConfig
from ..live.prompts import random_prompts
from ..live.session import GraphCache, Serving, run
from .fit import fit_latency
from .fit_canvas import fit_canvas_law
from .logged import Canvases
from .measure import (
    HEAT_SHARE,
    PAGE,
    STEPS_SHARE,
    Keep,
    LoadedCanvas,
    OnProgress,
    after,
    check_whole,
    doubted,
    heat,
    keeping,
    measured,
    prepared,
    prompts_of,
    silent,
)
from .profile import Profile
from .samples import Evidence, samples, step_features

POLICY = "sglang-gemma"  # its rounds never mix prefill and denoising: a step is one forward
STEPS = 4  # of a canvas, while steps are measured
FEWEST_STEPS = 64  # measured steps, even over budget
MOST_CONTEXT = 32_768  # tokens, unless the user asks for more: it sets the width of a graph's tables
MOST_LOGGED = 400  # requests whose canvases are counted
LOGGED_BATCH = 8
KV_SHARE = 0.5  # of the memory free after the weights
Lists = Mapping[str, Any]
Step = tuple[Features, float, float]  # latency and device time, s


def profile_canvas(
    loaded: LoadedCanvas, *, name: str, budget: float, workloads: Mapping[str, str], max_batch: int | None = None,
    max_context: int | None = None, seed: int = 0, tokenizer: str | None = None, on_progress: OnProgress = silent,
    laws: Sequence[CanvasLaw] = (), keep: Keep | None = None,
) -> tuple[Profile, Evidence]:  # fmt: skip
    """Measure a canvas model for about `budget` s and fit its profile.

    workloads: prompts by workload, on which denoising steps are counted; without any, random tokens; never with random
    weights. laws: another profile's, copied with their sources. keep: receives what was measured before a failure or an
    interrupt.
    """
    config = loaded.model.config
    loaded, settings, unknown = prepared(loaded, workloads, seed, tokenizer, "steps counted", on_text=True)
    batch = max_batch or loaded.usual_batch(LOGGED_BATCH)
    context = min(max_context or MOST_CONTEXT, config.context_limit)
    for_steps = (STEPS_SHARE if loaded.trained else 1.0) * budget
    measured_steps: list[Step] = []

    def fitted() -> tuple[Profile, Evidence]:
        features, latencies, device = zip(*measured_steps, strict=True) if measured_steps else ((), (), ())
        steps = samples(features, latencies, device if loaded.on_gpu else None)
        latency, fit = fit_latency(steps)
        profile = measured(
            loaded, latency, fit, name=name, family="canvas", strategy="law", settings=settings, workloads=workloads,
            seed=seed, doubts=unknown, sources=[law.source for law in laws], canvas_laws=tuple(laws),
        )  # fmt: skip
        return profile, Evidence(steps)

    with keeping(keep, fitted):
        measure_steps(
            loaded, for_steps, batch, context, seed, lambda share: on_progress("steps", share * for_steps / budget),
            measured_steps,
        )  # fmt: skip
    profile, evidence = fitted()
    prompts: dict[str, str] = {**workloads} or {"random tokens": ""}
    if not loaded.trained:
        prompts = {}  # random weights: step counts mean nothing
    with keeping(keep, lambda: (profile, evidence)):
        for i, (workload, file) in enumerate(prompts.items()):
            share = (budget - for_steps) / len(prompts)
            on_progress(f"canvases of {workload}", (for_steps + i * share) / budget)
            ask = prompts_of(loaded, file, seed, tokenizer) if file else random_prompts(config, seed)
            canvases = count_steps(loaded, ask, share, context, seed)
            source = f"dsim profile: {config.name} at work on {workload}, {len(canvases.request)} canvases"
            if not file:
                source += "; they drive canvases to their cap, which says nothing of text (--prompts)"
            law, doubts = fit_canvas_law(
                canvases, workload=workload, canvas_length=config.canvas_length, late=False, source=source
            )
            fit = doubted(profile.fit, [f"{workload}: {line}" for line in doubts])
            profile = replace(profile, fit=fit, canvas_laws=(*profile.canvas_laws, law))
    return profile, evidence


def measure_steps(
    loaded: LoadedCanvas, budget: float, most_batch: int, most_context: int, seed: int,
    on_progress: Callable[[float], None], measured_steps: list[Step],
) -> None:  # fmt: skip
    """Steps of serving requests of any length in batches of 1, 2, 4 ... most_batch, for about `budget` s.

    Batches are limited to the KV that fits. measured_steps: receives each as it is measured. A GPU is heated before.
    """
    config, chance = loaded.model.config, np.random.default_rng(seed)
    least = 3 * config.canvas_length + 1  # per request: a token, two canvases, and one behind them
    pages = int(KV_SHARE * free_bytes(loaded)) // (PAGE * loaded.memory.kv_bytes_per_token)
    batches = [1 << i for i in range(most_batch.bit_length()) if (pages >> i) * PAGE >= least]
    if not batches:
        raise ProfileError(
            f"{loaded.name}: {pages * PAGE} tokens of keys and values fit next to its weights, expected at least "
            f"{least}"
        )
    law = CanvasLaw("steps to measure", config.canvas_length, STEPS, least=STEPS, most=STEPS)
    # Planning needs the window: it counts the features of windowed layers.
    windowed = loaded.shape.windowed
    none = LatencyModel(
        ((0.0, 0.0), (1.0, 0.0)), 0.0, layers=len(config.layers), window=windowed.window if windowed else 0
    )
    since = time.monotonic()
    if loaded.graph_cache is not None:
        batches = _captured(loaded, loaded.graph_cache, batches, pages, most_context + 2 * config.canvas_length)

    def canvas_time() -> float:
        requests, times = [Request(0, 0.0, config.canvas_length, 2 * config.canvas_length)], list[float]()
        _served(
            loaded, policy_of(config, 1), requests, loaded.prompts(seed), seed,
            lambda columns, lists: times.extend(columns["device"]), lambda: False, LawDraws(law, seed, 1), none,
        )  # fmt: skip
        return float(np.median(times))

    if loaded.on_gpu:
        heat(canvas_time, HEAT_SHARE * budget)
    budget -= time.monotonic() - since
    over, num_steps = after(budget), 0
    begin = time.monotonic()

    def stop() -> bool:
        nonlocal num_steps
        num_steps += 1
        return over() and num_steps > FEWEST_STEPS

    def take(columns: Mapping[str, Any], lists: Lists) -> None:
        features = step_features(columns, lists, mixed=True)
        measured_steps.extend(zip(features, columns["latency"], columns["device"], strict=True))

    num_done = 0
    while num_done == 0 or not stop():
        batch = spread(batches)[num_done % len(batches)]
        room = max(1, min(most_context - 2 * config.canvas_length, pages // batch * PAGE - least + 1))
        requests = [
            Request(i, 0.0, int(np.exp(chance.uniform(0.0, np.log(room)))), 2 * config.canvas_length)
            for i in range(2 * batch)
        ]
        draws, ask = LawDraws(law, seed, len(requests)), loaded.prompts(seed)
        try:
            _served(loaded, policy_of(config, batch), requests, ask, seed, take, stop, draws, none)
        except torch.OutOfMemoryError as error:
            batches = [smaller for smaller in batches if smaller < batch]
            if not batches:
                raise ModelError(f"{loaded.name}: out of memory at a batch of 1 ({cut_words(str(error))})") from None
            num_done = 0
            continue
        on_progress(min(1.0, (time.monotonic() - begin) / budget))
        num_done += 1


def spread(batches: Sequence[int]) -> list[int]:
    """Both extremes, then always the batch farthest from those before."""
    remaining, order = [*batches], [batches[0]]
    while len(order) < len(batches):
        remaining = [batch for batch in remaining if batch not in order]
        order.append(
            max(remaining, key=lambda batch: min(abs(batch.bit_length() - other.bit_length()) for other in order))
        )
    return order


def _captured(loaded: LoadedCanvas, graphs: GraphCache, batches: list[int], pages: int, longest: int) -> list[int]:
    """Batches whose steps could be captured, with room for all (a resize would drop graphs)."""
    cache = graphs.canvases(loaded.model, pages, PAGE, longest)
    while True:
        try:
            cache.prepare(batches[-1])
            return batches
        except torch.OutOfMemoryError as error:
            if len(batches) == 1:
                raise ModelError(f"{loaded.name}: out of memory at a batch of 1 ({cut_words(str(error))})") from None
            batches = batches[:-1]


def free_bytes(loaded: LoadedCanvas) -> int:
    """Free bytes of the device, after the model's weights."""
    if loaded.on_gpu:
        return int(torch.cuda.mem_get_info(loaded.weight.device)[0])
    return free_memory()


def count_steps(loaded: LoadedCanvas, ask: Any, budget: float, most_context: int, seed: int) -> Canvases:
    """Denoising steps per canvas under the checkpoint's stopping rule, in about `budget` s."""
    config, chance = loaded.model.config, np.random.default_rng([seed, 1])
    longest = max(1, min(256, most_context - 4 * config.canvas_length))
    requests = [
        Request(i, 0.0, int(chance.integers(1, longest + 1)), int(chance.integers(1, 4)) * config.canvas_length)
        for i in range(MOST_LOGGED)
    ]
    counts: dict[int, int] = {}
    finished: list[tuple[int, int]] = []  # request and steps

    def take(_: Mapping[str, Any], lists: Lists) -> None:
        phases, numbers = lists["phases"][0], lists["requests"][0]
        emits = lists["commits"][0].reshape(len(numbers), -1).any(axis=1)
        for row in np.flatnonzero(phases == Phase.DENOISE).tolist():
            request = int(numbers[row])
            counts[request] = counts.get(request, 0) + 1
            if emits[row]:
                finished.append((request, counts.pop(request)))

    _served(loaded, policy_of(config, LOGGED_BATCH), requests, ask, seed, take, after(budget))
    if not finished:
        raise ProfileError(
            f"{config.name}: no canvas was finished in {budget:.0f} s, expected some: give a longer --budget"
        )
    request, num_steps = np.array(finished).T
    return Canvases(request, num_steps, np.zeros(len(num_steps), np.bool_))


def policy_of(config: CanvasConfig, batch: int) -> Policy:
    return parse(f"{POLICY}:{batch},canvas_length={config.canvas_length},page_size={PAGE}")


def _served(
    loaded: LoadedCanvas, policy: Policy, requests: Sequence[Request], ask: Any, seed: int,
    take: Callable[[Mapping[str, Any], Lists], None], stop: Callable[[], bool], draws: LawDraws | None = None,
    latency: LatencyModel | None = None,
) -> None:  # fmt: skip
    """Serve requests and pass the journal's steps to `take`."""
    config = loaded.model.config
    longest = max(r.input_length + r.limit for r in requests) + config.canvas_length
    max_batch = policy.batching.max_batch or 1
    limits = Limits(max_batch * -(-longest // PAGE), config.context_limit, max_batch)

    def between() -> bool:
        loaded.clocks.sample()
        return stop()

    serving = Serving(loaded.model, policy, limits, ask, draws, latency, graphs=loaded.graph_cache, seed=seed)
    done = run(serving, requests, append=take, stop=between)
    check_whole(done)
