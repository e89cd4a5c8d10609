"""config.json of published checkpoints that dsim runs with random weights, by name.

Sources: block-diffusion.md 3, production-dllm-serving.md 1.1. SDAR's block of 32 is that of published throughput.
"""

from collections.abc import Mapping
from typing import Any

from .families import CANVAS

Json = Mapping[str, Any]


def _qwen(name: str, architecture: str, layers: int, hidden: int, heads: int, ffn: int, **other: Any) -> Json:
    """Keys as in Qwen's config.json."""
    return {
        "name": name, "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "intermediate_size": ffn, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, **other,
    }  # fmt: skip


_SDAR: Json = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
    "block_size": 32, "mask_token_id": 151669,
}  # fmt: skip
_EXPERTS: Json = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_LLADA2: Json = {
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 157184, "max_position_embeddings": 32768,
    "rope_theta": 600000, "partial_rotary_factor": 0.5, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "score_function": "sigmoid",
}  # fmt: skip

CONFIGS: Mapping[str, Json] = {
    "sdar-1.7b": _qwen(
        "SDAR-1.7B", "SDARForCausalLM", 28, 2048, 16, 6144, **{**_SDAR, "tie_word_embeddings": True}
    ),
    "sdar-4b": _qwen("SDAR-4B", "SDARForCausalLM", 36, 2560, 32, 9728, **_SDAR),
    "sdar-8b": _qwen("SDAR-8B", "SDARForCausalLM", 36, 4096, 32, 12288, **_SDAR),
    "sdar-30b-a3b": _qwen(
        "SDAR-30B-A3B", "SDARMoeForCausalLM", 48, 2048, 32, 6144, **{**_SDAR, **_EXPERTS, "num_key_value_heads": 4}
    ),
    "llada2-mini": _qwen(
        "LLaDA2.0-mini", "LLaDA2MoeModelLM", 20, 2048, 16, 5120, **_LLADA2, moe_intermediate_size=512
    ),
    "llada2-flash": _qwen(
        "LLaDA2.0-flash", "LLaDA2MoeModelLM", 32, 4096, 32, 9216, **_LLADA2, moe_intermediate_size=1024
    ),
    "llada-8b": {
        "name": "LLaDA-8B", "architectures": ["LLaDAModelLM"], "n_layers": 32, "d_model": 4096, "n_heads": 32,
        "n_kv_heads": 32, "mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464,
        "max_sequence_length": 4096, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "weight_tying": False,
    },
    "dream-7b": _qwen(
        "Dream-7B", "DreamModel", 28, 3584, 28, 18944, num_key_value_heads=4, vocab_size=152064,
        max_position_embeddings=131072, mask_token_id=151666,
    ),
    "qwen3-8b": _qwen(
        "Qwen3-8B", "Qwen3ForCausalLM", 36, 4096, 32, 12288, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, eos_token_id=[151645, 151643],
    ),
    "diffusiongemma": {
        "name": "DiffusionGemma-26B-A4B", "architectures": [CANVAS], "canvas_length": 256,
        "text_config": {
            "num_hidden_layers": 30, "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "intermediate_size": 2112,
            "vocab_size": 262144, "max_position_embeddings": 262144, "sliding_window": 1024, "num_experts": 128,
            "top_k_experts": 8, "moe_intermediate_size": 704, "final_logit_softcapping": 30.0, "eos_token_id": [1, 106],
        },
    },
}  # fmt: skip
