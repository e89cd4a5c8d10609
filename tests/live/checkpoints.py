"""Tiny checkpoints of every family, with random weights, and what an independent plain implementation says of them.

A family's arithmetic is transformers' own class where it has one, whose weights are renamed to the family's; LLaDA2's
is written out below. What a position sees is a mask that the caller gives.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Logits = Callable[[Tensor, Tensor], Tensor]  # token ids [n] and who sees whom [n, n] to logits [n, vocab]

VOCAB, LENGTH = 97, 64
SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 80, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6,
}  # fmt: skip
Sizes = Mapping[str, Any]


def drawn(seed: int) -> Sizes:
    """Other layers, heads and widths."""
    chance = random.Random(seed)
    kv, head_dim = chance.choice((1, 2, 3)), chance.choice((8, 16, 20))
    heads = kv * chance.choice((1, 2, 3))
    return SIZES | {
        "hidden_size": heads * head_dim, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim,
        "num_hidden_layers": chance.choice((2, 4)), "intermediate_size": 8 * chance.randint(3, 15),
    }  # fmt: skip


def shaken(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """No norm of one and no bias of nought, which would hide that it is left out."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def of_transformers(model: Any) -> Logits:
    """A causal language model's logits under another mask."""

    def logits(tokens: Tensor, seen: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, len(tokens), len(tokens)).masked_fill(~seen, float("-inf"))
        with torch.no_grad():
            return model(input_ids=tokens[None], attention_mask=mask).logits[0]

    return logits


def rewrite(folder: Path, **values: Any) -> None:
    """Change keys of a config.json; None takes one out."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def save_shards(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A checkpoint in several files, its index, and its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    where = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = {name: tensors[name].contiguous() for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))


def of_library(
    folder: Path, sizes: Sizes = SIZES, *, kind: str, seed: int, said: Mapping[str, Any] | None = None, **more: Any
) -> Logits:
    """A model of transformers, which saves itself in shards; `said`: what its config.json says beyond that."""
    import transformers

    if kind == "Qwen2":  # whose heads are as wide as the width over their number
        sizes = {key: value for key, value in sizes.items() if key != "head_dim"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **{"rope_theta": 1e4} | more)
    model: Any = shaken(getattr(transformers, f"{kind}ForCausalLM")(config), seed)
    model.save_pretrained(folder, max_shard_size="10KB", safe_serialization=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    rewrite(folder, **said or {})
    return of_transformers(model)


EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# llama3's angles: some components turn as before, some more slowly, and one between.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MASKED = {"block_size": 4, "mask_token_id": 96}
qwen3 = partial(of_library, kind="Qwen3", seed=1)
qwen3_moe = partial(of_library, kind="Qwen3Moe", seed=2, **EXPERTS)
qwen2 = partial(of_library, kind="Qwen2", seed=3)
llama = partial(of_library, kind="Llama", seed=7, rope_parameters=LLAMA3)
qwen3_yarn = partial(qwen3, rope_parameters=YARN)
sdar = partial(qwen3, said={"architectures": ["SDARForCausalLM"], **MASKED})
sdar_moe = partial(qwen3_moe, said={"architectures": ["SDARMoeForCausalLM"], **MASKED})
dream = partial(qwen2, said={"architectures": ["DreamModel"], "mask_token_id": 95, "eos_token_id": 94})


def llada(folder: Path, sizes: Sizes = SIZES) -> Logits:
    """LLaDA's block is LLaMA's: its weights under OLMo's names."""
    import transformers

    heads = sizes["num_attention_heads"]
    sizes = {**sizes, "num_key_value_heads": heads, "rms_norm_eps": 1e-5}
    model = shaken(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_theta=5e5)), 5)
    theirs = {
        "model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out", "model.layers": "blocks",
        "self_attn.o_proj": "attn_out", "self_attn.": "", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }  # fmt: skip
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in theirs.items():
            name = name.replace(old, new)
        tensors[f"model.transformer.{name}"] = tensor
    config = {
        "architectures": ["LLaDAModelLM"], "n_layers": sizes["num_hidden_layers"], "d_model": sizes["hidden_size"],
        "n_heads": heads, "n_kv_heads": heads, "mlp_hidden_size": sizes["intermediate_size"], "embedding_size": VOCAB,
        "vocab_size": VOCAB, "max_sequence_length": LENGTH, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "weight_tying": False, "mask_token_id": 96, "eos_token_id": 90, "block_type": "llama", "include_bias": False,
        "activation_type": "silu",
    }  # fmt: skip
    save_shards(folder, tensors, config)
    return of_transformers(model)


LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80, "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "rope_theta": 600000, "partial_rotary_factor": 0.5,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "score_function": "sigmoid", "tie_word_embeddings": False, "mask_token_id": 96, "eos_token_id": 93,
}  # fmt: skip


def llada2(folder: Path, sizes: Sizes = LLADA2) -> Logits:
    """LLaDA2, written out: no part of it is shared with the decoder that it is held against."""
    c = {**LLADA2, **sizes}
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    chance = torch.Generator().manual_seed(6)
    shapes = {
        "model.word_embeddings.weight": (VOCAB, hidden), "lm_head.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        at, ffn = f"model.layers.{i}", c["moe_intermediate_size"]
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.attention.query_key_value.weight": ((heads + 2 * kv) * dim, hidden),
            f"{at}.attention.query_layernorm.weight": (dim,), f"{at}.attention.key_layernorm.weight": (dim,),
            f"{at}.attention.dense.weight": (hidden, heads * dim),
        }  # fmt: skip
        if i == 0:
            parts = {"mlp": c["intermediate_size"]}
        else:
            parts = {f"mlp.experts.{j}": ffn for j in range(c["num_experts"])} | {"mlp.shared_experts": ffn}
            shapes |= {
                f"{at}.mlp.gate.weight": (c["num_experts"], hidden), f"{at}.mlp.gate.expert_bias": (c["num_experts"],)
            }  # fmt: skip
        for part, width in parts.items():
            shapes |= {f"{at}.{part}.{x}_proj.weight": (width, hidden) for x in ("gate", "up")}
            shapes[f"{at}.{part}.down_proj.weight"] = (hidden, width)
    w = {name: torch.randn(shape, generator=chance) * 0.15 for name, shape in shapes.items()}
    w = {name: 1 + tensor if "norm" in name else tensor for name, tensor in w.items()}
    save_shards(folder, w, c)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def mlp(x: Tensor, part: str) -> Tensor:
        gate, up = (x @ w[f"{part}.{name}_proj.weight"].T for name in ("gate", "up"))
        return (gate * gate.sigmoid() * up) @ w[f"{part}.down_proj.weight"].T

    def mixed(row: Tensor, part: str) -> Tensor:
        scores = (w[f"{part}.gate.weight"] @ row).sigmoid()
        wanted = scores + w[f"{part}.gate.expert_bias"]
        size = c["num_experts"] // c["n_group"]
        best = {g: sum(sorted(wanted[g * size : (g + 1) * size].tolist())[-2:]) for g in range(c["n_group"])}
        groups = sorted(best, key=lambda g: -best[g])[: c["topk_group"]]
        open_ = [j for j in range(c["num_experts"]) if j // size in groups]
        chosen = sorted(open_, key=lambda j: -float(wanted[j]))[: c["num_experts_per_tok"]]
        total = sum(float(scores[j]) for j in chosen)
        out = mlp(row, f"{part}.shared_experts")
        for j in chosen:
            out = out + mlp(row, f"{part}.experts.{j}") * float(scores[j]) / total * c["routed_scaling_factor"]
        return out

    def turned(x: Tensor) -> Tensor:
        """The first half of a head's components turn, i with i + rotary / 2."""
        rotary = int(dim * c["partial_rotary_factor"])
        out = x.clone()
        for i in range(rotary // 2):
            angle = torch.arange(len(x)) / c["rope_theta"] ** (2 * i / rotary)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x[..., i], x[..., i + rotary // 2]
            out[..., i], out[..., i + rotary // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    @torch.no_grad()
    def logits(tokens: Tensor, seen: Tensor) -> Tensor:
        x = w["model.word_embeddings.weight"][tokens]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            rows = norm(x, f"{at}.input_layernorm.weight") @ w[f"{at}.attention.query_key_value.weight"].T
            rows = rows.view(len(x), -1, dim)
            q = turned(norm(rows[:, :heads], f"{at}.attention.query_layernorm.weight"))
            k = turned(norm(rows[:, heads : heads + kv], f"{at}.attention.key_layernorm.weight"))
            v = rows[:, heads + kv :]
            read = []
            for h in range(heads):
                score = q[:, h] @ k[:, h * kv // heads].T * dim**-0.5
                read.append(score.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, h * kv // heads])
            x = x + torch.cat(read, 1) @ w[f"{at}.attention.dense.weight"].T
            rows = norm(x, f"{at}.post_attention_layernorm.weight")
            x = x + (mlp(rows, f"{at}.mlp") if i == 0 else torch.stack([mixed(row, f"{at}.mlp") for row in rows]))
        return norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    return logits


CHECKPOINTS: dict[str, Callable[..., Logits]] = {
    "Qwen3ForCausalLM": qwen3, "Qwen3MoeForCausalLM": qwen3_moe, "Qwen2ForCausalLM": qwen2,
    "LlamaForCausalLM": llama, "SDARForCausalLM": sdar, "SDARMoeForCausalLM": sdar_moe, "DreamModel": dream,
    "LLaDAModelLM": llada, "LLaDA2MoeModelLM": llada2,
}  # fmt: skip
