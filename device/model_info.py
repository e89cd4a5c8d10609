"""A model's directory: whether and how it runs here, and its memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError

if TYPE_CHECKING:
    from ..live.config import ModelConfig
    from ..live.config_file import Given
    from ..profiler.profile import MemoryModel

PAGE = 64  # tokens, LMDeploy's
BATCH, PREFILL = 128, 4096  # sequences and prompt tokens of a step, for its logits


def describe(model: str, gpu: str | None, mask_token_id: int | None, block_length: int | None) -> dict[str, Any]:
    """As numbers and lines, for `model info`. Raises ModelError or ProfileError."""
    from ..live import weights
    from ..live.config_file import Given
    from ..live.families import FAMILIES
    from ..live.hub_cache import in_cache
    from ..profiler.profile import MemoryModel, gb

    model, given = in_cache(model), Given(mask_token_id, block_length)
    if weights.is_canvas(model, given):
        return _describe_canvas(model, gpu, given)
    config = weights.config_of(model, given)
    family = FAMILIES[config.architecture]
    device, capacity, element = _device(gpu)
    stored = weights.check_model(Path(model), given) if Path(model).is_dir() else None
    memory = MemoryModel(capacity, element * config.num_params, element * config.kv_elements, config.vocab)
    pages, room = _room(memory, device)
    runs = _runs(config)
    kind = {2: "bf16", 4: "fp32"}[element]
    lines = {
        "model": f"{config.name}: {config.architecture}, {family.summary}",
        "layers": _layers(config),
        "tokens": f"vocabulary {config.vocab:,}, {_tokens(config)}",
        "weights": f"{config.num_params:,} parameters, {gb(memory.weight_bytes)} in {kind}{_files(stored)}",
        "KV": f"{memory.kv_bytes_per_token:,} bytes a token in {kind}",
        "pages": room,
        "runs": runs,
    }
    return {
        "model": asdict(config), "weight_bytes": memory.weight_bytes, "kv_bytes_per_token": memory.kv_bytes_per_token,
        "device": device, "pages": pages, "page_size": PAGE, "stored": None if stored is None else asdict(stored),
        "lines": lines,
    }  # fmt: skip


def _describe_canvas(model: str, gpu: str | None, given: Given) -> dict[str, Any]:
    """A DiffusionGemma has other layers, another cache and no mask."""
    from ..live.canvas_model import ARCHITECTURE, canvas_config, check_canvas_model, num_params
    from ..live.weights import source_of
    from ..profiler.canvas import check_asked
    from ..profiler.profile import MemoryModel, gb
    from .validate import canvas_policies

    check_asked(model, given)
    config = canvas_config(source_of(model, given))
    stored = check_canvas_model(Path(model)) if Path(model).is_dir() else None
    device, capacity, element = _device(gpu)
    params, rule = num_params(config), config.renoise
    full, sliding = (element * config.kv_elements(kind) for kind in (False, True))
    # Both kinds of layers have equally many pages, as in `dsim live`.
    pages, room = _room(MemoryModel(capacity, element * params, full + sliding, config.vocab), device)
    kind = {2: "bf16", 4: "fp32"}[element]
    lines = {
        "model": f"{config.name}: {ARCHITECTURE}, a canvas denoised in both directions over text read causally",
        "layers": f"{len(config.layers)} of {config.hidden:,}, {config.heads} heads, "
        f"{sum(layer.sliding for layer in config.layers)} see {config.window:,} tokens back and the others all; "
        f"{config.num_experts} experts of {config.expert_ffn:,}, {config.top_k} a token, beside {config.ffn:,}",
        "tokens": f"vocabulary {config.vocab:,}, canvas of {config.canvas_length} and no mask, at most "
        f"{rule.max_steps} steps, an answer ends at {' or '.join(map(str, config.eos)) or 'its limit'}",
        "weights": f"{params:,} parameters, {gb(element * params)} in {kind}{_files(stored)}",
        "KV": f"{full:,} bytes a token in {kind}, and {sliding:,} of those within the window and the canvas",
        "pages": room,
        "runs": "dsim live --policy " + " or ".join(canvas_policies(config.canvas_length)),
    }
    return {
        "model": {"name": config.name, "architecture": ARCHITECTURE}, "weight_bytes": element * params,
        "kv_bytes_per_token": full, "kv_bytes_per_token_in_window": sliding, "device": device, "pages": pages,
        "page_size": PAGE, "stored": None if stored is None else asdict(stored), "lines": lines,
    }  # fmt: skip


def _room(memory: MemoryModel, device: str) -> tuple[int | None, str]:
    """KV pages that fit, and in words."""
    from ..profiler.profile import gb

    try:
        pages = memory.num_pages(PAGE, BATCH, PREFILL)
    except DsimError as error:
        return None, f"none on {device}: {error}"
    room = f"{pages:,} of {PAGE} tokens, {pages * PAGE:,} tokens in all"
    return pages, f"{room}, on {device} ({gb(memory.capacity_bytes)})"


def _device(gpu: str | None) -> tuple[str, int, int]:
    """Name, memory and bytes a number."""
    if gpu is not None:
        from ..profiler import hardware

        known = hardware.gpu(gpu)
        return known.name, known.memory_bytes, 2
    from ..profiler.measure import default_device
    from ..profiler.measure import describe as describe_device

    here = default_device()
    found = describe_device(here)
    return found.name, found.memory_bytes, 2 if here == "cuda" else 4


def _layers(config: ModelConfig) -> str:
    heads = f"{config.heads} heads over {config.kv_heads} of keys, {config.head_dim} wide"
    text = f"{config.layers} of {config.hidden:,}, {heads}, context {config.context_limit:,}"
    if (mixed := config.experts) is None:
        return f"{text}, feed-forward {config.ffn:,}"
    shared = f" and {mixed.shared} shared" if mixed.shared else ""
    dense = f", the first {mixed.dense_layers} dense" if mixed.dense_layers else ""
    return f"{text}, {mixed.num} experts of {mixed.ffn:,}, {mixed.top_k} a token{shared}{dense}"


def _tokens(config: ModelConfig) -> str:
    if config.block_length == 1:
        return "no mask"
    ends = f", an answer ends at {' or '.join(map(str, config.eos))}" if config.eos else ""
    trained = "" if config.both_ways else f", blocks of {config.block_length}"
    return f"mask {config.mask_token}{trained}{ends}"


def _runs(config: ModelConfig) -> str:
    """Presets of `dsim live` that fit the model's training."""
    from ..engine.policy import PRESETS, parse
    from ..live.executor import check_policy, check_whole_blocks
    from ..live.full_sequence import check_runs

    can = []
    for name, preset in PRESETS.items():
        policy = preset.policy
        if policy.family not in config.families:
            continue
        # Full-sequence policies choose their block length.
        own = policy.family != "block-diffusion" or policy.block_length == config.block_length
        spec = name if own else f"{name},block_length={config.block_length}"
        try:
            policy = parse(spec)
            check_policy(policy)
            if config.both_ways:
                check_runs(policy, config)
            elif config.shifted:
                check_whole_blocks(policy, config)
        except DsimError:
            continue
        can.append(spec)
    return "dsim live --policy " + " or ".join(can)


def _files(stored: Any) -> str:
    if stored is None:
        return ""
    from ..profiler.profile import gb

    files = "file" if stored.num_files == 1 else "files"
    return f"; {stored.num_files} {files} of {gb(stored.num_bytes)} ({', '.join(stored.dtypes)}), complete"
