"""Write a small Qwen3 with random weights and a byte tokenizer, for vLLM's CPU build.

python -P benchmarks/random_qwen3.py FOLDER VOCAB HIDDEN LAYERS HEADS KV_HEADS

-P: files of this folder would hide modules that transformers imports.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

HEAD_DIM, CONTEXT = 64, 4096


def main(folder: str, *sizes: str) -> None:
    vocab, hidden, layers, heads, kv_heads = map(int, sizes)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(f"{folder}/tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
