"""Shapes of models, and their parameters, FLOPs and bytes.

models.json has the known ones, from public config.json: `others` are checkpoints of the same dimensions.
LLaDA2.0-flash's feed-forward widths are secondary, and match its card's total. LLaDA2.2-mini's are inferred from
LLaDA2.1-mini's, and match the 30.28 GiB that coder543/minnow loads. A dense feed-forward of 2,112 next to
experts of 704, in Gemma 4, counts as three shared experts: 25.2 B parameters, 3.8 B active (production-dllm-serving.md
1.1).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import ProfileError
from ..engine.plain import Positive, Range
from ..files.model_config import EXPERTS, FULL, KEYS, SHAPE, SLIDING, architectures, attention_of, text_values, value_of
from ..files.read import cut, did_you_mean, read_json
from ..files.schema import FileObject, read_as

BYTES = 2  # of a parameter or a KV element, in bf16


@dataclass(frozen=True)
class BlockRouting:
    """Tokens choose among the `experts` that their block of `block_length` tokens admits (LLaDA2.2)."""

    experts: Positive
    block_length: Positive


@dataclass(frozen=True)
class Experts:
    """`num` routed experts of width `ffn`, `top_k` a token, and `shared` ones for every token."""

    num: Positive
    top_k: Positive
    shared: int
    ffn: Positive
    dense_layers: int  # the first layers, with a dense feed-forward
    by_block: BlockRouting | None = None  # None: each token chooses among all


@dataclass(frozen=True)
class Windowed:
    """Layers whose queries see only the last `window` tokens."""

    layers: Positive  # of the model's
    kv_heads: Positive
    head_dim: Positive
    window: Positive  # tokens


@dataclass(frozen=True)
class ModelShape:
    """A transformer's dimensions as in config.json, with a SwiGLU feed-forward (three matrices).

    With windowed layers, `kv_heads` and `head_dim` are the other layers'.
    """

    name: str
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive  # of the dense layers
    vocab: Positive
    context_limit: Positive  # tokens
    tied: bool = False  # the LM head shares the embedding
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: Experts | None = None
    windowed: Windowed | None = None
    value_is_key: bool = False  # without a window, one matrix for keys and values

    @property
    def full_layers(self) -> int:
        """Layers that see all earlier tokens."""
        if self.windowed is None:
            return self.layers
        return self.layers - self.windowed.layers

    def window_bytes_on(self, count: int) -> int:
        """Windowed layers' KV bytes per token over `count` GPUs, each with at least one head."""
        w = self.windowed
        if w is None:
            return 0
        return 2 * BYTES * w.layers * w.kv_heads * w.head_dim * max(1, count // w.kv_heads)

    @property
    def state_tokens(self) -> int:
        """A hidden state's size in a token's keys (or values)."""
        return -(-self.hidden // (self.kv_heads * self.head_dim))

    @property
    def total_params(self) -> int:
        """Parameters, norms included."""
        return layer_params(self) + embedding_params(self)

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.total_params

    @property
    def early(self) -> float:
        """The layers' work before an eviction, as a share: one layer and the next one's QKV (focus.md 3.2)."""
        all_layers = layer_params(self, active=True)
        projections = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        return min(1.0, 1 / self.layers + projections / all_layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of a token in layers without a window."""
        return 2 * BYTES * self.full_layers * self.kv_heads * self.head_dim


def attention_params(m: ModelShape) -> int:
    """Attention's parameters in all layers: four projections, biases and head norms if any."""
    params = m.full_layers * _attention_params(m, m.kv_heads, m.head_dim, 2 - m.value_is_key)
    if m.windowed is not None:
        params += m.windowed.layers * _attention_params(m, m.windowed.kv_heads, m.windowed.head_dim, 2)
    return params


def _attention_params(m: ModelShape, kv_heads: int, head_dim: int, matrices: int) -> int:
    q, kv = m.heads * head_dim, kv_heads * head_dim
    return m.hidden * (2 * q + matrices * kv) + m.qkv_bias * (q + 2 * kv) + m.qk_norm * 2 * head_dim


def layer_params(m: ModelShape, active: bool = False) -> int:
    """Parameters without the embeddings; active: only those that one token is multiplied with."""
    shared = attention_params(m) + 2 * m.layers * m.hidden + m.hidden
    return shared + _feed_forward_params(m, active)


def expert_params(m: ModelShape) -> int:
    """Parameters in all routed experts; a step reads the experts of its tokens only."""
    if m.experts is None:
        return 0
    return (m.layers - m.experts.dense_layers) * m.experts.num * 3 * m.hidden * m.experts.ffn


def head_params(m: ModelShape) -> int:
    return m.vocab * m.hidden


def embedding_params(m: ModelShape) -> int:
    """Parameters of embedding and LM head; of one if tied."""
    return head_params(m) * (2 - m.tied)


def flops_per_token(m: ModelShape) -> int:
    """FLOPs of the layers' matrices, without attention scores and LM head."""
    return 2 * layer_params(m, active=True)


def head_flops(m: ModelShape) -> int:
    """FLOPs of the LM head for one row."""
    return 2 * head_params(m)


def attention_flops(m: ModelShape) -> int:
    """FLOPs of one query-key pair in layers without a window: scores and weighted sum."""
    return 4 * m.heads * m.head_dim * m.full_layers


def window_flops(m: ModelShape) -> int:
    """The same in windowed layers."""
    if m.windowed is None:
        return 0
    return 4 * m.heads * m.windowed.head_dim * m.windowed.layers


def touched_experts(m: ModelShape, tokens: float) -> float:
    """Expected share of routed experts that `tokens` reach, each picking top_k at random.

    Routed by block, each block of tokens, the first one even if it is not full, reaches what it admits.
    """
    if m.experts is None:
        return 0.0
    picks, times = m.experts.top_k, tokens
    if m.experts.by_block is not None:
        picks, times = m.experts.by_block.experts, max(1.0, tokens / m.experts.by_block.block_length)
    return float(1.0 - (1.0 - picks / m.experts.num) ** times)


def known_model(name: str) -> ModelShape | None:
    """Of a checkpoint's name, owner and provider optional, as in an engine's or a gateway's log."""
    plain = _plain(name)
    return next((s for base, s in _BY_NAME.items() if plain == base or plain.startswith(f"{base}-")), None)


def _plain(name: str) -> str:
    return name.lower().rstrip("/").rsplit("/", 1)[-1]


def model(name: str) -> ModelShape:
    """The shape of a known model, a Hugging Face checkpoint name (owner optional), or a config.json.

    ProfileError lists the known names.
    """
    if name.endswith(".json") or os.path.isfile(os.path.join(name, "config.json")):
        return read_shape(name)
    if (shape := known_model(name)) is not None:
        return shape
    if _plain(name).startswith(UNPUBLISHED):
        raise ProfileError(f"the dimensions of {cut(name)} are not published: expected its config.json")
    hint = did_you_mean(_plain(name), MODELS)
    raise ProfileError(
        f"no model is named {cut(name)}{hint}; the known ones are {', '.join(MODELS)}, and a Hugging Face config.json"
    )


def read_shape(path: str | Path) -> ModelShape:
    """The shape in a config.json or its folder, which names it if the file does not. Raises ProfileError."""
    path = config_path(path)
    # It is used in messages and file names.
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    return shape_by_config(FileObject(str(path), "", read_json(path, kind=ProfileError), error=ProfileError), name)


def shape_by_config(section: FileObject, name: str) -> ModelShape:
    """The shape by a config.json's values; ProfileError names missing keys, and what no term prices.

    Its name is `_name_or_path` without the owner, or `name`.
    """
    kind = _architecture(section.values)
    keys = section.values = text_values(section.values)
    for key in UNPRICED:
        if keys.get(key):
            raise section.error(key, keys[key], "none: a model whose attention reads keys and values of heads")
    values: dict[str, Any] = {field: value_of(section, field) for field in SHAPE}
    values |= attention_of(section, FULL)
    label = keys.get("_name_or_path") or keys.get("name")
    if isinstance(label, str):
        name = Path(label).name or name
    bias = any(bool(keys.get(key)) for key in ("attention_bias", "qkv_bias", "use_qkv_bias", "include_qkv_bias"))
    return ModelShape(
        name=cut(name),
        tied=bool(keys.get("tie_word_embeddings", keys.get("weight_tying", "Gemma" in kind))),
        qk_norm=bool(keys.get("use_qk_norm", any(word in kind for word in NORMED))),
        qkv_bias=bias or any(word in kind for word in ("Qwen2", "Dream")),
        experts=_experts(section, values, kind),
        windowed=_windowed(section, values),
        value_is_key=bool(keys.get("attention_k_eq_v", "DiffusionGemma" in kind)),
        **values,
    )


def family(m: ModelShape, architecture: str = "") -> str:
    """How a model generates, by its name or its config.json's architecture."""
    if m.name.startswith(("SDAR", "LLaDA2")) or any(word in architecture for word in ("SDAR", "LLaDA2", "Fast_dLLM")):
        return "block-diffusion"
    if m.name.startswith("DiffusionGemma") or "DiffusionGemma" in architecture:
        return "canvas"
    if any(word in architecture for word in ("LLaDA", "Dream", "BothWays")):
        return "full-sequence"
    if architecture or m.name.startswith(("Qwen", "Gemma")):
        return "autoregressive"
    return "full-sequence"


def architecture_of(name: str) -> str:
    """The config.json's architecture keys; empty for a known model's name."""
    path = config_path(name)
    if not path.is_file():
        return ""
    return _architecture(read_json(path, kind=ProfileError))


def config_path(name: str | Path) -> Path:
    """The config.json of a folder, or the file itself; a known model's name is none."""
    if Path(name).is_dir():
        return Path(name, "config.json")
    return Path(name)


def _architecture(keys: Mapping[str, Any]) -> str:
    return str(next(iter(architectures(keys)), keys.get("model_type", "")))


# Architectures that norm queries and keys without a key of their own.
NORMED = ("Qwen3", "SDAR", "Gemma3", "Gemma4", "DiffusionGemma")
# Latent keys and values, sparse attention and state-space layers.
UNPRICED = ("kv_lora_rank", "index_topk", "attention_chunk_size", "mamba_d_state", "linear_num_key_heads")
PRICED = (FULL, SLIDING)  # layers


def _experts(config: FileObject, values: Mapping[str, int], kind: str) -> Experts | None:
    keys = config.values
    if not keys.get(config.first(*KEYS["experts.num"])):
        return None
    sizes: dict[str, Any] = {name: value_of(config, f"experts.{name}") or 0 for name in EXPERTS}
    experts = Experts(**sizes)
    if experts.top_k > experts.num:
        raise config.error("num_experts_per_tok", experts.top_k, f"at most {experts.num} experts")
    if keys.get("expert_capacity") and "LLaDA2" in kind:  # SGLang's dllm/config.py
        admitted = config.integer("expert_capacity", Range(experts.top_k, experts.num))
        experts = replace(experts, by_block=BlockRouting(admitted, config.integer("block_size", Range(1, 1 << 16))))
    if keys.get("enable_moe_block", "DiffusionGemma" in kind):  # a dense feed-forward beside the routed ones
        experts = replace(experts, shared=values["ffn"] // experts.ffn)
    step, mlp_layers, routing = 1, keys.get("mlp_only_layers") or [], keys.get("moe_layer_freq")
    if keys.get("decoder_sparse_step"):
        step = config.integer("decoder_sparse_step")
    dense = {i for i in range(values["layers"]) if (i + 1) % step or i in mlp_layers or i < experts.dense_layers}
    if isinstance(routing, list):
        dense |= {i for i, routed in enumerate(routing) if not routed}
    return replace(experts, dense_layers=len(dense))


def _windowed(config: FileObject, values: Mapping[str, int]) -> Windowed | None:
    """The layers with a window, by their list of kinds or by the distance between the others; None: all see all."""
    keys, num = config.values, values["layers"]
    kinds = config.get("layer_types", list[str] | None) or []
    for kind in kinds:
        if kind not in PRICED:
            raise config.error("layer_types", kind, f"{' and '.join(PRICED)}: other layers are not priced")
    if keys.get("sliding_window") is None or not keys.get("use_sliding_window", True):
        return None
    window = config.integer("sliding_window", Range(1))
    if window >= values["context_limit"]:
        return None
    if kinds:
        num = kinds.count(SLIDING)
    elif keys.get("sliding_window_pattern"):
        num -= num // config.integer("sliding_window_pattern", Range(1))
    if num >= values["layers"]:
        raise config.error(
            "sliding_window", window, "layers without a window, too: layer_types or a pattern names them"
        )
    if num == 0:
        return None
    return Windowed(layers=num, window=window, **attention_of(config, SLIDING))


def _feed_forward_params(m: ModelShape, active: bool) -> int:
    if m.experts is None:
        return m.layers * 3 * m.hidden * m.ffn
    e = m.experts
    routed = e.num
    if active:
        routed = e.top_k
    sparse_layer = (routed + e.shared) * 3 * m.hidden * e.ffn + m.hidden * e.num  # + router
    return e.dense_layers * 3 * m.hidden * m.ffn + (m.layers - e.dense_layers) * sparse_layer


_ROWS = read_json(Path(__file__).with_name("models.json"))
MODELS: dict[str, ModelShape] = {
    row["shape"]["name"]: read_as(
        ModelShape, "models.json", "", row["shape"] | {key: row[key] for key in ("experts", "windowed") if key in row}
    )
    for row in _ROWS
}
# On Hugging Face. SDAR and LLaDA2 are trained for one block length, here 32.
CHECKPOINTS: dict[str, str] = dict(zip(MODELS, (row["checkpoint"] for row in _ROWS), strict=True))
# Models whose config.json was not read, with the model whose dimensions are assumed.
INFERRED: dict[str, str] = {row["shape"]["name"]: row["inferred"] for row in _ROWS if "inferred" in row}
UNPUBLISHED = ("llada-moe-v2",)
_BY_NAME = {
    other.lower(): m for m, row in zip(MODELS.values(), _ROWS, strict=True) for other in (m.name, *row["others"])
}
