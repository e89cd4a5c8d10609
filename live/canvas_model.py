"""DiffusionGemma's layers, which read text causally (encode) and canvases in both directions (denoise).

Sliding layers see a window of the text. Full layers see all of it, with fewer and wider heads whose values are the keys
before their norm. Every layer has a feed-forward and experts. (production-dllm-serving.md 1; the reference is
DiffusionGemmaForBlockDiffusion of transformers.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..engine.errors import ModelError
from ..files.read import cut, parsing
from ..kernels.add_rms_norm import add_rms_norm, sandwich_norm
from ..kernels.device import logits_of
from ..kernels.grouped_experts import grouped_experts
from ..kernels.qk_norm_rope import qk_norm_rope_scatter
from ..kernels.route_experts import route_experts
from ..kernels.swiglu import swiglu
from .config import AS_IT_SAYS, ConfigJson, Settings, check_plain, config_json
from .families import CANVAS
from .model import Pages
from .random_weights import drawn_experts, fill, of_rows
from .stored import alike, stored_tensors

ARCHITECTURE = CANVAS
MOST = 1 << 24  # of any number in a config.json; of layers, 1 << 10
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
    """A layer's weights; matrices of the same input are joined. Norms are fp32.

    Feed-forward, router and experts read one normed tensor: their norms' weights are factors of their matrices.
    """

    qkv: Tensor  # without values where keys are values
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    after_attention: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor
    expert_scale: Tensor
    experts: tuple[Tensor, Tensor]
    after_parts: Tensor  # [2, hidden]: of feed-forward and experts
    after: Tensor
    scales: dict[bool, Tensor]  # by `encode`: the only weight the two passes do not share
    following: Tensor  # the next layer's first norm, or the last norm


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
        self._first = weights["layers.0.input_layernorm.weight"]
        self._ones = torch.ones_like(self._first)
        self._no_weight = self._ones.float()
        self.layers = [_layer(weights, config, i) for i in range(len(config.layers))]

    def encode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> None:
        """Write keys and values of text [rows] at `positions` [rows]."""
        self._layers(self.embedding[tokens] * self._scale, positions, attend, encode=True)

    def denoise(self, tokens: Tensor, signal: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final states [rows, hidden]. signal [rows, hidden]: `signal_of` the last step."""
        x = self.embedding[tokens] * self._scale
        eps, (gate_up, down) = self.config.norm_eps, self._signal
        _, signal = add_rms_norm(signal, None, self._signal_norm, eps)
        _, x = add_rms_norm(x, _fed(signal, gate_up, down), self._ones, eps)
        return self._layers(x, positions, attend, encode=False)

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
        config, eps = self.config, self.config.norm_eps
        column, turns = positions.float()[:, None], dict[bool, tuple[Tensor, Tensor]]()
        for sliding, frequency in self._frequencies.items():
            angle = column * frequency
            turns[sliding] = angle.cos().to(x), angle.sin().to(x)
        _, normed = add_rms_norm(x, None, self._first, eps)
        for i, (kind, layer) in enumerate(zip(config.layers, self.layers, strict=True)):
            qkv = linear(normed, layer.qkv).view(len(x), -1, kind.head_dim)
            q = qk_norm_rope_scatter(
                qkv, config.heads, layer.q_norm, layer.k_norm, eps, *turns[kind.sliding], *attend.pages(i),
                "normed" if kind.sliding else "keys",
            )  # fmt: skip
            read = linear(attend(i, q).view(len(x), -1), layer.out)
            x, normed = sandwich_norm(x, (read,), None, layer.after_attention, None, self._no_weight, eps)
            parts = _fed(normed, layer.gate_up, layer.down), self._mixed(normed, i)
            x, normed = sandwich_norm(
                x, parts, layer.after_parts, layer.after, layer.scales[encode], layer.following, eps
            )  # fmt: skip
        return normed

    def _mixed(self, x: Tensor, i: int) -> Tensor:
        layer = self.layers[i]
        logits = logits_of(x, layer.router)
        if self.drawn is not None:
            logits = of_rows(self.drawn[i], len(x))  # the router is still computed, for its time
        chosen, weights = route_experts(logits, None, self.config.top_k, expert_scale=layer.expert_scale)
        return grouped_experts(x, chosen, weights, *layer.experts, activation="gelu")


def _fed(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return linear(swiglu(linear(x, gate_up), "gelu"), down)


def _gate_up(weights: dict[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([weights.pop(f"{prefix}.{name}_proj.weight") for name in ("gate", "up")])


def _layer(weights: dict[str, Tensor], config: CanvasConfig, i: int) -> _Layer:
    stem, after = f"layers.{i}.", f"layers.{i + 1}.input_layernorm" if i + 1 < len(config.layers) else "norm"
    attention = stem + "self_attn."

    def fp32(*names: str) -> Tensor:
        return torch.stack([weights[f"{stem}{name}.weight"].float() for name in names])

    dense, expert = fp32("pre_feedforward_layernorm", "pre_feedforward_layernorm_2")
    router = weights[stem + "router.scale"].float() * config.hidden**-0.5
    names = "qkv" if config.layers[i].sliding else "qk"
    return _Layer(
        qkv=torch.cat([weights.pop(f"{attention}{name}_proj.weight") for name in names]),
        q_norm=weights[attention + "q_norm.weight"],
        k_norm=weights[attention + "k_norm.weight"],
        out=weights.pop(attention + "o_proj.weight"),
        after_attention=fp32("post_attention_layernorm")[0],
        gate_up=_gate_up(weights, stem + "mlp").mul_(dense),
        down=weights.pop(stem + "mlp.down_proj.weight"),
        router=weights.pop(stem + "router.proj.weight").mul_(router),
        expert_scale=weights[stem + "router.per_expert_scale"].float(),
        experts=(weights.pop(stem + "experts.gate_up_proj").mul_(expert), weights.pop(stem + "experts.down_proj")),
        after_parts=fp32("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
        after=fp32("post_feedforward_layernorm")[0],
        scales={encode: weights[f"{ENCODER if encode else ''}{stem}layer_scalar"].float() for encode in (True, False)},
        following=weights[after + ".weight"].float(),
    )


def frequencies(head_dim: int, theta: float, share: float) -> Tensor:
    """RoPE's angle for each position, [head_dim / 2] in fp32; the first `share` of the pairs turn."""
    turned = int(share * head_dim // 2)
    half = theta ** -(torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim)
    return torch.nn.functional.pad(half, (0, head_dim // 2 - turned))


def canvas_config(source: ConfigJson, settings: Settings = AS_IT_SAYS) -> CanvasConfig:
    """A canvas model's dimensions. Raises ModelError."""
    with parsing(source.path, "a DiffusionGemma's configuration", ModelError):
        return _canvas_config(source, settings)


def _canvas_config(source: ConfigJson, settings: Settings) -> CanvasConfig:
    path, values = source.path, source.values
    if values.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{path}: architectures is {cut(values.get('architectures'))}, expected [{ARCHITECTURE}]")
    text = values.get("text_config") or {}
    if not settings.random_weights:
        check_plain(source)
    for key, expected in (("attention_bias", False), ("hidden_activation", "gelu_pytorch_tanh")):
        if text.get(key, expected) != expected:
            raise ModelError(f"{path}: {key} is {cut(text[key])}, expected {expected}")
    if text.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{path}: use_bidirectional_attention is all, expected the text to be read causally")
    if not (values.get("tie_word_embeddings", True) and text.get("tie_word_embeddings", True)):
        raise ModelError(f"{path}: tie_word_embeddings is False, expected True")

    def size(key: str, default: Any = None, source: Mapping[str, Any] = text) -> int:
        value = source.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{path}: {key} is {cut(value)}, expected a whole number of at least 1")
        if value > MOST:
            raise ModelError(f"{path}: {key} is {cut(value)}, expected at most {MOST}")
        return value

    num, head_dim, kv_heads = size("num_hidden_layers"), size("head_dim"), size("num_key_value_heads")
    if num > 1 << 10:
        raise ModelError(f"{path}: num_hidden_layers is {num}, expected at most {1 << 10}")
    kinds = text.get("layer_types") or ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num)]
    if len(kinds) != num or not {*kinds} <= {"sliding_attention", "full_attention"}:
        contents = f"{len(kinds)} of {cut(sorted({*kinds}))}"
        raise ModelError(f"{path}: layer_types holds {contents}, expected {num} of two kinds")
    layer_configs = text.get("per_layer_config") or {}
    layers = []
    for i, kind in enumerate(kinds):
        sliding = kind == "sliding_attention"
        of_layer = layer_configs.get(str(i), {}) if not sliding else {}
        wide = head_dim if sliding else size("head_dim", text.get("global_head_dim", 512), of_layer)
        of_keys = kv_heads if sliding else size(
            "num_key_value_heads", text.get("num_global_key_value_heads") or kv_heads, of_layer
        )  # fmt: skip
        layers.append(CanvasLayer(sliding, of_keys, wide))
    rope = text.get("rope_parameters") or {}
    turning = {}
    for sliding, kind, theta, share in ((True, "sliding_attention", 1e4, 1.0), (False, "full_attention", 1e6, 0.25)):
        turns = rope.get(kind) or {}
        turning[sliding] = float(turns.get("rope_theta", theta)), float(turns.get("partial_rotary_factor", share))
    ends = source.generation.get("eos_token_id", text.get("eos_token_id"))
    return CanvasConfig(
        name=source.name, layers=tuple(layers), hidden=size("hidden_size"),
        heads=size("num_attention_heads"), ffn=size("intermediate_size"), vocab=size("vocab_size"),
        context_limit=size("max_position_embeddings"), window=size("sliding_window"),
        num_experts=size("num_experts"), top_k=size("top_k_experts"), expert_ffn=size("moe_intermediate_size"),
        canvas_length=size("canvas_length", 256, values), softcap=float(text.get("final_logit_softcapping") or 30.0),
        norm_eps=float(text.get("rms_norm_eps", 1e-6)), rope=turning,
        eos=tuple(token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)),
        renoise=_renoise(source.generation),
    )  # fmt: skip


def _renoise(generation: Mapping[str, Any]) -> Renoise:
    bound = (generation.get("sampler_config") or {}).get("entropy_bound")
    values = {
        "max_steps": generation.get("max_denoising_steps"), "entropy_bound": bound, "t_min": generation.get("t_min"),
        "t_max": generation.get("t_max"), "stability": generation.get("stability_threshold"),
        "confidence": generation.get("confidence_threshold"),
    }  # fmt: skip
    return Renoise(**{key: value for key, value in values.items() if value is not None})


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
            f"{prefix}self_attn.q_proj.weight": (q, hidden), f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q), f"{prefix}self_attn.q_norm.weight": (layer.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (layer.head_dim,), f"{prefix}layer_scalar": (1,),
            f"{ENCODER}{prefix}layer_scalar": (1,), f"{prefix}router.scale": (hidden,),
            f"{prefix}router.per_expert_scale": (config.num_experts,),
            f"{prefix}router.proj.weight": (config.num_experts, hidden),
            f"{prefix}experts.gate_up_proj": (config.num_experts, 2 * wide, hidden),
            f"{prefix}experts.down_proj": (config.num_experts, hidden, wide),
        }  # fmt: skip
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
    expected, weights, origins = shapes(config), dict[str, Tensor](), dict[str, tuple[Path, str]]()
    folder = source.path.parent
    for tensor in stored_tensors(folder, device):
        path, name = tensor.path, tensor.name
        if name.startswith(NOT_TEXT):
            continue
        plain = name.removeprefix(DECODER)
        if name.startswith(ENCODER) and not name.endswith("layer_scalar"):
            plain = name.removeprefix(ENCODER)  # a second copy of the same weight
        elif name == "lm_head.weight":
            plain = "embed_tokens.weight"
        if plain not in expected:
            raise ModelError(f"{path}: holds {cut(name)}, which {config.name} has no place for")
        if tensor.shape != expected[plain]:
            raise ModelError(f"{path}: {name} is {list(tensor.shape)}, expected {list(expected[plain])} by config.json")
        if plain in origins and not alike((path, name), origins[plain]):
            raise ModelError(f"{path}: {name} is not {origins[plain][1]}, and config.json says that it is (tied)")
        origins[plain] = path, name
        weights[plain] = tensor.read().to(dtype)
    lacking = [name for name in expected if name not in origins]
    if lacking:
        raise ModelError(f"{folder}: lacks {lacking[0]} ({len(lacking)} of {len(expected)} weights are missing)")
    return weights
