"""Measurements on a device: step shapes through the executor, and commits on prompts."""

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.optimize import nnls

from .. import __version__
from ..engine import core
from ..engine.cache_overhead import PHASES
from ..engine.commits import CommitDraws, CommitModel, ScheduledCommits
from ..engine.engine import Engine, Limits
from ..engine.errors import ModelError, ProfileError
from ..engine.journal import RequestTable
from ..engine.latency import CacheOverhead, Features, LatencyModel, bucket
from ..engine.policies import BASELINES
from ..engine.policies.ar import Autoregressive
from ..engine.policies.chunk import FixedChunk
from ..engine.policies.delayed_cache import DelayedCache
from ..engine.policies.whole_block import FixedBlock
from ..engine.policy import PRESETS, Policy, every_step, parse
from ..engine.request import Request
from ..files.read import cut
from ..files.write import tell
from ..live import weights
from ..live.cache import PagedCache
from ..live.canvas_model import (
    CanvasConfig,
    CanvasModel,
    canvas_config,
    num_params,
    random_canvas_model,
    read_canvas_model,
)
from ..live.config import AS_IT_SAYS, ConfigJson, ModelConfig, Settings, decoder_config
from ..live.forward import Forward
from ..live.graphs import GraphForward
from ..live.kernel_cache import keep_private
from ..live.measure import (
    SETTLE,
    Measured,
    Shape,
    evicting_policy,
    fill_with_text,
    level_shapes,
    measure_evicting,
    pages_of,
    shapes,
)
from ..live.measure import measure as measure_shape
from ..live.model import Decoder
from ..live.padding import MAX_ROWS
from ..live.prompts import WORKLOADS, Prompts, prompts_from, random_prompts, read_tokens
from ..live.session import GraphCache, LiveRun, Serving, run
from .clocks import Clocks, clocks_of
from .commit_log import CommitLog, from_journal
from .fit import fit_latency
from .fit_commits import fit_commits
from .hardware import default_max_batch
from .models import Experts, ModelShape, Windowed
from .profile import Device, Fit, MemoryModel, Profile, Provenance, digits
from .samples import Evidence, Samples, samples, step_features


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A model on a device, with a profile's description of the device."""

    name: str  # a preset or a directory, as the user named it
    model: Any
    device: Device
    memory: MemoryModel
    trained: bool  # False: random weights
    derived: str = ""  # how the weights were derived; empty: as stored
    graphs: bool = False  # steps run as captured CUDA graphs
    captured: GraphCache = field(default_factory=GraphCache)  # the graphs, from run to run
    clocks: Clocks = field(default_factory=lambda: Clocks(None))  # sampled while steps run
    text: Prompts | None = None  # that steps are measured on; None: random tokens
    weight: torch.Tensor  # one of the model's

    def prompts(self, seed: int) -> Prompts:
        return self.text or random_prompts(self.model.config, seed)

    @property
    def on_gpu(self) -> bool:
        return bool(self.weight.is_cuda)

    def usual_batch(self, on_cpu: int) -> int:
        """The most rows that engines serve at once."""
        return default_max_batch(self.device.compute_capability) if self.on_gpu else on_cpu

    @property
    def graph_cache(self) -> GraphCache | None:
        """Captured graphs; None if none are captured."""
        return self.captured if self.graphs else None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings next to the policy that results depend on."""
        return settings_of(self.device, self.model.config.name, self.weight, self.graphs, self.derived)


@dataclass(frozen=True, kw_only=True)
class Loaded(OnDevice):
    """A decoder."""

    model: Decoder

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model.config)

    @property
    def graph_tokens(self) -> int:
        """Decode steps of at most this many tokens are padded to a bucket; 0 without graphs.

        A CPU pads too, but computes eagerly: no launch time can be subtracted.
        """
        return MAX_ROWS if self.graphs else 0


@dataclass(frozen=True, kw_only=True)
class LoadedCanvas(OnDevice):
    """A canvas model."""

    model: CanvasModel

    @property
    def shape(self) -> ModelShape:
        return shape_of_canvas(self.model.config)


Opened = Loaded | LoadedCanvas
Model = TypeVar("Model", Loaded, LoadedCanvas)


def open_any(
    name: str, device: str | None = None, seed: int = 0, graphs: bool | None = None, settings: Settings = AS_IT_SAYS
) -> Opened:
    """Load a model or make random weights on a device: bf16 on a GPU, fp32 on a CPU.

    graphs: capture decode steps; None: on CUDA. ModelError for an unknown or wrong model, one that does not fit, or a
    missing device.
    """
    is_canvas = weights.is_canvas(name, settings)
    device = check_device(device)
    free = select(device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    source = weights.source_of(name, settings)
    config: Any
    if is_canvas:
        check_settings(source, settings)
        config = canvas_config(source, settings)
        # A windowed layer gets as many pages as the others: it frees pages only later.
        size, kv_elements = num_params(config), config.kv_elements(True) + config.kv_elements(False)
    else:
        config = decoder_config(source, settings)
        size, kv_elements = config.num_params, config.kv_elements
    size *= dtype.itemsize
    about = describe(device)
    room = about.memory_bytes if free is None else free
    if size > room:
        have = f"{device} has {room / 1e9:.1f} GB" + ("" if free is None else " free")
        raise ModelError(f"{name}: its weights take {size / 1e9:.1f} GB, and {have}: expected a smaller model")
    trained = weights.is_trained(name, settings)
    model: Any
    try:
        if not is_canvas:
            model = weights.load(name, device, dtype, seed, settings)
        elif trained:
            model = read_canvas_model(weights.folder_of(name), device, dtype)
        else:
            model = random_canvas_model(source, device, dtype, seed, settings)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name}: its {size / 1e9:.1f} GB do not fit on {device} ({error})") from None
    derived = weights.origin(seed, trained=trained, has_experts=is_canvas or config.experts is not None)
    if derived:
        tell(f"{name}: weights {derived}")
    weight = model.embedding if is_canvas else model.embedding.weight
    kind: type[Opened] = LoadedCanvas if is_canvas else Loaded
    return kind(
        name=name,
        model=model,
        device=about,
        memory=MemoryModel(free or about.memory_bytes, size, dtype.itemsize * kv_elements, config.vocab),
        trained=trained,
        derived=derived,
        graphs=device.startswith("cuda") if graphs is None else graphs,
        clocks=clocks_of(uuid_of(weight.device)),
        weight=weight,
    )


def check_settings(source: ConfigJson, settings: Settings) -> None:
    """ModelError for a decoder's settings of a canvas model."""
    for value, option, expected in (
        (settings.mask_token, "--mask-token-id", "none: it knows no mask"),
        (settings.block_length, "--block-length", "the policy's canvas_length"),
    ):
        if value is not None:
            raise ModelError(f"{source.name}: denoises canvases, and {option} is {value}: expected {expected}")


def settings_of(device: Device, model: str, weight: torch.Tensor, graphs: bool, derived: str) -> dict[str, Any]:
    """Settings of a run. weight: any of the model's; derived: as in `OnDevice`."""
    settings: dict[str, Any] = {
        "device": device.name, "model": model, "torch": torch.__version__,
        "dtype": str(weight.dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "graphs": graphs,
    }  # fmt: skip
    if derived:
        settings["weights"] = derived
    if weight.is_cuda:
        settings |= {"cuda": torch.version.cuda, "driver": driver()}
    return settings


def check_device(device: str | None) -> str:
    """The name, or the default's; ModelError for another kind of device."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ModelError(f"device is {cut(device)}, expected cuda or cpu")
    return device


def select(device: str) -> int | None:
    """Make a CUDA device current; returns its free bytes, None for a CPU. Raises ModelError."""
    if not device.startswith("cuda"):
        return None
    keep_private()
    if not torch.cuda.is_available():
        reason = f"PyTorch {torch.__version__} finds no CUDA device here"
        raise ModelError(f"device is {cut(device)}, and {reason}: expected cpu")
    _, colon, index = device.partition(":")
    count = torch.cuda.device_count()
    if colon and not (index.isdecimal() and int(index) < count):
        raise ModelError(f"device is {cut(device)}, expected cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(int(index) if colon else torch.cuda.current_device())
    # Other processes may hold part of it.
    return int(torch.cuda.mem_get_info()[0])


def describe(device: str) -> Device:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        kind = properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"
        return Device(properties.name, 1, properties.total_memory, kind.partition(":")[0])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    return Device(f"CPU {processor()}, {threads} thread{'s' * (threads != 1)}", 1, memory)


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def uuid_of(device: torch.device) -> str | None:
    """A device's UUID; None for a CPU, or if PyTorch does not report it."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def driver() -> str | None:
    """The GPU driver's version, or None."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def shape_of(config: ModelConfig) -> ModelShape:
    mixed = config.experts
    experts = None
    if mixed is not None:
        experts = Experts(mixed.num, mixed.top_k, mixed.shared, mixed.ffn, mixed.dense_layers)
    return ModelShape(
        name=config.name, layers=config.layers, hidden=config.hidden, heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, ffn=config.ffn, vocab=config.vocab, context_limit=config.context_limit,
        tied=config.tied, qk_norm=config.qk_norm, qkv_bias=config.qkv_bias, experts=experts,
    )  # fmt: skip


def shape_of_canvas(config: CanvasConfig) -> ModelShape:
    sliding, full = ([layer for layer in config.layers if layer.sliding == kind] for kind in (True, False))
    if not full:
        raise ProfileError(
            f"{config.name}: all of its {len(config.layers)} layers have a window, expected some without"
        )
    windowed = Windowed(len(sliding), sliding[0].kv_heads, sliding[0].head_dim, config.window) if sliding else None
    # A dense feed-forward next to the experts costs as shared experts of the same total width.
    shared = max(1, config.ffn // config.expert_ffn)
    return ModelShape(
        name=config.name, layers=len(config.layers), hidden=config.hidden, heads=config.heads,
        kv_heads=full[0].kv_heads, head_dim=full[0].head_dim, ffn=config.ffn, vocab=config.vocab,
        context_limit=config.context_limit, tied=True, qk_norm=True, windowed=windowed, value_is_key=True,
        experts=Experts(config.num_experts, config.top_k, shared, config.expert_ffn, 0),
    )  # fmt: skip


def check_same_model(profile: Profile, shape: ModelShape) -> None:
    """ProfileError unless the profile's model has these dimensions."""
    priced = profile.model
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if getattr(priced, name) != getattr(shape, name):
            raise ProfileError(
                f"profile {profile.name} is of {priced.name} with {name} {getattr(priced, name)}, "
                f"and the model {shape.name} has {getattr(shape, name)}"
            )


# ---- steps ----------------------------------------------------------------------------------------------------

REPEATS = 7  # per shape; their median is its latency
FEW_REPEATS, LARGE = 3, 2048  # for more than LARGE tokens: slower and steadier
SMALL = 512  # tokens up to which every level is measured
ROUND = 24  # shapes between two measurements of the reference
FEWEST = 8  # shapes, even over budget: fewer cannot be fitted
PAGE = 64
MOST_TEXT = 4096  # tokens that fill a cache
# Warm-up steps of a prefill, and s of decode steps, for the shapes of most power. An H100's power cap slowed steps of
# 10 to 50 ms by 4 % over their first 0.15 s; after seconds of serving, decode steps take 6 to 16 % longer than short
# measurements say. Whether 0.5 s is enough is untested on a GPU.
LONG_SETTLE, SETTLED = 10, 0.5
HEAT_SHARE = 0.1  # of the steps' budget on a GPU, at most
STEADY, STEADY_FOR = 0.01, 4  # relative range of this many latencies at which the clock is steady
MOST_TOKENS = 8192  # per step, as engines limit it

Columns = Mapping[str, Any]
OnProgress = Callable[[str, float], None]  # what is measured, and the share of the budget spent


def silent(step: str, share: float) -> None:
    """No progress is shown."""


def measure_steps(
    loaded: Loaded, budget: float, measured_shapes: list[Measured], *, max_batch: int | None = None, seed: int = 0,
    on_progress: OnProgress = silent,
) -> None:  # fmt: skip
    """Measure steps of many shapes for about `budget` s, so that shapes of all sizes are measured at any time.

    measured_shapes: receives each as it is measured. A GPU is heated before. A reference shape after every ROUND shapes
    shows a device that slows as it warms up.
    """
    config = loaded.model.config
    block = config.block_length
    batch = max_batch or loaded.usual_batch(32)
    context = config.context_limit - 3 * block
    # Small batches prefill as many tokens as large ones: no served step is larger than a measured one.
    tokens = MOST_TOKENS if loaded.on_gpu else min(MOST_TOKENS, batch * block)
    pages = min(loaded.memory.num_pages(PAGE, batch, tokens), batch * pages_of(context, block, PAGE))
    offered = shapes(block, batch, tokens, context, PAGE, pages)
    first = spread(offered)[: 2 * ROUND]
    if loaded.on_gpu:  # its latency has stairs
        on_levels = _on_levels(loaded, batch, tokens, context)
        first = spread({*first, *(s for s in on_levels if fits(s, block, pages))})
    order = [*first, *(shape for shape in spread(offered) if shape not in first)]
    begin = time.monotonic()
    forward = _forward(loaded, pages, context + 3 * block, batch, seed)
    reference = compute_bound(offered)
    measure_shape(forward, offered[-1], block, 1, loaded.text)  # warm-up: allocations and compilation

    def heavy_then_reference() -> float:
        measure_shape(forward, offered[-1], block, 1, loaded.text)
        return float(np.median(measure_shape(forward, reference, block, REPEATS, loaded.text).device))

    if loaded.on_gpu:
        heat(heavy_then_reference, HEAT_SHARE * budget)
    spent = 0.0
    for i, shape in enumerate(order, start=1):
        for current in (shape, reference) if i % ROUND == 0 else (shape,):
            on_progress(_words(current), min(1.0, spent / budget))
            repeats = REPEATS if current.tokens <= LARGE else FEW_REPEATS
            hot = loaded.on_gpu and current.tokens > SMALL / 2
            settle = LONG_SETTLE if hot and current.window == 0 and current.tokens <= LARGE else SETTLE
            settled = SETTLED if hot else 0.0
            measured_shapes.append(
                measure_shape(forward, current, block, repeats, loaded.text, settle, context, settled)
            )  # fmt: skip
        spent = time.monotonic() - begin
        if spent > budget and len(measured_shapes) >= FEWEST:
            break


def heat(device_time: Callable[[], float], budget: float) -> None:
    """Run steps until the device time is steady or `budget` s have passed: a cold device's clock cannot last."""
    end = time.monotonic() + budget
    times: list[float] = []
    while time.monotonic() < end:
        times = [*times, device_time()][-STEADY_FOR:]
        if len(times) == STEADY_FOR and max(times) < (1.0 + STEADY) * min(times):
            break


def _on_levels(loaded: Loaded, batch: int, tokens: int, context: int) -> list[Shape]:
    """Prefills and decode steps of every captured size; above SMALL 10 % apart."""
    levels = [1]
    for level in sorted({bucket(n) for n in range(1, tokens + 1)}):
        if level <= SMALL or level >= 1.1 * levels[-1]:
            levels.append(level)
    return level_shapes(loaded.model.config.block_length, batch, tokens, context, levels)


def spread(chosen: Collection[Shape]) -> list[Shape]:
    """Prefills and decode steps, each in bit-reversed order of size: every prefix covers all sizes of both."""
    ranks: list[tuple[float, Shape]] = []
    for prefills in (True, False):
        ordered = sorted((s for s in chosen if (s.window == 0) == prefills), key=lambda s: (s.tokens, s))
        bits = len(ordered).bit_length()
        ranks += [(int(f"{i:0{bits}b}"[::-1], 2) / 2**bits, shape) for i, shape in enumerate(ordered)]
    return [shape for _, shape in sorted(ranks)]


def compute_bound(offered: Sequence[Shape]) -> Shape:
    """The shape of most tokens, up to LARGE, and fewest keys, a decode step if possible: it slows as the clock does."""
    return max((s for s in offered if s.tokens <= LARGE), key=lambda s: (s.tokens, s.window > 0, -s.context))


def fits(shape: Shape, block: int, pages: int) -> bool:
    return shape.batch * pages_of(shape.context, block, PAGE) <= pages


def serve_journal(loaded: Loaded, budget: float, *, max_batch: int | None = None, seed: int = 0) -> tuple[Samples, int]:
    """Serve random requests for about `budget` s; the steps judge a fit.

    All arrive at once, so that batches shrink to one. max_batch is halved until its graphs take at most half of the
    budget to capture. Also returns the kernels compiled and graphs captured meanwhile: if not 0, some latencies are
    wrong.
    """
    config = loaded.model.config
    block = config.block_length
    chance = np.random.default_rng([seed, 1])
    limit = config.context_limit
    batch = max_batch or loaded.usual_batch(32)
    begin = time.monotonic()
    while batch > 1 and loaded.captured.seconds_to_capture(_journalled(block, batch), batch) > budget / 2:
        batch //= 2
    policies = _journalled(block, batch)
    parts: list[Columns] = []
    late = 0
    for i, policy in enumerate(policies, start=1):
        # Captures precede a policy's first step; it gets the rest of its share, at least some steps.
        stop = after(budget / len(policies) / 4, begin + budget * i / len(policies))
        requests = [
            Request(i, 0.0, int(chance.integers(1, max(2, limit // 2))), int(chance.integers(1, max(2, limit // 4))))
            for i in range(2 * batch)
        ]
        prompts, outputs = (np.array([getattr(r, n) for r in requests]) for n in ("input_length", "output_length"))
        length = policy.block_length
        ordinary = CommitModel("journal", length, 0.9, None, tuple(0.9 * 0.8**d for d in range(length)))
        pages = loaded.memory.num_pages(policy.memory.page_size, batch, policy.batching.max_prefill_tokens)
        draws = None if policy.commits_by == "acceptance" else CommitDraws(ordinary, seed, prompts, outputs, length)
        limits = Limits(pages, config.context_limit, batch)
        serving = Serving(loaded.model, policy, limits, loaded.prompts(seed), draws, graphs=loaded.graph_cache)
        columns, _, num_late = journal_of(serving, requests, stop, sample=loaded.clocks.sample)
        parts.append(columns)
        late += num_late
    columns = concatenated(parts)
    device = columns["device"] if loaded.on_gpu else None
    return samples(step_features(columns, {}, mixed=False), columns["latency"], device), late


def _journalled(block: int, batch: int) -> list[Policy]:
    """Policies whose served steps judge a fit: whole and half blocks, or single tokens."""
    limits = {"max_batch": batch}
    if block == 1:
        return [every_step(limits, Autoregressive())]
    half = every_step(limits, FixedChunk(max(2, block // 2), block), DelayedCache())
    return [parse(f"{BASELINES['block-diffusion']}:{block},max_batch={batch},page_size=64"), half]


def _forward(loaded: Loaded, pages: int, longest: int, batch: int, seed: int) -> Forward:
    """The forward that measures shapes, over a cache of random KV or a text's.

    A shape's graph is captured when the shape first occurs.
    """
    config, cache = loaded.model.config, _filled_cache(loaded, pages, seed)
    forward = Forward(loaded.model, cache)
    if loaded.graphs:
        forward = captured = GraphForward(loaded.model, cache, longest=longest)
        # Capture the largest step of each kind now: others share its memory, and the budget may end before their turn.
        captured.prepare(every_step({"max_batch": batch}, Autoregressive()), batch, limit=1)
        if (block := config.block_length) > 1:  # windows of every size
            captured.prepare(every_step({"max_batch": batch}, FixedChunk(2, block), DelayedCache()), batch, limit=1)
        loaded.captured.keep(captured)
    if loaded.text is not None:
        fill_with_text(forward, loaded.text, min(longest, MOST_TEXT))
    forward.meanwhile = [loaded.clocks.sample]
    return forward


def _filled_cache(loaded: Loaded, pages: int, seed: int) -> PagedCache:
    """A cache of random keys and values."""
    cache = PagedCache(loaded.model.config, pages, PAGE, str(loaded.weight.device), loaded.weight.dtype)
    cache.fill(seed)
    return cache


def _samples(steps: Sequence[Measured], separate: bool) -> Samples:
    """The measured steps; separate: device and planning processor are different."""
    features = [m.features for m in steps for _ in m.latency]
    latency, device = (np.concatenate([getattr(m, name) for m in steps] or [[]]) for name in ("latency", "device"))
    # On a CPU one term per row covers the forward's work for a sequence and the host's, which is no larger.
    return samples(features, latency, device if separate else None)


def _words(shape: Shape) -> str:
    if shape.window == 0:
        return f"prefill of {shape.batch} x {shape.context}"
    return f"{shape.batch} x {shape.window} positions after {shape.context} keys"


# ---- commits --------------------------------------------------------------------------------------------------

FEWEST_LOGGED = 8  # completed requests of a commit log, even over budget: of fewer, perhaps none is held out
MOST_LOGGED = 400  # requests of a commit log
FITTING = 2.0  # s, of a log


def log_commits(
    loaded: Loaded, prompts: str, threshold: float, temperature: float, budget: float, seed: int = 0,
    tokenizer: str | None = None, eos: bool = False,
) -> CommitLog:  # fmt: skip
    """Log commits for `budget` s: whole blocks every step, on prompts cut from a text.

    Over budget it goes on until FEWEST_LOGGED requests have completed. Every step computes every mask, so all distances
    from the frontier occur. tokenizer: the text's, if not the model's. eos:
    requests end at an EOS.
    """
    config = loaded.model.config
    block = config.block_length
    policy = every_step({"max_batch": 8}, FixedBlock(block))
    policy = replace(policy, unmasking=replace(policy.unmasking, threshold=threshold, temperature=temperature))
    chance = np.random.default_rng(seed)
    longest = min(256, config.context_limit // 2)
    requests = [
        Request(i, 0.0, int(chance.integers(block, longest)), int(chance.integers(block, min(4 * block, longest))))
        for i in range(MOST_LOGGED)
    ]
    limits = Limits(8 * -(-2 * longest // PAGE), config.context_limit, 8)
    serving = Serving(
        loaded.model, policy, limits, prompts_of(loaded, prompts, seed, tokenizer), graphs=loaded.graph_cache,
        eos=config.eos if eos else (),
    )  # fmt: skip
    end, completed = time.monotonic() + budget, 0

    def count(num: int, _: float) -> None:
        nonlocal completed
        completed = num

    _, lists, _ = journal_of(
        serving, requests, lambda: time.monotonic() > end and completed >= FEWEST_LOGGED,
        ("requests", "window", "commits"), progress=count,
    )  # fmt: skip
    length = np.array([r.input_length for r in requests])
    return from_journal(block, length, **lists)


def check_whole(done: LiveRun) -> None:
    """Raise what ended a live run early, if anything."""
    if done.failure is not None:
        raise done.failure
    if done.interrupted:
        raise KeyboardInterrupt


def after(budget: float, end: float = -math.inf) -> Callable[[], bool]:
    """Whether `budget` s have passed since the first planned step, without compilation before it.

    end: monotonic time that must also have passed.
    """
    begin: float | None = None

    def over() -> bool:
        nonlocal begin
        first, begin = begin is None, time.monotonic() if begin is None else begin
        return not first and time.monotonic() > max(begin + budget, end)

    return over


# ---- evictions ------------------------------------------------------------------------------------------------

BATCHES = (1, 8, 32)  # of the evicting steps


def measure_eviction(
    loaded: Loaded, latency: LatencyModel, most_batch: int | None = None, budget: float = math.inf
) -> float:
    """Seconds that an eviction adds to a step's predicted latency.

    The median over a few batches, at least 0. After `budget` s no further batch starts; the first always runs.
    """
    begin = time.monotonic()
    config = loaded.model.config
    block = config.block_length
    if block == 1 or config.layers < 2:
        return 0.0
    context = min(256, config.context_limit - 3 * block) // block * block
    batches = [batch for batch in BATCHES if batch <= (most_batch or BATCHES[-1])]
    cache = _filled_cache(loaded, batches[-1] * pages_of(context, block, PAGE), 0)
    forward = Forward(loaded.model, cache)
    if loaded.graphs:
        forward = GraphForward(loaded.model, cache, longest=context + 3 * block)
        forward.prepare(evicting_policy(block, batches[-1], context), batches[-1], limit=1)
    over: list[float] = []
    for batch in batches:
        if not over or time.monotonic() - begin < budget:
            steps = measure_evicting(forward, batch, context, block, REPEATS, loaded.text)
            over += [took - latency.step(planned, retained) for planned, retained, took in steps]
    return max(0.0, float(np.median(over))) if over else 0.0


# ---- cache overhead --------------------------------------------------------------------------------------------

# One policy a kind of cache, with periods that let every phase occur, and blocks of few steps.
FULL_SEQUENCE = tuple(preset.probe for preset in PRESETS.values() if preset.probe)
OVERHEAD_STEPS = 8  # per block


def measure_cache_overhead(
    loaded: Loaded, latency: LatencyModel, budget: float, on_progress: OnProgress = silent
) -> tuple[CacheOverhead, ...]:
    """The cost of full-sequence caches' phases beyond `latency`, measured in about `budget` s.

    Requests of three lengths are served alone; each phase's medians are fitted by a line in the length, at least 0.
    """
    config, overhead = loaded.model.config, []
    block = config.block_length
    longest = min(512, config.context_limit) - 2 * block
    prompts = sorted({length for length in (longest // 8, longest // 2, longest) if length > 0})
    if not prompts:
        return ()
    for i, spec in enumerate(FULL_SEQUENCE):
        policy = parse(f"{spec},page_size=256,block_length={block},denoising_steps={min(block, OVERHEAD_STEPS)}")
        on_progress(f"the overhead of {spec.partition(',')[0]}", i / len(FULL_SEQUENCE))
        requests = [Request(j, 0.0, length, 2 * block) for j, length in enumerate(2 * prompts)]
        limits = Limits(1 << 20, config.context_limit, 1, state_tokens=config.state_tokens)
        draws = ScheduledCommits(policy.block_length, policy.unmasking.denoising_steps)
        serving = Serving(loaded.model, policy, limits, loaded.prompts(0), draws)
        stop = after(budget / len(FULL_SEQUENCE))
        columns, lists, _ = journal_of(serving, requests, stop, ("requests", "phases"))
        length = np.array([requests[j].input_length + 2 * block for j in lists["requests"]])
        features = step_features(columns, {}, mixed=False)
        predicted = [_said(latency, policy, f, n) for f, n in zip(features, length.tolist(), strict=True)]
        over = columns["latency"] - predicted
        for phase in np.unique(lists["phases"]).tolist():
            rows = lists["phases"] == phase
            lengths = np.unique(length[rows])
            medians = [float(np.median(over[rows & (length == n)])) for n in lengths]
            row, token = nnls(np.column_stack([np.ones(len(lengths)), lengths]), np.array(medians))[0]
            if row or token:
                overhead.append(
                    CacheOverhead(type(policy.cache).__name__, PHASES[phase], digits(row, 3), digits(token, 3))
                )
    return tuple(overhead)


def _said(latency: LatencyModel, policy: Policy, features: Features, length: int) -> float:
    """Predicted latency of a step of one request of `length` tokens."""
    first = None
    if policy.cache.first_layer_whole and features.tokens < length:
        first = features._replace(tokens=length, sum_q_kv=length**2, sum_kv=length)
    return latency.step(features, first=first)


def journal_of(
    serving: Serving, requests: Sequence[Request], stop: Callable[[], bool], names: Sequence[str] = (), **options: Any
) -> tuple[Columns, Columns, int]:
    """Serve requests: the steps' columns, the values of these lists, and what was compiled or captured meanwhile."""
    steps: list[Columns] = []
    rows: list[Columns] = []

    def append(columns: Columns, lists: Columns) -> None:
        steps.append(columns)
        rows.append({name: lists[name][0] for name in names})

    done = run(serving, requests, append=append, stop=stop, **options)
    check_whole(done)
    return concatenated(steps), concatenated(rows), done.num_made_ready


def concatenated(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}


# ---- compiling ------------------------------------------------------------------------------------------------

COMPILING = 20.0  # s of a policy's steps, once; measured: 16 to 35
MOST_COMPILING = 0.75  # of a budget


def seconds_to_compile(policies: Iterable[Policy]) -> float:
    """About how long compiling the steps takes that are not on disk."""
    limits, free = Limits(1 << 20, 1 << 30, 1), LatencyModel(((0.0, 0.0),), 0.0)
    cores = (Engine(policy, limits, RequestTable(0), latency=free).core for policy in policies)
    return COMPILING * sum(program.is_young(name="schedule") for program in cores)


@contextmanager
def patience(positions: int) -> Iterator[None]:
    """Until this many positions, step in plain Python where machine code is not on disk."""
    before = core.STEPS_PATIENCE
    try:
        core.STEPS_PATIENCE = positions
        yield
    finally:
        core.STEPS_PATIENCE = before


# ---- the profile ----------------------------------------------------------------------------------------------

Keep = Callable[[Profile, Evidence], object]

JOURNAL_SHARE = 0.15  # of the steps' budget on a GPU, for the serving that judges
STEPS_SHARE = 0.5  # of the budget; commit logs get the rest
EVICTION_SHARE = 0.05  # of the budget on a GPU; a CPU evicts nearly for free
OVERHEAD_SHARE = 0.25  # of the budget, for full-sequence models


def default_workloads(loaded: Loaded, prompts: str | None = None) -> dict[str, str]:
    """Prompts by workload: the file by its stem, or the tiny model's two; none for random weights."""
    if not loaded.trained:
        return {}
    if prompts is not None:
        return {os.path.splitext(os.path.basename(prompts))[0]: prompts}
    if loaded.model.config.vocab >= 512:
        raise ProfileError(f"{loaded.name} is asked nothing: its commits are logged on prompts (--prompts FILE)")
    return {name: name for name in WORKLOADS}


def measured(
    loaded: "Opened", latency: LatencyModel, fit: Fit, *, name: str, family: str, strategy: str,
    settings: Mapping[str, Any], workloads: Mapping[str, str], seed: int, doubts: Sequence[str],
    sources: Sequence[str], **fields: Any,
) -> Profile:  # fmt: skip
    """The profile of a model's measurements. settings: read before measuring. fields: others of the profile."""
    config = loaded.model.config
    stated = {key: value for key, value in settings.items() if key not in ("torch", "driver")}
    return Profile(
        name=name,
        description=f"{config.name}{'' if loaded.trained else ' with random weights'} on {loaded.device.name}, "
        "measured through dsim's own executor",
        origin="measured",
        family=family,
        implementation="dsim live",
        device=loaded.device,
        model=loaded.shape,
        latency=latency,
        fit=doubted(fit, [*doubts, *loaded.clocks.doubts()]),
        memory=loaded.memory,
        provenance=Provenance(
            sources=("measured by dsim profile", *dict.fromkeys(sources)),
            date=time.strftime("%Y-%m-%d"),
            tool_version=__version__,
            seed=seed,
            torch=str(settings["torch"]),
            driver=settings.get("driver"),
            clocks=str(loaded.clocks) or None,
            prompts=", ".join(workloads.values()) or None,
            settings=stated | {"strategy": strategy, "page_size": PAGE, "block_length": config.block_length},
        ),
        **{"commits": (), **fields},
    )


def doubted(fit: Fit, doubts: Sequence[str]) -> Fit:
    """The fit with more doubts."""
    return replace(fit, doubts=(*fit.doubts, *doubts))


def prompts_of(loaded: "Opened", file: str, seed: int, tokenizer: str | None) -> Prompts:
    """Prompts cut from a text."""
    return prompts_from(read_tokens(file, loaded.name, loaded.model.config, tokenizer), seed)


def prepared(
    loaded: Model, workloads: Mapping[str, str], seed: int, tokenizer: str | None, counted: str, *, on_text: bool
) -> tuple[Model, dict[str, Any], list[str]]:
    """The model to measure, its settings, and doubts; `counted` on prompts.

    on_text: experts are chosen, so trained ones are measured on the first workload's text. ProfileError before
    measuring for random weights, and where prompts cannot be read.
    """
    if workloads and not loaded.trained:
        raise ProfileError(f"the weights of {loaded.name} are random: {counted} on prompts would mean nothing")
    prompts = [prompts_of(loaded, file, seed, tokenizer) for file in workloads.values()]
    settings = loaded.settings
    if not (on_text and loaded.trained):
        return loaded, settings, []
    if prompts:
        return replace(loaded, text=prompts[0]), settings | {"routing": f"of the text {next(iter(workloads))}"}, []
    doubt = "routing: prompts of random tokens chose the experts, expected text like your traffic's (--prompts)"
    return loaded, settings | {"routing": "of random tokens"}, [doubt]


@contextmanager
def keeping(keep: Keep | None, measured_before: Callable[[], tuple[Profile, Evidence]]) -> Iterator[None]:
    """Pass what was measured before a failure or an interrupt to `keep`."""
    try:
        yield
    except BaseException:
        if keep is not None:
            with suppress(ProfileError):  # too few steps to fit
                keep(*measured_before())
        raise


def profile_model(
    loaded: Loaded, *, name: str, budget: float, workloads: Mapping[str, str], thresholds: Sequence[float],
    temperature: float = 1.0, yields: Profile | None = None, max_batch: int | None = None, seed: int = 0,
    on_progress: OnProgress = silent, both_ways: bool = False, tokenizer: str | None = None, eos: bool = False,
    keep: Keep | None = None,
) -> tuple[Profile, Evidence]:  # fmt: skip
    """Measure a model for about `budget` s and fit its profile.

    workloads: prompts by workload, on which commits are logged at each threshold; none for random weights. yields:
    another profile, whose commit models and importance deltas are copied. both_ways: a full-sequence model; no commits
    or evictions are measured. tokenizer, eos: as in log_commits. keep: receives what was measured before a failure or
    an interrupt.
    """
    begin = time.monotonic()

    def progress(stage: str, _: float = 0.0) -> None:
        on_progress(stage, min(1.0, (time.monotonic() - begin) / budget))

    if both_ways and workloads:
        raise ProfileError("commits are logged of block diffusion, and the profile is to be of a full-sequence model")
    if both_ways:
        loaded = replace(loaded, graphs=False)  # full-sequence steps are never captured
    config = loaded.model.config
    if eos and not (config.eos and workloads):
        raise ProfileError(
            f"--eos ends the requests whose commits are logged, and {config.name} names EOS {list(config.eos)} and "
            f"{len(workloads)} workloads: expected some of both"
        )
    loaded, settings, unknown = prepared(
        loaded, workloads, seed, tokenizer, "commits logged", on_text=config.experts is not None
    )
    block = config.block_length
    policies = [Shape(1, window, block).policy(block) for window in {1, 2, block}]
    short = seconds_to_compile([*policies, evicting_policy(block, 1, block)]) > MOST_COMPILING * budget
    if short:
        unknown.append(f"the steps were planned in plain Python, as compiling them takes most of {budget:.0f} s")
    lent = ((), None) if yields is None else (yields.commits, yields.focus)
    if yields is not None and yields.focus is not None:
        settings["importance"] = f"of {yields.name}"
    family = "full-sequence" if both_ways else "block-diffusion" if block > 1 else "autoregressive"
    measured_shapes: list[Measured] = []
    journal: Samples | None = None

    def fitted() -> tuple[Profile, Evidence]:
        steps = _samples(measured_shapes, loaded.on_gpu)
        latency, fit = fit_latency(steps, graph_tokens=loaded.graph_tokens, journal=journal)
        latency = replace(latency, early=digits(loaded.shape.early), layers=loaded.shape.layers)
        return measured(
            loaded, latency, fit, name=name, family=family, strategy="low_confidence_dynamic", settings=settings,
            workloads=workloads, seed=seed, doubts=unknown, sources=[m.source for m in lent[0]], commits=lent[0],
            focus=lent[1],
        ), Evidence(steps, journal)  # fmt: skip

    with patience(sys.maxsize if short else core.STEPS_PATIENCE):
        for_overhead = budget * OVERHEAD_SHARE if both_ways else 0.0
        for_eviction = budget * EVICTION_SHARE if loaded.on_gpu and not both_ways else 0.0
        for_steps = budget * STEPS_SHARE if workloads else budget - for_overhead - for_eviction
        with keeping(keep, fitted):
            measure_steps(
                loaded, for_steps * (1.0 - JOURNAL_SHARE * loaded.on_gpu), measured_shapes, max_batch=max_batch,
                seed=seed, on_progress=progress,
            )  # fmt: skip
            if loaded.on_gpu and not both_ways:
                journal, settings["made_ready"] = serve_journal(
                    loaded, JOURNAL_SHARE * for_steps, max_batch=max_batch, seed=seed
                )
        profile, evidence = fitted()
        with keeping(keep, lambda: (profile, evidence)):
            latency = profile.latency
            if both_ways:
                overhead = measure_cache_overhead(loaded, latency, for_overhead, progress)
                latency = replace(latency, cache_overhead=overhead)
            else:
                eviction = measure_eviction(loaded, latency, max_batch, for_eviction)
                latency = replace(latency, eviction=digits(eviction, 3))
            profile = replace(profile, latency=latency)
            pairs = [(workload, threshold) for workload in workloads for threshold in thresholds]
            for i, (workload, threshold) in enumerate(pairs):
                progress(f"commits on {workload} at threshold {threshold:g}")
                share = max(0.0, (begin + budget - time.monotonic()) / (len(pairs) - i) - FITTING)
                log = log_commits(loaded, workloads[workload], threshold, temperature, share, seed, tokenizer, eos)
                source = f"dsim profile: {config.name} at work on {workload}, {len(np.unique(log.request))} requests"
                model, commit_fit = fit_commits(
                    log, workload=workload, threshold=threshold, temperature=temperature, source=source
                )
                profile = replace(
                    profile,
                    commits=(*profile.commits, model),
                    commit_fits=(*profile.commit_fits, commit_fit),
                )
    return profile, evidence
