"""A model's weights: its directory (config.json, safetensors; names in live/families.py) read or written, or random."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine.errors import ModelError
from ..files.read import cut, shown
from .config import ModelConfig
from .config_file import (
    AS_IT_SAYS,
    ConfigJson,
    Given,
    config_json,
    config_written,
    decoder_config,
    expert_skew,
    fp8_of,
    read_json,
)
from .families import CANVAS, FAMILIES
from .model import Decoder, Layer, frequencies
from .quantised import FP8, SCALE, SCALES, Fp8, check_scale, scale_name, widened
from .random_weights import drawn_experts, fill
from .shipped_configs import CONFIGS

NOWHERE = "meta"  # the device of tensors that have a shape and no numbers
COMPUTED = ("rotary_emb.inv_freq",)  # held by some checkpoints, and made here
AT_ONCE = 4096  # rows of two weights compared at a time
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FOLDERS = {"tiny": Path(__file__).parent / "tiny", "tiny-both-ways": Path(__file__).parent / "tiny" / "both_ways"}


def load(model: str, device: str, dtype: torch.dtype, seed: int = 0, given: Given = AS_IT_SAYS) -> Decoder:
    """The decoder of a model's name on a device, with weights read or random (`is_trained`). Raises ModelError."""
    if is_trained(model, given):
        return read_model(folder_of(model, given), device, dtype, given)
    source = source_of(model, given)
    decoder = random_model(decoder_config(source, given), device, dtype, seed)
    draw_experts(decoder, expert_skew(source, given), seed)
    return decoder


def folder_of(model: str, given: Given = AS_IT_SAYS) -> Path:
    """The directory of a model's weights. Raises ModelError."""
    if Path(model).is_dir():
        return Path(model)
    if model not in FOLDERS:
        raise ModelError(f"model is {cut(model)}, expected a directory or one of: {', '.join((*CONFIGS, *FOLDERS))}")
    if (given.mask_token, given.block_length) != (None, None):
        raise ModelError(f"model is {cut(model)}, and --mask-token-id and --block-length are of a directory's")
    return shipped(model)


def source_of(model: str, given: Given = AS_IT_SAYS) -> ConfigJson:
    """The config.json of a directory, of a shipped model, or of random weights. Raises ModelError."""
    if is_trained(model, given):
        return config_json(folder_of(model, given))
    path = FOLDERS.get(model, Path(model))
    if path.exists():
        return config_json(path)
    if model in CONFIGS:
        return ConfigJson(path, dict(CONFIGS[model]), {}, CONFIGS[model]["name"])
    known = ", ".join((*CONFIGS, *FOLDERS))
    raise ModelError(f"--random-weights is {cut(model)}, expected a config.json, its folder, or one of: {known}")


def shipped(model: str) -> Path:
    """The folder of a trained preset. Raises ModelError where the wheel leaves it out, as it does tiny-both-ways."""
    folder = FOLDERS[model]
    if not (folder / WEIGHTS).is_file():
        place = f"live/tiny/{folder.name}"
        raise ModelError(f"model {model} is not in the wheel, expected a directory: {place} of dsim's source archive")
    return folder


def is_trained(model: str, given: Given = AS_IT_SAYS) -> bool:
    """Whether weights are read; those of a name in CONFIGS are random, as are all with --random-weights."""
    return not given.random_weights and (model not in CONFIGS or Path(model).is_dir())


def made(source: ConfigJson, given: Given, seed: int, dtype: torch.dtype, *, trained: bool, has_experts: bool) -> str:
    """How weights came about, in words; empty where they were read as they stand."""
    if trained:
        fp8 = fp8_of(source)
        return "" if fp8 is None else f"{fp8}, dequantised to {str(dtype).removeprefix('torch.')}"
    skew = expert_skew(source, given) if has_experts else None
    if skew is None:
        return f"random (seed {seed})"
    return f"random (seed {seed}), experts drawn {'evenly' if skew == 0 else f'with a skew of {skew:g}'}"


def is_canvas(model: str, given: Given = AS_IT_SAYS) -> bool:
    """Whether the model is a DiffusionGemma. Raises ModelError for an unknown name."""
    return bool(source_of(model, given).architecture == CANVAS)


def config_of(model: str, given: Given = AS_IT_SAYS) -> ModelConfig:
    """The dimensions of a model's name, read without its weights."""
    return decoder_config(source_of(model, given), given)


def random_model(config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """A decoder with random weights."""
    model = _empty(config, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(weight, name, config.layers, generator)
    return model


def draw_experts(model: Decoder, skew: float, seed: int) -> None:
    """Let each row draw its experts (`drawn_experts`); the routers, now 0, take the same time as before."""
    config, mixed = model.config, model.config.experts
    if mixed is None:
        return
    tables = drawn_experts(mixed.num, config.layers, skew, seed, str(model.embedding.weight.device))
    for table, layer in zip(tables, model.layers, strict=True):
        assert isinstance(layer, Layer)
        if hasattr(layer, "experts"):
            layer.experts.drawn = table
            layer.experts.router.weight.data.zero_()


def read_model(folder: Path, device: str, dtype: torch.dtype, given: Given = AS_IT_SAYS) -> Decoder:
    """A directory's decoder. Raises ModelError where a shard or a weight is missing or has another shape."""
    source = config_json(folder)
    config, fp8 = decoder_config(source, given), fp8_of(source)
    _fill(_empty(config, NOWHERE, dtype), folder, NOWHERE, fp8)  # before memory is taken for sizes that a file claims
    model = _empty(config, device, dtype)
    with torch.no_grad():
        _fill(model, folder, device, fp8)
        _turn_first(model, turned_first(config))
    return model


@dataclass(frozen=True)
class Stored:
    """The safetensors files of a directory."""

    num_files: int
    num_bytes: int  # of the tensors in them
    dtypes: tuple[str, ...]  # most tensors first


def check_model(folder: Path, given: Given = AS_IT_SAYS) -> Stored:
    """Compare names and shapes of a directory's tensors with its config.json, as `read_model` does.

    Only a tied model's head and embedding are read, if the files hold both.
    """
    source = config_json(folder)
    config, fp8 = decoder_config(source, given), fp8_of(source)
    return stored_in(_fill(_empty(config, NOWHERE, torch.float32), folder, NOWHERE, fp8))


Entry = tuple[Path, str, int]  # a tensor's file, dtype and bytes


def entry_of(path: Path, tensor: Tensor) -> Entry:
    """A tensor's file, dtype and bytes."""
    return path, str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()


def stored_in(found: Sequence[Entry]) -> Stored:
    """The files that these tensors are in."""
    kinds = Counter(kind for _, kind, _ in found)
    names = tuple(kind for kind, _ in kinds.most_common())
    return Stored(len({path for path, _, _ in found}), sum(size for *_, size in found), names)


def _fill(model: Decoder, folder: Path, device: str, fp8: Fp8 | None = None) -> list[Entry]:
    """Copy a directory's tensors into a model; each one's file, dtype and bytes."""
    config = model.config
    parameters = dict(model.named_parameters())
    places = {place.name: place for place in _places(config, parameters)}
    family = FAMILIES[config.architecture]
    head, tied = family.names["head.weight"], family.keys["tied"]
    embedding = family.names["embedding.weight"]
    found, stored = dict[str, Path](), []
    again: Path | None = None  # a tied model's head, if its files hold one
    for path, name, tensor in tensors_of(folder, device, fp8):
        stored.append(entry_of(path, tensor))
        if name.endswith(COMPUTED):
            continue
        if name == head and config.tied:
            again = path
            continue
        if name not in places:
            about = f"{config.name} of {config.layers} layers"
            raise ModelError(f"{path}: holds {cut(name)}, which {about} has no place for")
        target = places[name].of(parameters)
        if tensor.shape != target.shape:
            raise ModelError(f"{path}: {name} is {list(tensor.shape)}, expected {list(target.shape)} by config.json")
        target.copy_(tensor)
        found[name] = path
    lacking = [name for name in places if name not in found]
    if lacking:
        why = f", and {tied} is false: expected true, or the weight" if lacking == [head] else ""
        raise ModelError(f"{folder}: lacks {lacking[0]} ({len(lacking)} of {len(places)} weights are missing){why}")
    assert isinstance(head, str), "one weight"
    assert isinstance(embedding, str), "one weight"
    # Once, before memory is taken: the second reading is of the same data.
    if again is not None and device == NOWHERE and not alike((again, head), (found[embedding], embedding)):
        raise ModelError(f"{again}: {head} is not the embedding, and {tied} is true: expected false")
    return stored


def alike(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Whether two tensors of safetensors files are equal, read a few rows at a time."""
    with safe_open(one[0], framework="pt") as file, safe_open(other[0], framework="pt") as second:
        a, b = file.get_slice(one[1]), second.get_slice(other[1])
        if a.get_shape() != b.get_shape():
            return False
        parts = [slice(low, low + AT_ONCE) for low in range(0, a.get_shape()[0], AT_ONCE)]
        return all(torch.equal(a[part].float(), b[part].float()) for part in parts)


def save_model(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors by the names of the model's family."""
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in model.state_dict().items()}
    assert config.rotary is None, "components in another order than the family has them"
    tensors = {place.name: place.of(weights).contiguous().clone() for place in _places(config, weights)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_written(config), indent=2) + "\n", encoding="utf-8")


def turned_first(config: ModelConfig) -> list[int] | None:
    """The order of a head's components where only some turn: our rotation pairs i with i + D / 2.

    Theirs pairs i with i + rotary / 2. Queries and keys in the same order have the same products.
    """
    if config.rotary is None:
        return None
    half, rest = config.rotary // 2, range(config.rotary, config.head_dim)
    middle = config.rotary + len(rest) // 2
    first, second = range(half), range(half, config.rotary)
    return [*first, *range(config.rotary, middle), *second, *range(middle, config.head_dim)]


def _turn_first(model: Decoder, order: list[int] | None) -> None:
    """Put queries, keys and the weights of their norms into that order."""
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
    """Skips the initialisation of layers, which on a device without numbers loads PyTorch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def _empty(config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    """A decoder on the device with uninitialised weights; nothing passes through the host's memory."""
    with torch.device(NOWHERE), _Uninitialised():
        model = Decoder(config)
    for part in model.modules():
        for name, weight in part.named_parameters(recurse=False):
            held = torch.float32 if name == "router_bias" else dtype
            empty = torch.empty(weight.shape, dtype=held, device=device)
            part.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    if device != NOWHERE:
        model.frequencies = frequencies(config, device)
    return model.eval()


def tensors_of(folder: Path, device: str, fp8: Fp8 | None = None) -> Iterator[tuple[Path, str, Tensor]]:
    """Every tensor of a directory's safetensors files; FP8 weights times their scales, which are left out."""
    index = folder / INDEX
    files = [WEIGHTS]
    if (found := read_json(index)) is not None:
        listed = found.get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"{index}: weight_map is {shown(listed)}, expected weights and the files they are in")
        files = sorted(set(listed.values()))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: weight_map names {cut(outside[0])}, expected a file of the folder itself")
    elif not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
    missing = [name for name in files if not os.path.isfile(folder / name)]  # of any name, however long
    if missing:
        raise ModelError(f"{folder}: lacks {cut(missing[0])} ({len(missing)} of {len(files)} shards are missing)")
    scales = {} if fp8 is None else _scales_of([folder / name for name in files])
    for name in files:
        path = folder / name
        with _opened(path, "cpu" if device == NOWHERE else device) as shard:
            for key in shard.keys():  # noqa: SIM118 - a shard is no dictionary
                part = shard.get_slice(key)
                kind, shape = part.get_dtype(), part.get_shape()
                if fp8 is not None and SCALE.search(key):
                    continue
                if kind in FP8:
                    scale = _scale_of(path, key, shape, scales, fp8)
                if device == NOWHERE:  # shape and dtype stand in the file's head
                    yield path, key, torch.empty(shape, dtype=_dtype(kind), device=NOWHERE)
                elif kind in FP8 and fp8 is not None:
                    yield path, key, widened(shard.get_tensor(key), scale, fp8)
                else:
                    yield path, key, shard.get_tensor(key)


@contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    """A safetensors file. Raises ModelError."""
    try:
        with safe_open(path, framework="pt", device=device) as shard:
            yield shard
    except SafetensorError as error:
        raise ModelError(f"{path}: not a safetensors file: {cut(error)}") from None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no memory to map the file into
        raise ModelError(f"{path}: cannot be read: {cut(error)}") from None


def _scales_of(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The scales of FP8 weights, by their names: they may stand in another file than the weight."""
    found = dict[str, Tensor]()
    for path in paths:
        with _opened(path, "cpu") as shard:
            found |= {key: shard.get_tensor(key) for key in shard.keys() if SCALE.search(key)}  # noqa: SIM118
    return found


def _scale_of(path: Path, name: str, shape: list[int], scales: Mapping[str, Tensor], fp8: Fp8 | None) -> Tensor:
    """The scale of an FP8 weight. Raises ModelError."""
    if fp8 is None:
        raise ModelError(f"{path}: {cut(name)} is FP8, and config.json has no quantization_config: expected one")
    found = scale_name(name, scales)
    if found is None:
        raise ModelError(f"{path}: {cut(name)} is FP8 and has no scale, expected {cut(name)}{' or '.join(SCALES)}")
    check_scale(path, name, shape, list(scales[found].shape), fp8)
    return scales[found]


def _dtype(name: str) -> torch.dtype:
    """A dtype by its name in a safetensors file."""
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, **FP8}
    return known.get(name, torch.uint8)


@dataclass(frozen=True)
class Place:
    """The place of a family's tensor in ours."""

    name: str  # theirs
    ours: str
    expert: int | None = None
    rows: slice | None = None  # None: all

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """That part of our weight."""
        whole = weights[self.ours] if self.expert is None else weights[self.ours][self.expert]
        return whole if self.rows is None else whole[self.rows]


def _places(config: ModelConfig, weights: Mapping[str, Tensor]) -> Iterator[Place]:
    """The place of each tensor of a checkpoint of this family."""
    names = FAMILIES[config.architecture].names
    for ours, weight in weights.items():
        layer = re.search(r"\d+", ours)
        number = layer.group() if layer else ""
        theirs = names[re.sub(r"\d+", "{i}", ours, count=1)]
        parts = (theirs,) if isinstance(theirs, str) else theirs
        for j in range(len(weight)) if "{j}" in parts[0] else (None,):
            rows = len(weight if j is None else weight[j])
            for part, own in zip(parts, _rows(config, ours, len(parts), rows), strict=True):
                yield Place(part.format(i=number, j=j), ours, j, own)


def _rows(config: ModelConfig, ours: str, num_parts: int, rows: int) -> list[slice | None]:
    """The rows of our matrix that each of their tensors fills."""
    if num_parts == 1:
        return [None]
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = [q, kv, kv] if ".qkv." in ours else [rows // num_parts] * num_parts
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
