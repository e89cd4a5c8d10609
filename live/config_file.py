"""Read a config.json into a ModelConfig by its family, and write one."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import ModelError
from ..engine.plain import Range
from ..files import read
from ..files.read import cut, shown
from ..files.schema import FileObject
from .config import Experts, ModelConfig, RopeScaling
from .families import CANVAS, FAMILIES, Family
from .hub_cache import in_cache, model_name

NUMBERS = {"rope_theta": 1e4, "norm_eps": 1e-6, "experts.scale": 1.0}  # our fields' defaults
TRUTHS = ("tied", "experts.normed")  # false where absent
ABSENT = {"experts.shared": 0, "experts.dense_layers": 0}
# Above the largest models: a larger number is a mistake that takes memory and hours to show.
WHOLE = {
    "hidden": Range(1, 1 << 20), "ffn": Range(1, 1 << 20), "experts.ffn": Range(1, 1 << 20),
    "vocab": Range(1, 1 << 24), "mask_token": Range(0, 1 << 24), "context_limit": Range(1, 1 << 30),
    "layers": Range(1, 1 << 10), "experts.num": Range(1, 1 << 10), "experts.shared": Range(0, 1 << 10),
    "experts.dense_layers": Range(0, 1 << 16),
}  # fmt: skip
OTHERS, ABOVE_0 = Range(1, 1 << 16), Range(0, above=True)
QUANTISED = ("quantization_config", "compression_config")
# Stretched RoPE, and its bounds' keys in config.json.
SCALINGS = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("high_freq_factor", "low_freq_factor")}
FOLLOW = ("kv_heads", "head_dim", "block_length")  # from other fields, or the user's settings


@dataclass(frozen=True)
class Settings:
    """The user's settings, which complete or override a checkpoint's; None: the checkpoint's."""

    mask_token: int | None = None
    block_length: int | None = None
    random_weights: bool = False  # made on the device; only config.json is read


AS_IT_SAYS = Settings()


def named(
    model: str | None, random_weights: str | None, mask_token: int | None = None, block_length: int | None = None
) -> tuple[str, Settings]:
    """The model and settings of --model or --random-weights. Raises ModelError."""
    if model is not None and random_weights is not None:
        raise ModelError(f"--model is {cut(model)} and --random-weights is {cut(random_weights)}, expected one of them")
    settings = Settings(mask_token, block_length, random_weights is not None)
    return in_cache(model or random_weights or "tiny"), settings


@dataclass(frozen=True)
class ConfigJson:
    path: Path
    values: dict[str, Any]
    generation: dict[str, Any]
    name: str

    @property
    def architecture(self) -> Any:
        """The first of `architectures`, or None."""
        listed = self.values.get("architectures")
        return listed[0] if isinstance(listed, list) and listed else None


def config_json(path: Path) -> ConfigJson:
    """The config.json in a model's folder, or a file of any name. Raises ModelError."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json" if path.is_dir() else path
    values = read_json(file)
    if values is None:
        raise ModelError(f"{folder}: has no config.json")
    name = model_name(folder) if file.name == "config.json" else file.stem
    return ConfigJson(file, values, read_json(folder / "generation_config.json") or {}, cut(values.get("name") or name))


def check_plain(source: ConfigJson) -> None:
    """ModelError if the checkpoint is quantised."""
    text = source.values.get("text_config")
    for settings in (source.values, text if isinstance(text, dict) else {}):
        for key in QUANTISED:
            if settings.get(key):
                raise ModelError(
                    f"{source.path}: has {key}, so the weights are quantised: expected bf16, fp16 or fp32 weights"
                )


def decoder_config(source: ConfigJson, settings: Settings = AS_IT_SAYS) -> ModelConfig:
    """ModelError names a missing or unsupported value."""
    path, content, architecture = source.path, source.values, source.architecture
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        architectures = ", ".join((*FAMILIES, CANVAS))
        raise ModelError(f"{path}: architecture is {cut(architecture)}, expected one of: {architectures}")
    if not settings.random_weights:
        check_plain(source)
    family = FAMILIES[architecture]
    section = FileObject(str(path), "", content, error=ModelError)
    for key, expected in family.fixed.items():
        if section.values.get(key, expected) != expected:
            raise section.error(key, section.values[key], shown(expected))
    values = _values(section, family)
    heads, hidden = values["heads"], values["hidden"]
    values.setdefault("kv_heads", heads)
    values.setdefault("head_dim", hidden // heads)
    _check_block(path, values, settings)
    values["mask_token"] = values["mask_token"] if settings.mask_token is None else settings.mask_token
    vocab, mask = values["vocab"], values["mask_token"]
    if not 0 <= mask < vocab:
        raise ModelError(f"{path}: mask_token_id is {mask}, expected below vocab_size, {vocab}")
    rotary = _rotary(section, values["head_dim"], family.rotary)
    of_experts = {name.partition(".")[2]: values.pop(name) for name in list(values) if name.startswith("experts.")}
    scaling = _scaling(section)
    if scaling is not None and rotary != values["head_dim"]:
        raise ModelError(f"{path}: rope_type is {scaling.kind}, and {rotary} of {values['head_dim']} components turn")
    config = ModelConfig(
        **values,
        name=source.name,
        rotary=None if rotary == values["head_dim"] else rotary,
        scaling=scaling,
        experts=None if family.experts is None else _experts(path, {**family.experts, **of_experts}),
        architecture=architecture,
    )
    eos = dict.fromkeys((*_eos(source), *config.eos))
    return replace(config, eos=tuple(token for token in eos if token < vocab))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None without the file. Raises ModelError."""
    if not os.path.lexists(path):
        return None
    value = read.read_json(path, kind=ModelError)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is {shown(value)}, expected an object")
    return value


def _values(config: FileObject, family: Family) -> dict[str, Any]:
    """Values of our fields, experts' as "experts.NAME"."""
    values: dict[str, Any] = dict(family.defaults)
    rope = FileObject(config.path, "", _rope(config), error=ModelError)
    for field, names in family.keys.items():
        source = rope if field == "rope_theta" else config
        key = config.first(names) if isinstance(names, str) else config.first(*names)
        if source.values.get(key) is None:
            source.values[key] = values.get(field, NUMBERS.get(field, ABSENT.get(field)))
        if field in TRUTHS:
            values[field] = bool(source.values[key])
        elif field in NUMBERS:
            values[field] = source.number(key, ABOVE_0)
        elif not (source.values[key] is None and field in FOLLOW):
            values[field] = source.integer(key, WHOLE.get(field, OTHERS))
    return values | dict(family.trained)


def _experts(path: Path, values: Mapping[str, Any]) -> Experts:
    experts = Experts(**values)
    if experts.top_k > experts.num:
        raise ModelError(f"{path}: num_experts_per_tok is {experts.top_k}, expected at most num_experts, {experts.num}")
    if experts.normed and experts.top_k == 1:  # families differ: some divide the one weight by itself
        raise ModelError(f"{path}: num_experts_per_tok is 1 and norm_topk_prob is true, expected one of them otherwise")
    within = experts.num // experts.groups  # experts of a group
    few = experts.groups > 1 and (within < 2 or experts.top_groups * within < experts.top_k)
    if experts.num % experts.groups or experts.top_groups > experts.groups or few:
        raise ModelError(
            f"{path}: n_group is {experts.groups} and topk_group {experts.top_groups}, expected groups of 2 or more "
            f"of the {experts.num} experts, and as many as {experts.top_k} experts a token need"
        )
    return experts


def _check_block(path: Path, values: dict[str, Any], settings: Settings) -> None:
    """Set the trained block length, config.json's or the user's. Raises ModelError."""
    block = values.get("block_length")
    if settings.block_length is not None and values.get("both_ways"):
        raise ModelError(
            f"{path}: was trained in both directions, and --block-length is {settings.block_length}: expected none, "
            "for the policy's block_length says how far it denoises at a time"
        )
    if block is None and settings.block_length is None:
        raise ModelError(f"{path}: has no block_size, which the checkpoint was trained with: say it (--block-length)")
    if block is not None and settings.block_length not in (None, block):
        raise ModelError(f"{path}: was trained with blocks of {block}, and --block-length is {settings.block_length}")
    values["block_length"] = settings.block_length or block


def _rope(config: FileObject) -> dict[str, Any]:
    """The settings of RoPE, from the file and its tables for it."""
    keys = ("rope_theta", "partial_rotary_factor")
    values = {key: config.values[key] for key in keys if config.values.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if config.values.get(key):
            values |= config.section(key).values
    return values


def _scaling(config: FileObject) -> RopeScaling | None:
    """The scaling of RoPE; None: it is not stretched."""
    settings = {key: value for key, value in _rope(config).items() if value is not None}
    keys = FileObject(config.path, "", {"rope_type": settings.get("type", "default"), **settings}, error=ModelError)
    kind = keys.text("rope_type", "default", *SCALINGS)
    if kind == "default":
        return None
    fast, slow = SCALINGS[kind]
    if settings.get("truncate") is False:
        raise keys.error("truncate", False, "true")
    keys.values |= {fast: 32.0, slow: 1.0, **settings}
    factor, original = (
        keys.number("factor", ABOVE_0),
        keys.integer("original_max_position_embeddings", WHOLE["context_limit"]),
    )
    default = 1.0
    if kind == "yarn":
        wide, narrow = (keys.number(key) if key in settings else 0.0 for key in ("mscale", "mscale_all_dim"))
        weights = (wide, narrow) if wide and narrow else (1.0, 0.0)
        over, under = (0.1 * weight * math.log(max(factor, 1.0)) + 1.0 for weight in weights)
        default = over / under
    keys.values.setdefault("attention_factor", default)
    return RopeScaling(
        kind, factor, original, keys.number(fast, ABOVE_0), keys.number(slow, ABOVE_0),
        keys.number("attention_factor", ABOVE_0) if kind == "yarn" else 1.0,
    )  # fmt: skip


def _rotary(config: FileObject, head_dim: int, default: float) -> int:
    """Components of a head that turn."""
    key = "partial_rotary_factor"
    share = FileObject(config.path, "", {key: default, **_rope(config)}, error=ModelError).number(key, ABOVE_0)
    rotary = int(head_dim * share)
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise config.error(key, share, f"an even number of components of heads of {head_dim}")
    return rotary


def _eos(source: ConfigJson) -> tuple[int, ...]:
    """Both files' EOS tokens, generation_config.json's first."""
    tokens: list[Any] = []
    for keys in (source.generation, source.values):
        ids = keys.get("eos_token_id")
        tokens += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in tokens if isinstance(i, int) and not isinstance(i, bool)))
