"""The values of a checkpoint's config.json, by our fields' names: what all its readers share."""

from collections.abc import Mapping
from typing import Any

from ..engine.plain import Range
from .schema import FileObject

# Our fields and their keys in config.json, the first that is present: Transformers' names, then LLaDA's.
KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "d_model"),
    "heads": ("num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "mlp_hidden_size"),
    "vocab": ("embedding_size", "vocab_size"),
    "context_limit": ("max_position_embeddings", "max_sequence_length"),
    "block_length": ("block_size", "bd_size"),
    "mask_token": ("mask_token_id",),
    "rope_theta": ("rope_theta",),
    "norm_eps": ("rms_norm_eps",),
    "tied": ("tie_word_embeddings", "weight_tying"),
    "experts.num": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts.top_k": ("num_experts_per_tok", "top_k_experts"),
    "experts.ffn": ("moe_intermediate_size", "expert_intermediate_size"),
    "experts.shared": ("num_shared_experts", "n_shared_experts"),
    "experts.dense_layers": ("first_k_dense_replace",),
    "experts.groups": ("n_group",),
    "experts.top_groups": ("topk_group",),
    "experts.scale": ("routed_scaling_factor",),
    "experts.normed": ("norm_topk_prob",),
}
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context_limit")
EXPERTS = ("num", "top_k", "ffn", "shared", "dense_layers")
OPTIONAL = {
    "kv_heads", "head_dim", "block_length", "norm_eps", "experts.shared", "experts.dense_layers", "experts.groups",
    "experts.top_groups", "experts.scale",
}  # fmt: skip
DEFAULTS = {"rope_theta": 1e4, "tied": False, "experts.normed": False}  # Transformers'
# Above the largest models: a larger number is a mistake that takes memory and hours to show.
RANGES = {
    "hidden": Range(1, 1 << 20), "ffn": Range(1, 1 << 20), "experts.ffn": Range(1, 1 << 20),
    "vocab": Range(1, 1 << 24), "mask_token": Range(0, 1 << 24), "context_limit": Range(1, 1 << 30),
    "layers": Range(1, 1 << 10), "experts.num": Range(1, 1 << 10), "experts.shared": Range(0, 1 << 10),
    "experts.dense_layers": Range(0, 1 << 16),
}  # fmt: skip
OTHERS, ABOVE_0 = Range(1, 1 << 16), Range(0, above=True)


def architectures(values: Mapping[str, Any]) -> list[Any]:
    """The architectures that a config.json names."""
    listed = values.get("architectures")
    if isinstance(listed, list):
        return listed
    return []


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's values, with those of its `text_config`."""
    text = values.get("text_config")
    if isinstance(text, dict):
        return {**values, **text}
    return {**values}


def value_of(config: FileObject, field: str) -> Any:
    """A field's value in config.json, by any of its keys; None: absent. An error names the key."""
    key = config.first(*KEYS[field])
    value = config.values.get(key)
    if value is None:
        if field in OPTIONAL or field in DEFAULTS:
            return DEFAULTS.get(field)
        raise config.error(" or ".join(KEYS[field]), None, "a model's dimension")
    if field in ("tied", "experts.normed"):
        return bool(value)
    if field in ("rope_theta", "norm_eps", "experts.scale"):
        return config.number(key, ABOVE_0)
    return config.integer(key, RANGES.get(field, OTHERS))
