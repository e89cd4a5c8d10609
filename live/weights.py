"""Weights: a Hugging Face directory (config.json, safetensors; SDAR's and Qwen3's names) read, written, or made up."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..engine.errors import ModelError
from .config import PRESETS, ModelConfig
from .model import Decoder, frequencies

ARCHITECTURES = {"Qwen3ForCausalLM": 1, "SDARForCausalLM": 4}  # block length where the config has none
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHIPPED = Path(__file__).parent / "tiny"


def load(model: str, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """The decoder of a preset's name or of a directory, on a device.

    A preset's weights are random, except the tiny one's, which is shipped. Raises ModelError.
    """
    if Path(model).is_dir():
        return read_model(Path(model), device, dtype)
    if model == "tiny":
        return read_model(SHIPPED, device, dtype)
    if model not in PRESETS:
        raise ModelError(f"model is {model}, expected a directory or one of: {', '.join(PRESETS)}")
    return random_model(PRESETS[model], device, dtype, seed)


def is_trained(model: str) -> bool:
    """Whether the weights mean something: a directory's do, and the shipped model's; a preset's are random."""
    return model == "tiny" or Path(model).is_dir()


def config_of(model: str) -> ModelConfig:
    """The dimensions of a preset's name or of a directory, read without its weights."""
    if model != "tiny" and model in PRESETS and not Path(model).is_dir():
        return PRESETS[model]
    path = SHIPPED if model == "tiny" and not Path(model).is_dir() else Path(model)
    if not path.is_dir():
        raise ModelError(f"model is {model}, expected a directory or one of: {', '.join(PRESETS)}")
    return read_config(path)


def random_model(config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """Weights that cost what real ones cost and mean nothing: normal, scaled so that activations stay finite."""
    model = _empty(config, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                deep = name.endswith(("output.weight", "down.weight"))
                spread = 0.02 / (math.sqrt(2 * config.layers) if deep else 1.0)
                weight.normal_(std=spread, generator=generator)
    return model


def read_config(folder: Path) -> ModelConfig:
    """A directory's config.json; a ModelError names what is missing or not supported."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: has no config.json") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    named = found.get("architectures") if isinstance(found, dict) else None
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture is {architecture}, expected one of: {', '.join(ARCHITECTURES)}")
    rope = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ModelError(f"{path}: rope_type is {scaling.get('rope_type', scaling.get('type'))}, expected default")
    for key, wanted in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
        if found.get(key, wanted) != wanted:
            raise ModelError(f"{path}: {key} is {found[key]}, expected {wanted}")
    heads, hidden = _whole(path, found, "num_attention_heads"), _whole(path, found, "hidden_size")
    vocab = _whole(path, found, "vocab_size")
    block = _whole(path, found, "block_size", ARCHITECTURES[architecture])
    mask = _whole(path, found, "mask_token_id", 0 if block == 1 else None, least=0)
    if mask >= vocab:
        raise ModelError(f"{path}: mask_token_id is {mask}, expected below vocab_size, {vocab}")
    return ModelConfig(
        name=str(found.get("name") or folder.resolve().name),
        layers=_whole(path, found, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(path, found, "num_key_value_heads", heads),
        head_dim=_whole(path, found, "head_dim", hidden // heads),
        ffn=_whole(path, found, "intermediate_size"),
        vocab=vocab,
        context_limit=_whole(path, found, "max_position_embeddings"),
        block_length=block,
        mask_token=mask,
        rope_theta=float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
        norm_eps=float(found.get("rms_norm_eps", 1e-6)),
        tied=bool(found.get("tie_word_embeddings", False)),
    )


def read_model(folder: Path, device: str, dtype: torch.dtype) -> Decoder:
    """A directory's decoder. Raises ModelError: a shard or a weight is missing, or has another shape."""
    config = read_config(folder)
    model = _empty(config, device, dtype)
    parameters = dict(model.named_parameters())
    wanted = {theirs: ours for ours, names in _names(config).items() for theirs in names}
    rows = {theirs: part for ours, names in _names(config).items() for theirs, part in _parts(config, ours, names)}
    seen = set()
    with torch.no_grad():
        for path, name, tensor in _tensors(folder, device):
            if name not in wanted:
                if name == "lm_head.weight" and config.tied:
                    continue
                raise ModelError(
                    f"{path}: holds {name}, which {config.name} of {config.layers} layers has no place for"
                )
            whole = parameters[wanted[name]]
            target = whole if rows[name] is None else whole[rows[name]]
            if tensor.shape != target.shape:
                raise ModelError(
                    f"{path}: {name} is {list(tensor.shape)}, expected {list(target.shape)} by config.json"
                )
            target.copy_(tensor)
            seen.add(name)
    lacking = [name for name in wanted if name not in seen]
    if lacking:
        raise ModelError(f"{folder}: lacks {lacking[0]} ({len(lacking)} of {len(wanted)} weights are missing)")
    return model


def save_model(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors, which transformers reads as a Qwen3 (its mask is causal)."""
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for ours, weight in model.state_dict().items():
        names = _names(config)[ours]
        for theirs, part in _parts(config, ours, names):
            piece = weight if part is None else weight[part]
            tensors[theirs] = piece.detach().to("cpu", dtype).contiguous().clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    written = {
        "name": config.name,
        "architectures": ["SDARForCausalLM"],
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context_limit,
        "block_size": config.block_length,
        "mask_token_id": config.mask_token,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _empty(config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    """A decoder on the device whose weights are yet to be written; nothing passes through the host's memory."""
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model = model.to_empty(device=device)
    model.frequencies = frequencies(config, device)
    return model.eval().requires_grad_(False)


def _tensors(folder: Path, device: str) -> Iterator[tuple[Path, str, Tensor]]:
    """Every tensor of a directory's safetensors files."""
    index = folder / INDEX
    files = [WEIGHTS]
    if index.is_file():
        try:
            listed: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: cannot be read: {error}") from None
        files = sorted(set(listed.values()))
    elif not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: lacks {missing[0]} ({len(missing)} of {len(files)} shards are missing)")
    for name in files:
        path = folder / name
        try:
            with safe_open(path, framework="pt", device=device) as shard:
                for key in shard.keys():  # noqa: SIM118 - a shard is no dictionary
                    yield path, key, shard.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{path}: not a safetensors file: {str(error).splitlines()[0]}") from None


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our weights' names, and Hugging Face's: those of one matrix, one below the other."""
    names: dict[str, tuple[str, ...]] = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tied:
        names["head.weight"] = ("lm_head.weight",)
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        names[f"{ours}.attention_norm.weight"] = (f"{theirs}.input_layernorm.weight",)
        names[f"{ours}.qkv.weight"] = tuple(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv")
        names[f"{ours}.output.weight"] = (f"{theirs}.self_attn.o_proj.weight",)
        if config.qk_norm:
            names[f"{ours}.q_norm.weight"] = (f"{theirs}.self_attn.q_norm.weight",)
            names[f"{ours}.k_norm.weight"] = (f"{theirs}.self_attn.k_norm.weight",)
        names[f"{ours}.ffn_norm.weight"] = (f"{theirs}.post_attention_layernorm.weight",)
        names[f"{ours}.gate_up.weight"] = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        names[f"{ours}.down.weight"] = (f"{theirs}.mlp.down_proj.weight",)
    return names


def _parts(config: ModelConfig, ours: str, names: tuple[str, ...]) -> Iterator[tuple[str, slice | None]]:
    """Each of their names, and the rows of our matrix that it fills."""
    if len(names) == 1:
        yield names[0], None
        return
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = (q, kv, kv) if ours.endswith("qkv.weight") else (config.ffn, config.ffn)
    at = 0
    for name, size in zip(names, sizes, strict=True):
        yield name, slice(at, at + size)
        at += size


def _whole(path: Path, found: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = found.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{path}: {key} is {value}, expected a whole number of at least {least}")
    return value
