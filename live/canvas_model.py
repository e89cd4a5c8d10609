"""DiffusionGemma's layers, which read text causally (encode) and canvases in both directions (denoise).

Sliding layers see a window of the text. Full layers see all of it, with fewer and wider heads whose values are the keys
before their norm. Every layer has a feed-forward and experts. (production-dllm-serving.md 1; the reference is
DiffusionGemmaForBlockDiffusion of transformers.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from ..engine.errors import ModelError
from ..engine.plain import Range
from ..files.model_config import FULL, SLIDING, attention_of, value_of
from ..files.read import cut, parsing
from ..files.schema import FileObject
from ..kernels.device import logits_of
from ..kernels.grouped_experts import gated, grouped_experts
from ..kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope
from .config import AS_IT_SAYS, ConfigJson, Experts, Settings, check_plain, config_json
from .families import CANVAS
from .model import route
from .random_weights import drawn_experts, fill, of_rows
from .tensors import stored_tensors

ARCHITECTURE = CANVAS
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
NOT_TEXT = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")  # pictures are not served


@dataclass(frozen=True)
class CanvasLayer:
    sliding: bool
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Renoise:
    """How a canvas is denoised, by the checkpoint's defaults (production-dllm-serving.md 1.2)."""

    max_steps: int = 48
    entropy_bound: float = 0.1  # nats; bounds the accepted positions' sum without the last
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1  # earlier steps that must have the same likeliest tokens
    confidence: float = 0.005  # nats; a finished canvas's mean entropy is lower


@dataclass(frozen=True)
class CanvasConfig:
    name: str
    layers: tuple[CanvasLayer, ...]
    hidden: int
    heads: int
    ffn: int
    vocab: int
    context_limit: int  # tokens
    window: int  # keys of text that a sliding layer's query sees, with its own
    num_experts: int
    top_k: int
    expert_ffn: int
    canvas_length: int
    softcap: float
    norm_eps: float
    rope: Mapping[bool, tuple[float, float]]  # by `sliding`: theta, and the share of components that turn
    eos: tuple[int, ...]
    renoise: Renoise

    @property
    def mask_token(self) -> int | None:
        """None: a canvas begins as noise."""
        return None

    @property
    def block_length(self) -> int:
        return self.canvas_length

    @property
    def state_tokens(self) -> int:
        """1, the least value: a token has no state but keys and values."""
        return 1

    def kv_elements(self, sliding: bool) -> int:
        """Numbers in a token's keys and values, in layers of one kind."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.layers if layer.sliding == sliding)


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer's weights; matrices of the same input are joined.

    Feed-forward, router and experts read one normed tensor: their norms' weights are factors of their matrices.
    """

    before: Tensor
    qkv: Tensor  # without values where keys are values
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    after_attention: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor
    expert_scale: Tensor  # fp32
    experts: tuple[Tensor, Tensor]
    after_fed: Tensor
    after_experts: Tensor
    after: Tensor
    scales: dict[bool, Tensor]  # by `encode`: the only weight the two passes do not share


class Attend(Protocol):
    def pages(self, layer: int) -> Pages:
        """Where a layer's keys and values are written before its queries read."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, heads, head_dim] to the same."""


class CanvasModel:
    """The weights, and passes over rows of any sequences."""

    def __init__(self, config: CanvasConfig, weights: dict[str, Tensor]) -> None:
        """weights: by checkpoint name; removed from it, so that no matrix is held twice."""
        self.config = config
        self.drawn: list[Tensor] | None = None  # by layer and row, in place of the router's logits
        self.embedding = weights["embed_tokens.weight"]
        self._scale = torch.tensor(config.hidden**0.5).to(self.embedding)
        self._signal_norm = weights["self_conditioning.pre_norm.weight"]
        self._signal = _gate_up(weights, "self_conditioning"), weights["self_conditioning.down_proj.weight"]
        self._frequencies = {
            layer.sliding: frequencies(layer.head_dim, *config.rope[layer.sliding]).to(self.embedding.device)
            for layer in config.layers
        }
        self._last = weights["norm.weight"]
        self._experts = Experts(config.num_experts, config.top_k, config.expert_ffn)
        self.layers = [_layer(weights, config, i) for i in range(len(config.layers))]

    def encode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> None:
        """Write keys and values of text [rows] at `positions` [rows]."""
        self._layers(self.embedding[tokens] * self._scale, positions, attend, encode=True)

    def denoise(self, tokens: Tensor, signal: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final states [rows, hidden]. signal [rows, hidden]: `signal_of` the last step."""
        gate_up, down = self._signal
        x = self.embedding[tokens] * self._scale + _fed(self._normed(signal, self._signal_norm), gate_up, down)
        return self._layers(self._normed(x), positions, attend, encode=False)

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)

    def signal_of(self, probabilities: Tensor) -> Tensor:
        """The next step's signal, [rows, hidden], from probabilities [rows, vocab] in the model's dtype."""
        return (probabilities @ self.embedding) * self._scale

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in the model's dtype, not soft-capped."""
        return hidden @ self.embedding.T

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in fp32, soft-capped."""
        cap = self.config.softcap
        return (self.raw_logits(hidden).float() / cap).tanh() * cap

    def experts(self) -> tuple[Tensor, Tensor]:
        """The first layer's experts: gate and up in one matrix, and `down`."""
        return self.layers[0].experts

    def _layers(self, x: Tensor, positions: Tensor, attend: Attend, encode: bool) -> Tensor:
        column, turns = positions.float()[:, None], dict[bool, Turns]()
        for sliding, frequency in self._frequencies.items():
            angle = column * frequency
            turns[sliding] = Turns(angle.cos().to(x), angle.sin().to(x))
        for i, (kind, layer) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            qkv = linear(self._normed(x, layer.before), layer.qkv).view(len(x), -1, kind.head_dim)
            norms = Norms(layer.q_norm, layer.k_norm, self.config.norm_eps)
            values = self._normed(qkv[:, -kind.kv_heads :])
            if kind.sliding:
                qkv[:, -kind.kv_heads :] = values
            else:  # the keys before their norm are the values
                qkv = torch.cat([qkv, values], dim=1)
            q = qk_norm_rope(qkv, self.config.heads, norms, turns[kind.sliding], attend.pages(i))
            x = x + self._normed(linear(attend(i, q).view(len(x), -1), layer.out), layer.after_attention)
            normed = self._normed(x)
            fed = self._normed(_fed(normed, layer.gate_up, layer.down), layer.after_fed)
            mixed = self._normed(self._mixed(normed, i), layer.after_experts)
            x = (x + self._normed(fed + mixed, layer.after)) * layer.scales[encode]
        return self._normed(x, self._last)

    def _mixed(self, x: Tensor, i: int) -> Tensor:
        layer = self.layers[i]
        logits = logits_of(x, layer.router)
        if self.drawn is not None:
            logits = of_rows(self.drawn[i], len(x))  # the router is still computed, for its time
        chosen, weights = route(logits, self._experts, expert_scale=layer.expert_scale)
        return grouped_experts(x, chosen, weights, *layer.experts, activation="gelu")


def _fed(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return linear(gated(linear(x, gate_up), "gelu"), down)


def _gate_up(weights: dict[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([weights.pop(f"{prefix}.{name}_proj.weight") for name in ("gate", "up")])


def _layer(weights: dict[str, Tensor], config: CanvasConfig, i: int) -> _Layer:
    stem = f"layers.{i}."
    attention = stem + "self_attn."

    def norm(name: str) -> Tensor:
        return weights[f"{stem}{name}.weight"]

    router = weights[stem + "router.scale"].float() * config.hidden**-0.5
    expert = norm("pre_feedforward_layernorm_2").float()
    names = "qkv" if config.layers[i].sliding else "qk"
    return _Layer(
        before=norm("input_layernorm"),
        qkv=torch.cat([weights.pop(f"{attention}{name}_proj.weight") for name in names]),
        q_norm=weights[attention + "q_norm.weight"],
        k_norm=weights[attention + "k_norm.weight"],
        out=weights.pop(attention + "o_proj.weight"),
        after_attention=norm("post_attention_layernorm"),
        gate_up=_gate_up(weights, stem + "mlp").mul_(norm("pre_feedforward_layernorm").float()),
        down=weights.pop(stem + "mlp.down_proj.weight"),
        router=weights.pop(stem + "router.proj.weight").mul_(router),
        expert_scale=weights[stem + "router.per_expert_scale"].float(),
        experts=(weights.pop(stem + "experts.gate_up_proj").mul_(expert), weights.pop(stem + "experts.down_proj")),
        after_fed=norm("post_feedforward_layernorm_1"),
        after_experts=norm("post_feedforward_layernorm_2"),
        after=norm("post_feedforward_layernorm"),
        scales={encode: weights[f"{ENCODER if encode else ''}{stem}layer_scalar"] for encode in (True, False)},
    )


def frequencies(head_dim: int, theta: float, share: float) -> Tensor:
    """RoPE's angle for each position, [head_dim / 2] in fp32; the first `share` of the pairs turn."""
    turned = int(share * head_dim // 2)
    half = theta ** -(torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim)
    return torch.nn.functional.pad(half, (0, head_dim // 2 - turned))


# config.json's defaults, as transformers has them.
DEFAULTS = {"final_logit_softcapping": 30.0, "global_head_dim": 512, "rms_norm_eps": 1e-6, "rope_parameters": {}}
SIZE = Range(1, 1 << 24)
# CanvasConfig's fields and those of files/model_config.py.
DIMENSIONS = {
    **{name: name for name in ("hidden", "heads", "ffn", "vocab", "context_limit", "norm_eps")},
    "num_experts": "experts.num",
    "top_k": "experts.top_k",
    "expert_ffn": "experts.ffn",
}


def canvas_config(source: ConfigJson, settings: Settings = AS_IT_SAYS) -> CanvasConfig:
    """A canvas model's dimensions. Raises ModelError."""
    with parsing(source.path, "a DiffusionGemma's configuration", ModelError):
        return _canvas_config(source, settings)


def _canvas_config(source: ConfigJson, settings: Settings) -> CanvasConfig:
    path = str(source.path)
    if source.values.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{path}: architectures is {cut(source.values.get('architectures'))}, expected {ARCHITECTURE}")
    if not settings.random_weights:
        check_plain(source)
    values = FileObject(path, "", {"canvas_length": 256, "text_config": {}, **source.values}, error=ModelError)
    plain = {key: value for key, value in values.section("text_config").values.items() if value is not None}
    text = FileObject(path, "text_config", {**DEFAULTS, **plain}, error=ModelError)
    num = value_of(text, "layers")
    kinds = plain.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(num)]
    if len(kinds) != num or not {*kinds} <= {SLIDING, FULL}:
        raise text.error("layer_types", kinds, f"{num} of {SLIDING} and {FULL}")
    text.values["layer_types"] = kinds
    for key in ("num_key_value_heads", "head_dim"):
        text.integer(key, SIZE)
    layers = {kind: CanvasLayer(kind == SLIDING, **attention_of(text, kind)) for kind in (SLIDING, FULL)}
    rope = {}
    for kind, theta, share in ((SLIDING, 1e4, 1.0), (FULL, 1e6, 0.25)):
        turns = {"rope_theta": theta, "partial_rotary_factor": share} | text.values["rope_parameters"].get(kind, {})
        rope[kind == SLIDING] = float(turns["rope_theta"]), float(turns["partial_rotary_factor"])
    ends = source.generation.get("eos_token_id", plain.get("eos_token_id"))
    if not isinstance(ends, list):
        ends = [ends]
    stated = {**source.generation, **(source.generation.get("sampler_config") or {})}
    return CanvasConfig(
        name=source.name,
        layers=tuple(layers[kind] for kind in kinds),
        **{name: value_of(text, field) for name, field in DIMENSIONS.items()},
        window=text.integer("sliding_window", SIZE),
        canvas_length=values.integer("canvas_length", SIZE),
        softcap=text.number("final_logit_softcapping"),
        rope=rope,
        eos=tuple(token for token in ends if isinstance(token, int)),
        renoise=Renoise(**{ours: stated[key] for key, ours in RENOISE.items() if stated.get(key) is not None}),
    )


RENOISE = {
    "max_denoising_steps": "max_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "stability_threshold": "stability",
    "confidence_threshold": "confidence",
    "entropy_bound": "entropy_bound",  # of the sampler
}


def shapes(config: CanvasConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the text weights, by their names after `model.decoder.`."""
    hidden, wide = config.hidden, config.expert_ffn

    def gated(prefix: str) -> dict[str, tuple[int, ...]]:
        pair: dict[str, tuple[int, ...]] = {f"{prefix}.{x}_proj.weight": (config.ffn, hidden) for x in ("gate", "up")}
        return pair | {f"{prefix}.down_proj.weight": (hidden, config.ffn)}

    by_name: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab, hidden), "norm.weight": (hidden,)}
    by_name |= gated("self_conditioning") | {"self_conditioning.pre_norm.weight": (hidden,)}
    for i, layer in enumerate(config.layers):
        prefix, q, kv = f"layers.{i}.", config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += [f"{x}_feedforward_layernorm" for x in ("pre", "post")]
        norms += [f"{x}_feedforward_layernorm_{n}" for x, n in (("post", 1), ("post", 2), ("pre", 2))]
        by_name |= {f"{prefix}{name}.weight": (hidden,) for name in norms} | gated(prefix + "mlp")
        by_name |= {
            f"{prefix}self_attn.q_proj.weight": (q, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q),
            f"{prefix}self_attn.q_norm.weight": (layer.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (layer.head_dim,),
            f"{prefix}layer_scalar": (1,),
            f"{ENCODER}{prefix}layer_scalar": (1,),
            f"{prefix}router.scale": (hidden,),
            f"{prefix}router.per_expert_scale": (config.num_experts,),
            f"{prefix}router.proj.weight": (config.num_experts, hidden),
            f"{prefix}experts.gate_up_proj": (config.num_experts, 2 * wide, hidden),
            f"{prefix}experts.down_proj": (config.num_experts, hidden, wide),
        }
        if layer.sliding:
            by_name[f"{prefix}self_attn.v_proj.weight"] = (kv, hidden)
    return by_name


def num_params(config: CanvasConfig) -> int:
    return sum(math.prod(shape) for shape in shapes(config).values())


def random_canvas_model(
    source: ConfigJson, device: str, dtype: torch.dtype, seed: int = 0, settings: Settings = AS_IT_SAYS
) -> CanvasModel:
    """A model with random weights, whose rows draw their experts."""
    config = canvas_config(source, settings)
    generator, weights = torch.Generator(device=device).manual_seed(seed), {}
    for name, shape in shapes(config).items():
        weights[name] = torch.empty(shape, dtype=dtype, device=device)
        fill(weights[name], name, len(config.layers), generator)
    model = CanvasModel(config, weights)
    model.drawn = drawn_experts(config.num_experts, len(config.layers), seed, device)
    return model


def read_canvas_model(folder: Path, device: str, dtype: torch.dtype) -> CanvasModel:
    """Read a model without its vision part. Raises ModelError."""
    source = config_json(folder)
    config = canvas_config(source)
    return CanvasModel(config, _read(source, config, device, dtype))


def _read(source: ConfigJson, config: CanvasConfig, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The text weights by our names."""
    expected, weights, folder = shapes(config), dict[str, Tensor](), source.path.parent
    for path, name, shape, read in stored_tensors(folder, device):
        plain = name.removeprefix(DECODER)
        if name.startswith(ENCODER) and not name.endswith("layer_scalar"):
            plain = name.removeprefix(ENCODER)  # a second copy of the same weight
        if name.startswith(NOT_TEXT) or name == "lm_head.weight":  # the head is the embedding
            continue
        if plain not in expected:
            raise ModelError(f"{path}: holds {cut(name)}, which {config.name} has no place for")
        if shape != expected[plain]:
            raise ModelError(f"{path}: {name} is {list(shape)}, expected {list(expected[plain])} by config.json")
        weights[plain] = read().to(dtype)
    lacking = [name for name in expected if name not in weights]
    if lacking:
        raise ModelError(f"{folder}: lacks {lacking[0]} ({len(lacking)} of {len(expected)} weights are missing)")
    return weights
