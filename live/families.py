"""The checkpoint families that load: names of weights and settings, and how they were trained.

No code of a model's directory runs. Weight names are templates of layer {i} and expert {j}; several names fill one
matrix from top to bottom. Settings in `fixed` would change the arithmetic: other values are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CANVAS = "DiffusionGemmaForBlockDiffusion"  # no Decoder's layers: canvas_model.py
Names = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    names: Names  # our weights -> theirs
    keys: Names  # our fields -> config.json's keys, the first found
    fixed: Mapping[str, Any] = field(default_factory=dict)  # key -> its only value, also if absent
    defaults: Mapping[str, Any] = field(default_factory=dict)  # our fields without a key
    trained: Mapping[str, Any] = field(default_factory=dict)  # our fields, never in config.json
    rotary: float = 1.0  # share of a head that turns, without a key
    experts: Mapping[str, Any] | None = None  # Experts' fields, never in config.json; None: dense


def _names(embedding: str, norm: str, head: str, prefix: str, layer: Names) -> Names:
    """prefix: of a layer's weights."""
    found: Names = {"embedding.weight": embedding, "norm.weight": norm, "head.weight": head}
    for ours, theirs in layer.items():
        found[f"layers.{{i}}.{ours}"] = (
            f"{prefix}.{theirs}" if isinstance(theirs, str) else tuple(f"{prefix}.{part}" for part in theirs)
        )
    return found


MLP: Names = {
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": "mlp.down_proj.weight",
    "experts.router.weight": "mlp.gate.weight",
    "experts.router_bias": "mlp.gate.expert_bias",
    "experts.gate_up": ("mlp.experts.{j}.gate_proj.weight", "mlp.experts.{j}.up_proj.weight"),
    "experts.down": "mlp.experts.{j}.down_proj.weight",
    "experts.shared_gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "experts.shared_down.weight": "mlp.shared_experts.down_proj.weight",
}
QWEN_NAMES = _names(
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.{i}",
    {
        "attention_norm.weight": "input_layernorm.weight",
        "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "q_norm.weight": "self_attn.q_norm.weight",
        "k_norm.weight": "self_attn.k_norm.weight",
        "output.weight": "self_attn.o_proj.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        **MLP,
    },
)  # fmt: skip
LLADA_NAMES = _names(
    "model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight",
    "model.transformer.blocks.{i}",
    {
        "attention_norm.weight": "attn_norm.weight",
        "qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "output.weight": "attn_out.weight",
        "ffn_norm.weight": "ff_norm.weight",
        "gate_up.weight": ("ff_proj.weight", "up_proj.weight"),
        "down.weight": "ff_out.weight",
    },
)  # fmt: skip
LLADA2_NAMES = _names(
    "model.word_embeddings.weight", "model.norm.weight", "lm_head.weight", "model.layers.{i}",
    {
        "attention_norm.weight": "input_layernorm.weight",
        "qkv.weight": "attention.query_key_value.weight",
        "q_norm.weight": "attention.query_layernorm.weight",
        "k_norm.weight": "attention.key_layernorm.weight",
        "output.weight": "attention.dense.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        **MLP,
    },
)  # fmt: skip

KEYS: Names = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context_limit": "max_position_embeddings",
    "block_length": "block_size",
    "mask_token": "mask_token_id",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
LLADA_KEYS: Names = {
    "layers": "n_layers",
    "hidden": "d_model",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffn": "mlp_hidden_size",
    "vocab": ("embedding_size", "vocab_size"),
    "context_limit": "max_sequence_length",
    "mask_token": "mask_token_id",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "weight_tying",
}
EXPERT_KEYS: Names = {
    "experts.num": ("num_experts", "num_local_experts"),
    "experts.top_k": "num_experts_per_tok",
    "experts.ffn": "moe_intermediate_size",
    "experts.normed": "norm_topk_prob",
}
SWIGLU = {"hidden_act": "silu", "use_sliding_window": False}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
SDAR = {"mask_token": 151669}

FROM_LEFT = {k: v for k, v in KEYS.items() if k not in ("block_length", "mask_token")}
AUTOREGRESSIVE: Mapping[str, Any] = {"block_length": 1, "mask_token": 0}
ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # all layers have experts

FAMILIES: Mapping[str, Family] = {
    "Qwen3ForCausalLM": Family(QWEN_NAMES, FROM_LEFT, SWIGLU | NO_BIAS, trained=AUTOREGRESSIVE),
    "Qwen3MoeForCausalLM": Family(
        QWEN_NAMES, FROM_LEFT | EXPERT_KEYS, SWIGLU | NO_BIAS | ALL_LAYERS, {"experts.normed": False},
        trained=AUTOREGRESSIVE, experts={"scoring": "softmax"}
    ),
    "Qwen2ForCausalLM": Family(
        QWEN_NAMES, FROM_LEFT, SWIGLU, trained={**AUTOREGRESSIVE, "qkv_bias": True, "qk_norm": False}
    ),
    "LlamaForCausalLM": Family(QWEN_NAMES, FROM_LEFT, SWIGLU | NO_BIAS, trained={**AUTOREGRESSIVE, "qk_norm": False}),
    "SDARForCausalLM": Family(QWEN_NAMES, KEYS, SWIGLU | NO_BIAS, SDAR),
    "SDARMoeForCausalLM": Family(
        QWEN_NAMES, KEYS | EXPERT_KEYS, SWIGLU | NO_BIAS | ALL_LAYERS, SDAR | {"experts.normed": False},
        experts={"scoring": "softmax"}
    ),
    "LLaDA2MoeModelLM": Family(
        LLADA2_NAMES,
        {
            **KEYS, **EXPERT_KEYS,
            "experts.dense_layers": "first_k_dense_replace", "experts.shared": "num_shared_experts",
            "experts.groups": "n_group", "experts.top_groups": "topk_group", "experts.scale": "routed_scaling_factor",
        },
        SWIGLU | {
            "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        {"mask_token": 156895, "block_length": 32, "eos": (156892,), "experts.normed": True, "experts.scale": 2.5},
        rotary=0.5, experts={"scoring": "sigmoid", "bias": True}
    ),
    "Fast_dLLM_QwenForCausalLM": Family(
        QWEN_NAMES, KEYS | {"block_length": "bd_size"}, SWIGLU,
        {"mask_token": 151665, "block_length": 32, "eos": (151645,)},
        {"qkv_bias": True, "qk_norm": False, "shifted": True}
    ),
    "LLaDAModelLM": Family(
        LLADA_NAMES, LLADA_KEYS,
        {
            "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": False,
            "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False, "input_emb_norm": False,
            "scale_logits": False, "clip_qkv": None,
        },
        {"mask_token": 126336, "rope_theta": 5e5, "norm_eps": 1e-5, "eos": (126081, 126348)},
        {"qk_norm": False, "both_ways": True, "block_length": 32}
    ),
    "DreamModel": Family(
        QWEN_NAMES, {k: v for k, v in KEYS.items() if k != "block_length"}, SWIGLU,
        {"mask_token": 151666, "eos": (151643, 151645)},
        {
            "qkv_bias": True, "qk_norm": False, "shifted": True, "by_entropy": True, "both_ways": True,
            "block_length": 32,
        }
    ),
    "TinyBothWaysLM": Family(
        QWEN_NAMES, {k: v for k, v in KEYS.items() if k != "block_length"}, SWIGLU | NO_BIAS,
        trained={"both_ways": True, "block_length": 32}
    ),
}  # fmt: skip
