"""A tiny random DiffusionGemma and a tokenizer of bytes: `python -P model.py OUT [--canvas N] [--steps N]`."""

import argparse
import json
from pathlib import Path

VOCAB = 2048


def make_model(folder: Path, canvas: int = 64, steps: int = 12) -> None:
    """Write a model with canvases of `canvas` tokens, each denoised in at most `steps` steps."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
        Gemma4VisionConfig,
    )

    torch.manual_seed(0)
    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, global_head_dim=128, num_global_key_value_heads=1, sliding_window=256,
        max_position_embeddings=4096, num_experts=4, top_k_experts=2, moe_intermediate_size=128, pad_token_id=0,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32,
    )  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=canvas, boi_token_id=2001, eoi_token_id=2002,
        image_token_id=2003,
    )  # fmt: skip
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    DiffusionGemmaForBlockDiffusion(config).to(torch.bfloat16).save_pretrained(folder)
    rule = {"max_denoising_steps": steps, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
            "confidence_threshold": 0.005, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1}}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(rule))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    made = Tokenizer(models.BPE({**special, **{letter: i + 3 for i, letter in enumerate(letters)}}, []))
    made.add_special_tokens(list(special))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "pad_token": "<pad>",
             "eos_token": "<eos>", "bos_token": "<bos>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--canvas", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    make_model(args.out, args.canvas, args.steps)
