"""A model's weights, random or from its directory (config.json, safetensors; names in live/families.py)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine.errors import ModelError
from ..files.read import cut
from .config import AS_IT_SAYS, ConfigJson, ModelConfig, Settings, config_json, decoder_config
from .families import CANVAS, FAMILIES
from .model import Decoder, Layer, frequencies
from .random_weights import drawn_experts, fill
from .shipped_configs import CONFIGS
from .tensors import WEIGHTS, stored_tensors

NOWHERE = "meta"  # shapes without numbers
COMPUTED = ("rotary_emb.inv_freq",)  # stored in some checkpoints; computed here
FOLDERS = {"tiny": Path(__file__).parent / "tiny", "tiny-both-ways": Path(__file__).parent / "tiny" / "both_ways"}


def load(model: str, device: str, dtype: torch.dtype, seed: int = 0, settings: Settings = AS_IT_SAYS) -> Decoder:
    """The decoder of this name, with weights read or random (`is_trained`). Raises ModelError."""
    source = source_of(model, settings)
    config = decoder_config(source, settings)
    if is_trained(model, settings):
        return _read(folder_of(model, settings), config, device, dtype)
    decoder = random_model(config, device, dtype, seed)
    if config.experts is not None:  # rows draw their experts, not the router
        tables = drawn_experts(config.experts.num, config.layers, seed, device)
        for table, layer in zip(tables, cast(list[Layer], list(decoder.layers)), strict=True):
            if hasattr(layer, "experts"):
                layer.experts.drawn = table
    return decoder


def folder_of(model: str, settings: Settings = AS_IT_SAYS) -> Path:
    """The folder of a model's weights. Raises ModelError."""
    if Path(model).is_dir():
        return Path(model)
    if model not in FOLDERS:
        raise ModelError(f"model is {cut(model)}, expected a directory or one of: {', '.join((*CONFIGS, *FOLDERS))}")
    if (settings.mask_token, settings.block_length) != (None, None):
        raise ModelError(f"model is {cut(model)}, and --mask-token-id and --block-length are of a directory's")
    return shipped(model)


def source_of(model: str, settings: Settings = AS_IT_SAYS) -> ConfigJson:
    """The config.json of a directory, a shipped model, or random weights. Raises ModelError."""
    if is_trained(model, settings):
        return config_json(folder_of(model, settings))
    path = FOLDERS.get(model, Path(model))
    if path.exists():
        return config_json(path)
    if model in CONFIGS:
        return ConfigJson(path, dict(CONFIGS[model]), {}, CONFIGS[model]["name"])
    names = ", ".join((*CONFIGS, *FOLDERS))
    raise ModelError(f"--random-weights is {cut(model)}, expected a config.json, its folder, or one of: {names}")


def shipped(model: str) -> Path:
    """A trained preset's folder; ModelError if the wheel lacks it, as tiny-both-ways."""
    folder = FOLDERS[model]
    if not (folder / WEIGHTS).is_file():
        place = f"live/tiny/{folder.name}"
        raise ModelError(f"model {model} is not in the wheel, expected a directory: {place} of dsim's source archive")
    return folder


def is_trained(model: str, settings: Settings = AS_IT_SAYS) -> bool:
    """Whether weights are read: they are random for names in CONFIGS, and with --random-weights."""
    return not settings.random_weights and (model not in CONFIGS or Path(model).is_dir())


def origin(seed: int, *, trained: bool, has_experts: bool) -> str:
    """The weights' origin in words; empty: read from files."""
    if trained:
        return ""
    return f"random (seed {seed}), experts drawn evenly" if has_experts else f"random (seed {seed})"


def is_canvas(model: str, settings: Settings = AS_IT_SAYS) -> bool:
    """Whether it is a DiffusionGemma. Raises ModelError."""
    return bool(source_of(model, settings).architecture == CANVAS)


def config_of(model: str, settings: Settings = AS_IT_SAYS) -> ModelConfig:
    """A decoder's dimensions, read without weights."""
    return decoder_config(source_of(model, settings), settings)


def random_model(config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """A decoder with random weights."""
    model = _empty(config, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(weight, name, config.layers, generator)
    return model


def _read(folder: Path, config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    """A decoder with a directory's tensors."""
    _fill(_empty(config, NOWHERE, dtype), folder, NOWHERE)  # before memory is taken for a file's sizes
    model = _empty(config, device, dtype)
    with torch.no_grad():
        _fill(model, folder, device)
        _turn_first(model, turned_first(config))
    return model


def _fill(model: Decoder, folder: Path, device: str) -> None:
    """Copy a directory's tensors into a model; on NOWHERE compare names and shapes."""
    config, parameters = model.config, dict(model.named_parameters())
    places = dict(stored_parts(config, parameters))
    num_places, family = len(places), FAMILIES[config.architecture]
    head = family.names["head.weight"]
    for path, name, shape, read in stored_tensors(folder, "cpu" if device == NOWHERE else device):
        if name.endswith(COMPUTED) or (config.tied and name == head):
            continue
        if name not in places:
            about = f"{config.name} of {config.layers} layers"
            raise ModelError(f"{path}: holds {cut(name)}, which {about} has no place for")
        target = places.pop(name)
        if shape != target.shape:
            raise ModelError(f"{path}: {name} is {list(shape)}, expected {list(target.shape)} by config.json")
        if device != NOWHERE:
            target.copy_(read())
    if places:
        missing = next(iter(places))
        hint = ""
        if list(places) == [head]:
            hint = ", and tie_word_embeddings is false: expected true, or the weight"
        raise ModelError(f"{folder}: lacks {missing} ({len(places)} of {num_places} weights are missing){hint}")


def turned_first(config: ModelConfig) -> list[int] | None:
    """The order of a head's components if only some turn: we pair i with i + D / 2, checkpoints i with i + rotary / 2.

    Queries and keys in the same order have the same products.
    """
    if config.rotary is None:
        return None
    half, fixed = config.rotary // 2, range(config.rotary, config.head_dim)
    middle = config.rotary + len(fixed) // 2
    first, second = range(half), range(half, config.rotary)
    return [*first, *range(config.rotary, middle), *second, *range(middle, config.head_dim)]


def _turn_first(model: Decoder, order: list[int] | None) -> None:
    """Put queries, keys and their norms in that order."""
    if order is None:
        return
    for layer in model.layers:
        assert isinstance(layer, Layer)
        num = sum(layer.split[:2])
        for weight in (layer.qkv.weight, layer.qkv.bias):
            if weight is not None:
                heads = weight.view(-1, layer.head_dim, *weight.shape[1:])[:num]
                heads.copy_(heads[:, order].clone())
        for norm in layer.qk_norms:
            if norm is not None:
                norm.copy_(norm[order].clone())


class _Uninitialised(TorchFunctionMode):
    """Skips initialisation, which on the meta device loads PyTorch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def _empty(config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    """A decoder with uninitialised weights; nothing passes host memory."""
    with torch.device(NOWHERE), _Uninitialised():
        model = Decoder(config)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            kind = torch.float32 if name == "router_bias" else dtype
            empty = torch.empty(weight.shape, dtype=kind, device=device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    if device != NOWHERE:
        model.frequencies = frequencies(config, device)
    return model.eval()


def stored_parts(config: ModelConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A family's tensors by name, as parts of our weights."""
    names = FAMILIES[config.architecture].names
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for ours, weight in weights.items():
        number = "".join(re.findall(r"\d+", ours)[:1])
        templates = names[re.sub(r"\d+", "{i}", ours, count=1)]
        if isinstance(templates, str):
            templates = (templates,)
        matrices: Iterable[Tensor] = (weight,)
        if "{j}" in templates[0]:
            matrices = weight
        for j, matrix in enumerate(matrices):
            sizes = [len(matrix) // len(templates)] * len(templates)
            if len(templates) == 3:
                sizes = [q, kv, kv]
            for template, part in zip(templates, torch.split(matrix, sizes), strict=True):
                yield template.format(i=number, j=j), part
