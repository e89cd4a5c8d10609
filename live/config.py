"""Read a config.json: the dimensions of any model, and a decoder's by its family."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import ModelError
from ..files import read
from ..files.model_config import ABOVE_0, KEYS, RANGES, architectures, text_values, value_of
from ..files.read import cut, shown
from ..files.schema import FileObject
from .families import CANVAS, FAMILIES, Family
from .hub_cache import in_cache, model_name

QUANTISED = ("quantization_config", "compression_config")
# Stretched RoPE, and its bounds' keys in config.json.
SCALINGS = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("high_freq_factor", "low_freq_factor")}


@dataclass(frozen=True)
class Experts:
    """`num` experts of width `ffn`, `top_k` a token.

    Scores are the router's soft-max or sigmoid, in fp32. With groups, experts come from the `top_groups` whose two best
    scores have the largest sum (DeepSeek-V3, section 2.1.2; LLaDA2.0).
    """

    num: int
    top_k: int
    ffn: int
    shared: int = 0  # experts of every token
    dense_layers: int = 0  # first layers, which are dense
    scoring: str = "softmax"  # or sigmoid
    bias: bool = False  # to choose experts, not to weight them
    groups: int = 1
    top_groups: int = 1
    normed: bool = True  # chosen scores are divided by their sum
    scale: float = 1.0  # ... then multiplied by this

    def params(self, hidden: int) -> int:
        """Parameters of one layer's experts and router."""
        return self.num * (hidden + self.bias) + 3 * hidden * self.ffn * (self.num + self.shared)


@dataclass(frozen=True)
class RopeScaling:
    """RoPE stretched beyond the pretraining context, as in transformers' modeling_rope_utils.

    Components with more than `fast` turns in it keep their angle, those with fewer than `slow` turn `factor` times as
    slowly; between, it is interpolated by index (yarn) or turns (llama3).
    """

    kind: str  # yarn or llama3
    factor: float
    original: int  # positions
    fast: float
    slow: float
    attention: float = 1.0  # multiplies queries and keys


@dataclass(frozen=True)
class ModelConfig:
    """The feed-forward is SwiGLU: three matrices."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of dense layers
    vocab: int
    context_limit: int  # tokens
    block_length: int  # positions decoded together; 1: autoregressive
    mask_token: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = False  # the LM head is the embedding
    qk_norm: bool = True
    qkv_bias: bool = False
    rotary: int | None = None  # leading components of a head that turn; None: all
    scaling: RopeScaling | None = None
    experts: Experts | None = None
    shifted: bool = False  # a row predicts the next position
    by_entropy: bool = False  # steps commit the masks of least entropy (Dream)
    both_ways: bool = False  # full-sequence: positions see each other
    eos: tuple[int, ...] = ()  # tokens that end an answer
    architecture: str = "SDARForCausalLM"  # as in config.json

    @property
    def state_tokens(self) -> int:
        """Tokens whose keys, or values, take one hidden state's memory, rounded up."""
        return -(-self.hidden // (self.kv_heads * self.head_dim))

    @property
    def kv_elements(self) -> int:
        """Numbers in a token's keys and values, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters, norms included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        attention = 2 * self.hidden * (q + kv) + norms + (q + 2 * kv if self.qkv_bias else 0)
        dense, of_experts = self.layers, 0
        if self.experts is not None:
            dense = self.experts.dense_layers
            of_experts = (self.layers - dense) * self.experts.params(self.hidden)
        feed_forward = dense * 3 * self.hidden * self.ffn + of_experts
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * attention + feed_forward + self.hidden + embeddings

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers


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
        return next(iter(architectures(self.values)), None)


def config_json(path: Path) -> ConfigJson:
    """The config.json in a model's folder, or a file of any name. Raises ModelError."""
    file, name = path, path.stem
    if path.is_dir():
        file = path / "config.json"
    folder = file.parent
    values = read_json(file)
    if values is None:
        raise ModelError(f"{folder}: has no config.json")
    if file.name == "config.json":
        name = model_name(folder)
    return ConfigJson(file, values, read_json(folder / "generation_config.json") or {}, cut(values.get("name") or name))


def check_plain(source: ConfigJson) -> None:
    """ModelError if the checkpoint is quantised."""
    for key in QUANTISED:
        if text_values(source.values).get(key):
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
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    _check_block(path, values, settings)
    if settings.mask_token is not None:
        values["mask_token"] = settings.mask_token
    vocab, mask = values["vocab"], values["mask_token"]
    if not 0 <= mask < vocab:
        raise ModelError(f"{path}: mask_token_id is {mask}, expected below vocab_size, {vocab}")
    rotary = _rotary(section, values["head_dim"], family.rotary)
    of_experts = dict(family.experts or {})
    for name in [name for name in values if name.startswith("experts.")]:
        of_experts[name.partition(".")[2]] = values.pop(name)
    scaling = _scaling(section)
    if scaling is not None and rotary != values["head_dim"]:
        raise ModelError(f"{path}: rope_type is {scaling.kind}, and {rotary} of {values['head_dim']} components turn")
    if family.experts is not None:
        values["experts"] = _experts(path, of_experts)
    if rotary != values["head_dim"]:
        values["rotary"] = rotary
    config = ModelConfig(**values, name=source.name, scaling=scaling, architecture=architecture)
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
    values: dict[str, Any] = {**family.defaults, **family.trained}
    rope = FileObject(config.path, "", _rope(config), error=ModelError)
    for field, keys in KEYS.items():
        if field in family.trained or (field.startswith("experts.") and family.experts is None):
            continue
        source = config
        if field == "rope_theta":
            source = rope
        if field in values and source.values.get(source.first(*keys)) is None:
            continue
        value = value_of(source, field)
        if value is not None:
            values[field] = value
    return values


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
        keys.integer("original_max_position_embeddings", RANGES["context_limit"]),
    )
    default = 1.0
    if kind == "yarn":
        keys.values = {"mscale": 0.0, "mscale_all_dim": 0.0, **keys.values}
        wide, narrow = keys.number("mscale"), keys.number("mscale_all_dim")
        if not (wide and narrow):
            wide, narrow = 1.0, 0.0
        over, under = (0.1 * weight * math.log(max(factor, 1.0)) + 1.0 for weight in (wide, narrow))
        default = over / under
    keys.values.setdefault("attention_factor", default)
    attention = 1.0
    if kind == "yarn":
        attention = keys.number("attention_factor", ABOVE_0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original=original,
        fast=keys.number(fast, ABOVE_0),
        slow=keys.number(slow, ABOVE_0),
        attention=attention,
    )


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
        if not isinstance(ids, list):
            ids = [ids]
        tokens += ids
    return tuple(dict.fromkeys(token for token in tokens if type(token) is int))
