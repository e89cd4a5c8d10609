"""Measurements on a device: steps of serving, and what blocks and canvases yield on prompts."""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from .. import __version__
from ..engine.cache_overhead import PHASES
from ..engine.commits import CanvasLaw, CommitDraws, CommitModel, Commits, LawDraws, ScheduledCommits
from ..engine.engine import Limits
from ..engine.errors import ModelError, ProfileError
from ..engine.latency import CacheOverhead, Features, LatencyModel, step_times
from ..engine.policies import BASELINES, CANVAS_ROUNDS
from ..engine.policies.ar import Autoregressive
from ..engine.policies.chunk import FixedChunk
from ..engine.policies.delayed_cache import DelayedCache
from ..engine.policies.whole_block import FixedBlock
from ..engine.request import Request
from ..engine.spec import PRESETS, Policy, every_step, evicting_preset, parse
from ..engine.step import Phase
from ..files.read import cut, cut_words
from ..files.write import tell
from ..live import weights
from ..live.canvas_model import (
    CanvasConfig,
    CanvasModel,
    canvas_config,
    num_params,
    random_canvas_model,
    read_canvas_model,
)
from ..live.config import AS_IT_SAYS, ConfigJson, ModelConfig, Settings, decoder_config
from ..live.model import Decoder
from ..live.padding import MAX_ROWS
from ..live.prompts import WORKLOADS, Prompts, prompts_from, random_prompts, read_tokens
from ..live.session import GraphCache, LiveRun, Serving, run
from .clocks import Clocks, clocks_of
from .commit_log import CommitLog, from_journal
from .fit import fit_latency
from .fit_canvas import fit_canvas_law
from .fit_commits import fit_commits
from .hardware import default_max_batch
from .logged import Canvases
from .models import Experts, ModelShape, Windowed
from .profile import Device, Fit, MemoryModel, Profile, Provenance, digits
from .samples import Samples, samples, step_features

PAGE = 64
STEPS = 4  # of a canvas, while steps are measured


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
        if self.on_gpu:
            return default_max_batch(self.device.compute_capability)
        return on_cpu

    @property
    def graph_cache(self) -> GraphCache | None:
        """Captured graphs; None if none are captured."""
        if self.graphs:
            return self.captured
        return None

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
        return self.graphs * MAX_ROWS

    def policies(self, batch: int) -> list[Policy]:
        """Policies whose steps are measured: whole and half blocks, or single tokens."""
        block, limits = self.model.config.block_length, {"max_batch": batch}
        if block == 1:
            return [every_step(limits, Autoregressive())]
        half = every_step(limits, FixedChunk(max(2, block // 2), block), DelayedCache())
        return [parse(f"{BASELINES['block-diffusion']}:{block},max_batch={batch},page_size={PAGE}"), half]

    def draws(self, policy: Policy, requests: Sequence[Request], seed: int) -> Commits | None:
        """Random commits; None: every step commits a token."""
        if policy.commits_by == "acceptance":
            return None
        length = policy.block_length
        prompts, outputs = (np.array([getattr(r, n) for r in requests]) for n in ("input_length", "output_length"))
        model = CommitModel(
            workload="measured",
            block_length=length,
            threshold=0.9,
            temperature=None,
            pass_probability=tuple(0.9 * 0.8**d for d in range(length)),
        )
        return CommitDraws(model, seed, prompts, outputs, length)


@dataclass(frozen=True, kw_only=True)
class LoadedCanvas(OnDevice):
    """A canvas model."""

    model: CanvasModel

    @property
    def shape(self) -> ModelShape:
        return shape_of_canvas(self.model.config)

    @property
    def graph_tokens(self) -> int:
        """0: no step is priced by a bucket."""
        return 0

    def policies(self, batch: int) -> list[Policy]:
        """The policy whose steps are measured: its rounds never mix prefill and denoising."""
        return [parse(f"{CANVAS_ROUNDS}:{batch},canvas_length={self.model.config.canvas_length},page_size={PAGE}")]

    def draws(self, policy: Policy, requests: Sequence[Request], seed: int) -> Commits | None:
        """STEPS forwards a canvas."""
        law = CanvasLaw("measured", policy.block_length, STEPS, least=STEPS, most=STEPS)
        return LawDraws(law, seed, len(requests))


Opened = Loaded | LoadedCanvas


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
    dtype = torch.float32
    if device.startswith("cuda"):
        dtype = torch.bfloat16
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
    room = free or about.memory_bytes
    if size > room:
        raise ModelError(
            f"{name}: its weights take {size / 1e9:.1f} GB, and {device} has {room / 1e9:.1f} GB: expected a smaller "
            "model"
        )
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
    weight = model.embedding
    if not is_canvas:
        weight = weight.weight
    kind: type[Opened] = Loaded
    if is_canvas:
        kind = LoadedCanvas
    return kind(
        name=name,
        model=model,
        device=about,
        memory=MemoryModel(room, size, dtype.itemsize * kv_elements, config.vocab),
        trained=trained,
        derived=derived,
        graphs=graphs is True or (graphs is None and device.startswith("cuda")),
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
    if not torch.cuda.is_available():
        reason = f"PyTorch {torch.__version__} finds no CUDA device here"
        raise ModelError(f"device is {cut(device)}, and {reason}: expected cpu")
    _, colon, index = device.partition(":")
    count = torch.cuda.device_count()
    if colon and not (index.isdecimal() and int(index) < count):
        raise ModelError(f"device is {cut(device)}, expected cuda:0 to cuda:{count - 1}")
    if colon:
        torch.cuda.set_device(int(index))
    # Other processes may hold part of it.
    return int(torch.cuda.mem_get_info()[0])


def describe(device: str) -> Device:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        kind = f"{properties.major}.{properties.minor}"
        if torch.version.hip:
            kind = properties.gcnArchName
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
    return next(iter(names), platform.processor() or platform.machine())


def uuid_of(device: torch.device) -> str | None:
    """A device's UUID; None for a CPU, or if PyTorch does not report it."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return uuid and str(uuid)


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
        experts = Experts(
            num=mixed.num, top_k=mixed.top_k, shared=mixed.shared, ffn=mixed.ffn, dense_layers=mixed.dense_layers
        )
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
    windowed = None
    if sliding:
        windowed = Windowed(len(sliding), sliding[0].kv_heads, sliding[0].head_dim, config.window)
    # A dense feed-forward next to the experts costs as shared experts of the same total width.
    shared = max(1, config.ffn // config.expert_ffn)
    return ModelShape(
        name=config.name, layers=len(config.layers), hidden=config.hidden, heads=config.heads,
        kv_heads=full[0].kv_heads, head_dim=full[0].head_dim, ffn=config.ffn, vocab=config.vocab,
        context_limit=config.context_limit, tied=True, qk_norm=True, windowed=windowed, value_is_key=True,
        experts=Experts(
            num=config.num_experts, top_k=config.top_k, shared=shared, ffn=config.expert_ffn, dense_layers=0
        ),
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

FEWEST_STEPS = 64  # even over budget
MOST_CONTEXT = 32_768  # tokens of a measured request
Columns = Mapping[str, Any]
OnProgress = Callable[[str, float], None]  # what is measured, and the share of the budget spent


def silent(step: str, share: float) -> None:
    """No progress is shown."""


def measure_steps(
    loaded: Opened,
    budget: float,
    measured_steps: list[Samples],
    *,
    max_batch: int | None = None,
    seed: int = 0,
    on_progress: OnProgress = silent,
) -> int:
    """Serve random requests in batches of 1, 2, 4 ... for about `budget` s.

    All requests of a batch arrive at once, so that batches shrink to one. measured_steps: receives each run's steps.
    Returns the kernels compiled and graphs captured meanwhile: if not 0, some latencies are wrong.
    """
    chance, begin, late = np.random.default_rng(seed), time.monotonic(), 0
    most = max_batch or loaded.usual_batch(32)
    plans = [policy for batch in spread(most) for policy in loaded.policies(batch)]
    while True:
        for policy in [*plans]:
            spent = time.monotonic() - begin
            if spent > budget and sum(map(len, measured_steps)) >= FEWEST_STEPS:
                return late
            batch = policy.batching.max_batch or 1
            on_progress(f"steps of {batch} requests, {policy.name}", min(1.0, spent / budget))
            try:
                late += _measure_batch(loaded, policy, chance, after(budget / len(plans)), measured_steps, seed)
            except torch.OutOfMemoryError as error:
                plans = [plan for plan in plans if (plan.batching.max_batch or 1) < batch]
                if not plans:
                    raise ModelError(
                        f"{loaded.name}: out of memory at a batch of 1 ({cut_words(str(error))})"
                    ) from None
                break


def spread(most: int) -> list[int]:
    """The largest batch, which sets the sizes of caches, the smallest, then the powers of two between."""
    return list(dict.fromkeys([most, 1, *(1 << i for i in range(most.bit_length()))]))


def _measure_batch(
    loaded: Opened,
    policy: Policy,
    chance: np.random.Generator,
    stop: Callable[[], bool],
    measured_steps: list[Samples],
    seed: int,
) -> int:
    """Serve twice a policy's batch; returns the kernels compiled and graphs captured meanwhile."""
    config, batch, page = loaded.model.config, policy.batching.max_batch or 1, policy.memory.page_size
    pages = loaded.memory.num_pages(page, batch, policy.batching.max_prefill_tokens)
    output = max(2 * policy.block_length, min(64, config.context_limit // 4))
    limit = min(config.context_limit, MOST_CONTEXT, pages // batch * page)
    longest = limit - output - 2 * policy.block_length
    if longest < 1:
        raise ProfileError(f"{loaded.name}: {pages * page} tokens of keys and values fit for {batch} requests: too few")
    # The longest request is of every run, so that all share their caches and graphs.
    inputs = [longest, *np.exp(chance.uniform(0.0, math.log(longest), 2 * batch - 1)).astype(int).tolist()]
    requests = [Request(i, 0.0, length, output) for i, length in enumerate(inputs)]
    windowed = loaded.shape.windowed
    # Planning counts the features of windowed layers.
    free = LatencyModel(
        ((0.0, 0.0), (1.0, 0.0)), 0.0, layers=loaded.shape.layers, window=windowed.window if windowed else 0
    )
    serving = Serving(
        model=loaded.model,
        policy=policy,
        limits=Limits(pages, config.context_limit, batch),
        prompts=loaded.prompts(seed),
        draws=loaded.draws(policy, requests, seed),
        latency=free,
        graphs=loaded.graph_cache,
        seed=seed,
    )

    def append(columns: Columns, lists: Columns) -> None:
        device = None  # a CPU is its own host
        if loaded.on_gpu:
            device = columns["device"]
        measured_steps.append(samples(step_features(columns, lists, mixed=True), columns["latency"], device))

    done = run(serving, requests, append=append, stop=stop, sample=loaded.clocks.sample)
    check_whole(done)
    return done.num_made_ready


# ---- commits --------------------------------------------------------------------------------------------------

FEWEST_LOGGED = 8  # completed requests of a commit log, even over budget: of fewer, perhaps none is held out
MOST_LOGGED = 400  # requests of a commit log
FITTING = 4.0  # s, of a log


def log_commits(
    loaded: Loaded, prompts: str, threshold: float, temperature: float, budget: float, *, seed: int = 0,
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


def after(budget: float) -> Callable[[], bool]:
    """Whether `budget` s have passed since the first planned step, without compilation before it."""
    begin: float | None = None

    def over() -> bool:
        nonlocal begin
        first, begin = begin is None, time.monotonic() if begin is None else begin
        return not first and time.monotonic() > begin + budget

    return over


# ---- evictions ------------------------------------------------------------------------------------------------

EVICTING_BATCH = 8


def measure_eviction(loaded: Loaded, latency: LatencyModel, budget: float) -> float:
    """Seconds that an eviction adds to a step's predicted latency: the median over served steps, at least 0."""
    config = loaded.model.config
    block = config.block_length
    if block == 1 or config.layers < 2:
        return 0.0
    length = min(256, config.context_limit // 2)
    # The executor samples only retained rows.
    policy = parse(
        f"{evicting_preset()},sample_block=false,block_length={block},max_batch={EVICTING_BATCH},page_size={PAGE}"
    )
    requests = [Request(i, 0.0, length, min(4 * block, length)) for i in range(2 * EVICTING_BATCH)]
    limits = Limits(EVICTING_BATCH * -(-2 * length // PAGE), config.context_limit, EVICTING_BATCH)
    serving = Serving(loaded.model, policy, limits, loaded.prompts(0), graphs=loaded.graph_cache)
    columns, _, _ = journal_of(serving, requests, after(budget))
    evicting = columns["evicted"] > 0
    if not evicting.any():
        return 0.0
    steps = {name: column[evicting] for name, column in columns.items()}
    work = {name: steps[name] for name in Features._fields if name in steps}
    for left, name, gone in (
        ("left_tokens", "tokens", "evicted"),
        ("left_q_kv", "sum_q_kv", "evicted_q_kv"),
        ("left_kv", "sum_kv", "evicted_kv"),
        ("left_sampled", "sampled_rows", "evicted"),
    ):
        work[left] = steps[name] - steps[gone]
    over = steps["latency"] - step_times(latency, {**work, "evicting": True})
    return max(0.0, float(np.median(over)))


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
        serving = Serving(model=loaded.model, policy=policy, limits=limits, prompts=loaded.prompts(0), draws=draws)
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


# ---- canvases -------------------------------------------------------------------------------------------------

LOGGED_BATCH = 8


def count_steps(loaded: LoadedCanvas, prompts: Prompts, budget: float, seed: int = 0) -> Canvases:
    """Denoising steps of each canvas under the checkpoint's stopping rule, in about `budget` s."""
    config, chance = loaded.model.config, np.random.default_rng([seed, 1])
    [policy] = loaded.policies(LOGGED_BATCH)
    longest = max(1, min(256, config.context_limit - 4 * config.canvas_length))
    requests = [
        Request(i, 0.0, int(chance.integers(1, longest + 1)), int(chance.integers(1, 4)) * config.canvas_length)
        for i in range(MOST_LOGGED)
    ]
    pages = LOGGED_BATCH * -(-(longest + 4 * config.canvas_length) // PAGE)
    limits = Limits(pages, config.context_limit, LOGGED_BATCH)
    serving = Serving(loaded.model, policy, limits, prompts, graphs=loaded.graph_cache, seed=seed)
    _, lists, _ = journal_of(serving, requests, after(budget), ("requests", "phases", "commits"))
    emits = lists["commits"].reshape(len(lists["requests"]), -1).any(axis=1)
    counts: dict[int, int] = {}
    finished: list[tuple[int, int]] = []  # request and steps
    for row in np.flatnonzero(lists["phases"] == Phase.DENOISE).tolist():
        request = int(lists["requests"][row])
        counts[request] = counts.get(request, 0) + 1
        if emits[row]:
            finished.append((request, counts.pop(request)))
    if not finished:
        raise ProfileError(
            f"{config.name}: no canvas was finished in {budget:.0f} s, expected some: give a longer --budget"
        )
    request_of, num_steps = np.array(finished).T
    return Canvases(request_of, num_steps, np.zeros(len(num_steps), np.bool_))


# ---- the profile ----------------------------------------------------------------------------------------------

Keep = Callable[[Profile, Samples], object]

STEPS_SHARE = 0.5  # of the budget; commit logs get the rest
EVICTION_SHARE = 0.05  # of the budget on a GPU; of a CPU, which evicts nearly for free, it is not measured
OVERHEAD_SHARE = 0.25  # of the budget, for full-sequence models


def default_workloads(loaded: Opened) -> dict[str, str]:
    """Prompts by workload: the tiny model's two; none for random weights."""
    if not loaded.trained:
        return {}
    if loaded.model.config.vocab >= 512:
        raise ProfileError(f"{loaded.name} is asked nothing: its commits are logged on prompts (--prompts FILE)")
    return {name: name for name in WORKLOADS}


def doubted(fit: Fit, doubts: Sequence[str]) -> Fit:
    """The fit with more doubts."""
    return replace(fit, doubts=(*fit.doubts, *doubts))


def prompts_of(loaded: "Opened", file: str, seed: int, tokenizer: str | None) -> Prompts:
    """Prompts cut from a text."""
    return prompts_from(read_tokens(file, loaded.name, loaded.model.config, tokenizer), seed)


def prepared(
    loaded: Opened, workloads: Mapping[str, str], seed: int, tokenizer: str | None
) -> tuple[Opened, dict[str, Any], list[str]]:
    """The model to measure, its settings, and doubts.

    Trained experts are measured on the first workload's text. ProfileError before measuring for random weights, and
    where prompts cannot be read.
    """
    if workloads and not loaded.trained:
        raise ProfileError(f"the weights of {loaded.name} are random: yields on prompts would mean nothing")
    prompts = [prompts_of(loaded, file, seed, tokenizer) for file in workloads.values()]
    settings = loaded.settings
    if loaded.shape.experts is None or not loaded.trained:
        return loaded, settings, []
    if prompts:
        return replace(loaded, text=prompts[0]), settings | {"routing": f"of the text {next(iter(workloads))}"}, []
    doubt = "routing: prompts of random tokens chose the experts, expected text like your traffic's (--prompts)"
    return loaded, settings | {"routing": "of random tokens"}, [doubt]


@contextmanager
def keeping(keep: Keep | None, measured_before: Callable[[], tuple[Profile, Samples]]) -> Iterator[None]:
    """Pass what was measured before a failure or an interrupt to `keep`."""
    try:
        yield
    except BaseException:
        if keep is not None:
            with suppress(ProfileError):  # too few steps to fit
                keep(*measured_before())
        raise


def profile_model(
    loaded: Opened,
    *,
    name: str,
    budget: float,
    workloads: Mapping[str, str],
    thresholds: Sequence[float] = (),
    temperature: float = 1.0,
    yields: Profile | None = None,
    max_batch: int | None = None,
    seed: int = 0,
    on_progress: OnProgress = silent,
    both_ways: bool = False,
    tokenizer: str | None = None,
    eos: bool = False,
    keep: Keep | None = None,
) -> tuple[Profile, Samples]:
    """Measure a model for about `budget` s and fit its profile; also returns the measured steps.

    workloads: prompts by workload, on which commits are logged at each threshold, or a canvas's steps counted; none for
    random weights. yields: another profile, whose commit models, laws and importance deltas are copied. both_ways: a
    full-sequence model; no commits or evictions are measured. tokenizer, eos: as in log_commits. keep: receives what
    was measured before a failure or an interrupt.
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
    loaded, settings, unknown = prepared(loaded, workloads, seed, tokenizer)
    family = "autoregressive"
    if both_ways:
        family = "full-sequence"
    elif isinstance(loaded, LoadedCanvas):
        family = "canvas"
    elif config.block_length > 1:
        family = "block-diffusion"
    measured_steps: list[Samples] = []

    def fitted() -> tuple[Profile, Samples]:
        steps = all_of(measured_steps)
        return _profile(
            loaded,
            steps,
            name=name,
            family=family,
            settings=settings,
            doubts=unknown,
            yields=yields,
            workloads=workloads,
            seed=seed,
        ), steps

    for_overhead = for_eviction = 0.0
    if both_ways:
        for_overhead = budget * OVERHEAD_SHARE
    elif loaded.on_gpu and family == "block-diffusion":
        for_eviction = budget * EVICTION_SHARE
    for_steps = budget - for_overhead - for_eviction
    if workloads or (family == "canvas" and loaded.trained):
        for_steps = budget * STEPS_SHARE
    with keeping(keep, fitted):
        settings["made_ready"] = measure_steps(
            loaded, for_steps, measured_steps, max_batch=max_batch, seed=seed, on_progress=progress
        )
    profile, steps = fitted()
    with keeping(keep, lambda: (profile, steps)):
        latency = profile.latency
        if isinstance(loaded, LoadedCanvas):
            share = max(budget * (1 - STEPS_SHARE) / 2, budget + begin - time.monotonic())  # a slow start takes more
            profile = _with_laws(
                profile, loaded, workloads, budget=share, seed=seed, tokenizer=tokenizer, progress=progress
            )
        elif both_ways:
            overhead = measure_cache_overhead(loaded, latency, for_overhead, progress)
            profile = replace(profile, latency=replace(latency, cache_overhead=overhead))
        elif for_eviction > 0:
            eviction = digits(measure_eviction(loaded, latency, for_eviction), 3)
            profile = replace(profile, latency=replace(latency, eviction=eviction))
        pairs = [(workload, threshold) for workload in workloads for threshold in thresholds]
        for i, (workload, threshold) in enumerate(pairs):
            if isinstance(loaded, LoadedCanvas):
                break
            progress(f"commits on {workload} at threshold {threshold:g}")
            share = max(0.0, (begin + budget - time.monotonic()) / (len(pairs) - i) - FITTING)
            log = log_commits(
                loaded, workloads[workload], threshold, temperature, share, seed=seed, tokenizer=tokenizer, eos=eos
            )
            source = f"dsim profile: {config.name} at work on {workload}, {len(np.unique(log.request))} requests"
            model, commit_fit = fit_commits(
                log, workload=workload, threshold=threshold, temperature=temperature, source=source
            )
            profile = replace(
                profile, commits=(*profile.commits, model), commit_fits=(*profile.commit_fits, commit_fit)
            )
    return profile, steps


def all_of(parts: Sequence[Samples]) -> Samples:
    """The steps of several runs, in order."""
    if not parts:
        return samples([], [])
    columns = ([getattr(part, name) for part in parts] for name in ("features", "latency", "device"))
    return samples(*(np.concatenate(column) for column in columns))


def _profile(
    loaded: Opened,
    steps: Samples,
    *,
    name: str,
    family: str,
    settings: Mapping[str, Any],
    doubts: Sequence[str],
    yields: Profile | None,
    workloads: Mapping[str, str],
    seed: int,
) -> Profile:
    """The profile of measured steps. settings: read before measuring."""
    config = loaded.model.config
    latency, fit = fit_latency(steps, graph_tokens=loaded.graph_tokens)
    stated = {key: value for key, value in settings.items() if key not in ("torch", "driver")}
    lent: dict[str, Any] = {"commits": ()}
    sources: list[str] = []
    if yields is not None:
        lent = {"commits": yields.commits, "canvas_laws": yields.canvas_laws, "focus": yields.focus}
        sources = [model.source for model in yields.commits] + [law.source for law in yields.canvas_laws]
    return Profile(
        name=name,
        description=f"{config.name}{' with random weights' * (not loaded.trained)} on {loaded.device.name}, "
        "measured through dsim's own executor",
        origin="measured",
        family=family,
        implementation="dsim live",
        device=loaded.device,
        model=loaded.shape,
        latency=replace(latency, early=digits(loaded.shape.early)),
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
            settings=stated | {"page_size": PAGE, "block_length": config.block_length},
        ),
        **lent,
    )


def _with_laws(
    profile: Profile,
    loaded: LoadedCanvas,
    workloads: Mapping[str, str],
    *,
    budget: float,
    seed: int,
    tokenizer: str | None,
    progress: Callable[[str], None],
) -> Profile:
    """The profile with laws of steps per canvas on each workload's prompts, or on random tokens."""
    if not loaded.trained:  # the steps of random weights mean nothing
        return profile
    config = loaded.model.config
    for workload, file in (workloads or {"random tokens": ""}).items():
        progress(f"canvases of {workload}")
        prompts, note = random_prompts(config, seed), "; they drive canvases to their cap, unlike text (--prompts)"
        if file:
            prompts, note = prompts_of(loaded, file, seed, tokenizer), ""
        canvases = count_steps(loaded, prompts, budget / max(1, len(workloads)), seed)
        law, doubts = fit_canvas_law(
            canvases,
            workload=workload,
            canvas_length=config.canvas_length,
            late=False,
            source=f"dsim profile: {config.name} at work on {workload}, {len(canvases.request)} canvases{note}",
        )
        fit = doubted(profile.fit, [f"{workload}: {line}" for line in doubts])
        profile = replace(profile, fit=fit, canvas_laws=(*profile.canvas_laws, law))
    return profile
