"""Derive a profile from data sheets and the model's shape (formulas: research/evidence/profile-fits.md).

Layers are memory-bound while reading weights takes longer than multiplying, then compute-bound; a chord from half to
1.5 times the knee joins the two. All constants are assumptions.
"""

from dataclasses import dataclass, replace

from .. import __version__
from ..engine.commits import CommitModel
from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel
from .calibrate import SPREAD_SOURCE, bisected
from .hardware import ATTENTION_EFFICIENCY, DENSE_EFFICIENCY, GPUS, LINK_EFFICIENCY, MOE_SHARE, Gpu
from .models import (
    BYTES,
    INFERRED,
    MODELS,
    ModelShape,
    attention_flops,
    expert_params,
    family,
    flops_per_token,
    head_flops,
    head_params,
    layer_params,
    touched_experts,
    window_flops,
)
from .moved_bytes import cache_overhead
from .precision import BITS, KEYS, Precision
from .profile import Device, Fit, MemoryModel, Profile, Provenance, gb, rounded
from .published import CANVAS_LAWS, FOCUS_DELTAS, editing_laws, published_commits
from .scripts import scripts

BF16 = Precision()
PAGE = 64  # tokens of a KV page
CANVAS = 256  # tokens
CANVAS_TENSORS = 6  # fp32 tensors alive at once, as large as a canvas's logits (production-dllm-serving.md 6.1)

# LMDeploy eager: 41 ms for SDAR-8B's 36 layers, host and launches (derived from Optimus).
EAGER_LAUNCH = 0.041 / 36  # s per layer
MOE_LAUNCHES = 1.5  # kernels of a layer with experts relative to a dense one
# Captured graphs: one launch a step, plus scheduling, inputs and sampling on the host.
GRAPH_LAUNCH = 0.5e-3  # s
GRAPH_HOST_STEP = 1e-3  # s
GRAPH_HOST_REQUEST = 10e-6  # s per row
# bf16 logits written and read once, then float32 passes: cast, temperature, softmax, argmax, gather.
SAMPLE_BYTES = 28  # per logit
MAX_TOKENS = 65536
DRAFT_LAYERS = 5  # of z-lab's DFlash drafters, as wide as their models, whose embedding and LM head they use
UNCERTAINTY, MOE_UNCERTAINTY = 0.3, 0.5
MAX_PREFILL_TOKENS = 4096  # LMDeploy's default


@dataclass(frozen=True)
class Sheet:
    """What data sheets imply for serving."""

    knee: int  # tokens at which reading and multiplying weights take equally long
    floor: float  # s of a step of `floor_tokens`
    floor_tokens: int
    bound_by_launch: bool  # the floor
    num_pages: int
    max_batch: int
    max_prefill_tokens: int


def sheet_of(profile: Profile, gpu: Gpu, precision: Precision = BF16) -> Sheet:
    """For a roofline's profile."""
    latency, memory = profile.latency, profile.memory
    rows = memory.usual_rows(profile.default_max_batch)
    pages, prefill = memory.fit(PAGE, rows, MAX_PREFILL_TOKENS)
    least = profile.canvas_laws[0].canvas_length if profile.canvas_laws else 1  # a canvas is computed whole
    computed = latency.base(least) + least * (latency.head + latency.sample)
    return Sheet(
        knee=round(knee(gpu, profile.model, profile.device.count, precision)),
        floor=max(latency.launch, computed) + latency.host_step,
        floor_tokens=least,
        bound_by_launch=latency.launch > computed,
        num_pages=pages,
        max_batch=rows,
        max_prefill_tokens=prefill,
    )


def roofline(
    gpu: Gpu, model: ModelShape, tp: int = 1, graphs: bool = True, *, name: str | None = None,
    description: str | None = None, date: str = "", generates: str | None = None, yields: tuple[CommitModel, ...] = (),
    precision: Precision = BF16,
) -> Profile:  # fmt: skip
    """The model's profile on `tp` GPUs; ProfileError if it does not fit.

    generates: the family, if the name does not tell. yields: in place of published commit models.
    """
    _check(gpu, model, tp, precision)
    kind = generates or family(model)
    shape = "dimensions in profiler/models.py" if MODELS.get(model.name) == model else "dimensions in config.json"
    if model.name in INFERRED and MODELS[model.name] == model:
        shape += f", inferred: those of {INFERRED[model.name]}"
    sheet = "data sheet figures and efficiencies in profiler/hardware.py" if GPUS.get(gpu.name) == gpu else gpu.source
    latency = latency_model(gpu, model, tp, graphs, precision)
    if kind == "full-sequence":
        bandwidth = tp * gpu.bandwidth * gpu.bandwidth_efficiency
        latency = replace(latency, cache_overhead=cache_overhead(model, bandwidth, launched=not graphs))
    memory = memory_model(gpu, model, tp, precision)
    if kind == "autoregressive":
        latency, memory = with_drafter(gpu, model, tp, precision, latency, memory)
    commits = yields or published_commits(model.name)
    mode = "captured graphs" if graphs else "eager LMDeploy"
    gpus = gpu.name if tp == 1 else f"{tp} x {gpu.name}"
    label = f"{precision.label}{'' if tp == 1 else f'-tp{tp}'}{'' if graphs else '-eager'}"
    return Profile(
        name=name or f"{gpu.name}-{model.name}{label}".lower(),
        description=description or f"{model.name}{precision.label} on {gpus}, {mode}, from data sheets",
        origin="roofline",
        family=kind,
        implementation=f"roofline with {mode}",
        device=Device(gpu.name, tp, gpu.memory_bytes, gpu.compute_capability),
        model=model,
        latency=latency,
        fit=Fit((1, MAX_TOKENS), None, None, MOE_UNCERTAINTY if model.experts else UNCERTAINTY),
        memory=memory,
        commits=commits,
        canvas_laws=CANVAS_LAWS if kind == "canvas" else editing_laws(model.name),
        implementations=scripts(model) if kind == "full-sequence" and not graphs else (),
        focus=FOCUS_DELTAS if kind == "block-diffusion" else None,
        provenance=Provenance((sheet, shape, *((SPREAD_SOURCE,) if commits and not yields else ())), date, __version__),
    )


def latency_model(gpu: Gpu, model: ModelShape, tp: int, graphs: bool, precision: Precision = BF16) -> LatencyModel:
    peak, bandwidth = tp * gpu.peak * gpu.matmul_efficiency, tp * gpu.bandwidth * gpu.bandwidth_efficiency
    compute = compute_slope(gpu, model, tp, precision)
    attends = tp * gpu.peak * ATTENTION_EFFICIENCY
    turn = knee(gpu, model, tp, precision)
    keys = KEYS[precision.keys] / BYTES
    start, end = max(1, round(turn / 2)), max(2, round(turn * 1.5))
    fixed, per_token = all_reduce(gpu, model, tp)

    points = [(x, weight_read(gpu, model, tp, x, precision)) for x in memory_grid(model, start)]
    points.append((end, max(compute * end, points[-1][1])))
    # Self-conditioning embeds the last step's distribution: as much work as the LM head.
    conditioning = head_flops(model) / peak if family(model) == "canvas" else 0.0
    gather = (tp - 1) / tp * model.vocab * BYTES / (gpu.link * LINK_EFFICIENCY)
    latency = LatencyModel(
        knots=tuple((float(x), y + fixed + per_token * x) for x, y in points),
        slope=compute + per_token,
        attention=attention_flops(model) / attends,
        kv_read=keys * _kv_bytes(model, tp) / bandwidth,
        window_attention=window_flops(model) / attends,
        window_kv_read=keys * model.window_bytes_on(tp) / bandwidth,
        dense=ATTENTION_EFFICIENCY / DENSE_EFFICIENCY,
        head=head_flops(model) / peak + gather,
        # Every GPU of a replica samples all rows.
        sample=model.vocab * SAMPLE_BYTES * tp / bandwidth + conditioning,
        launch=GRAPH_LAUNCH if graphs else eager_launch(model),
        host_step=GRAPH_HOST_STEP if graphs else 0.0,
        host_request=GRAPH_HOST_REQUEST if graphs else 0.0,
        early=model.early,
        # Two layers before the choice are launched eagerly, and the host waits for them.
        eviction=2 * eager_launch(model) / model.layers,
    )
    return rounded(latency)


def with_drafter(
    gpu: Gpu, model: ModelShape, tp: int, precision: Precision, latency: LatencyModel, memory: MemoryModel
) -> tuple[LatencyModel, MemoryModel]:
    """With what a block drafter of DRAFT_LAYERS dense layers takes: an assumption, as is its lack of a serial head.

    It takes the model's states of as many layers, joined by a matrix, to keys and values of each token.
    """
    drafter = replace(model, layers=min(DRAFT_LAYERS, model.layers), experts=None, windowed=None)
    peak, bandwidth = tp * gpu.peak * gpu.matmul_efficiency, tp * gpu.bandwidth * gpu.bandwidth_efficiency
    fixed, per_token = all_reduce(gpu, drafter, tp)
    joined, keys = drafter.layers * model.hidden**2, KEYS[precision.keys] / BYTES
    projected = drafter.layers * 2 * model.hidden * model.kv_heads * model.head_dim
    latency = replace(
        latency,
        draft_step=weight_read(gpu, drafter, tp, 1) + fixed,
        draft_token=compute_slope(gpu, drafter, tp) + head_flops(model) / peak + per_token,
        draft_context=2 * (joined + projected) / peak,
        draft_kv_read=keys * _kv_bytes(drafter, tp) / bandwidth,
    )
    memory = replace(
        memory,
        draft_weight_bytes=BYTES * (layer_params(drafter) + joined),
        draft_bytes_per_token=round(keys * _kv_bytes(drafter, tp)),
    )
    return rounded(latency), memory


def memory_grid(model: ModelShape, end: int) -> list[int]:
    """Where the memory-bound piece bends: powers of two until all experts are reached, and its end."""
    powers = [2**i for i in range(20) if 2**i < end and touched_experts(model, 2**i) < 0.999]
    return [*(powers if model.experts else [1][: end > 1]), end]


def weight_read(gpu: Gpu, model: ModelShape, tp: int, tokens: float, precision: Precision = BF16) -> float:
    """Seconds to read the LM head and the layers, with only the experts that `tokens` reach."""
    experts = expert_params(model)
    read = (layer_params(model) - experts) * precision.layer_bytes(model) + head_params(model) * BYTES
    read += experts * touched_experts(model, tokens) * BITS[precision.weights] / 8
    return read / (tp * gpu.bandwidth * gpu.bandwidth_efficiency)


def compute_slope(gpu: Gpu, model: ModelShape, tp: int, precision: Precision = BF16) -> float:
    """Seconds per token for the layers' active weights."""
    share = MOE_SHARE if model.experts else 1.0
    slower = precision.slowdown(model, gpu.compute_capability)
    return slower * flops_per_token(model) / (tp * gpu.peak * gpu.matmul_efficiency * share)


def knee(gpu: Gpu, model: ModelShape, tp: int, precision: Precision = BF16) -> float:
    """Tokens at which reading and multiplying weights take equally long."""
    slope = compute_slope(gpu, model, tp, precision)
    highest = weight_read(gpu, model, tp, 1e9, precision) / slope
    return bisected(lambda tokens: slope * tokens < weight_read(gpu, model, tp, tokens, precision), 0.0, highest, 60)[1]


def all_reduce(gpu: Gpu, model: ModelShape, tp: int) -> tuple[float, float]:
    """Seconds per forward and per token of two ring all-reduces per layer, not overlapped."""
    if tp == 1:
        return 0.0, 0.0
    times = 2 * model.layers
    per_token = 2 * (tp - 1) / tp * model.hidden * BYTES / (gpu.link * LINK_EFFICIENCY)
    return times * gpu.link_latency, times * per_token


def eager_launch(model: ModelShape) -> float:
    """Host seconds to launch an uncaptured forward, on any GPU."""
    dense = model.experts.dense_layers if model.experts else model.layers
    return EAGER_LAUNCH * (dense + MOE_LAUNCHES * (model.layers - dense))


def memory_model(gpu: Gpu, model: ModelShape, tp: int, precision: Precision = BF16) -> MemoryModel:
    key_bytes = KEYS[precision.keys]
    return MemoryModel(
        capacity_bytes=tp * gpu.memory_bytes,
        weight_bytes=precision.weight_bytes(model),
        kv_bytes_per_token=_kv_bytes(model, tp) * key_bytes // BYTES,
        vocab=model.vocab,
        window_bytes_per_token=model.window_bytes_on(tp) * key_bytes // BYTES,
        workspace_bytes=CANVAS * model.vocab * 4 * (CANVAS_TENSORS - 1) if family(model) == "canvas" else 0,
    )


def _kv_bytes(model: ModelShape, tp: int) -> int:
    """KV bytes of a token over all GPUs; KV heads are copied if there are more GPUs."""
    return model.kv_bytes_per_token * max(1, tp // model.kv_heads)


def _check(gpu: Gpu, model: ModelShape, tp: int, precision: Precision) -> None:
    if tp < 1:
        raise ProfileError(f"tp is {tp}, expected at least 1")
    if model.heads % tp or max(tp, model.kv_heads) % min(tp, model.kv_heads):
        raise ProfileError(
            f"{model.name} has {model.heads} heads and {model.kv_heads} KV heads, which {tp} GPUs cannot share evenly"
        )
    if not model.kv_bytes_per_token:
        raise ProfileError(
            f"{model.name} keeps 0 bytes of keys and values a token in its {model.full_layers} layers that see all "
            "tokens, expected more: pages are counted by those"
        )
    gpus = f"{tp} x {gpu.name}"
    weights = precision.weight_bytes(model)
    if weights >= tp * gpu.memory_bytes:
        raise ProfileError(
            f"{model.name} takes {gb(weights)} of {precision.weights} weights, {gpus} holds "
            f"{gb(tp * gpu.memory_bytes)}: use more GPUs (--tp), larger ones, or fewer bits (--weights)"
        )
    try:
        memory_model(gpu, model, tp, precision).num_pages(PAGE, 1, PAGE)
    except ProfileError as error:
        raise ProfileError(f"{model.name} on {gpus}: {error}") from None
