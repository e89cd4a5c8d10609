"""A tiny DiffusionGemma and a tokenizer of bytes: `python -P tiny_gemma.py OUT [--canvas N] [--steps N] [--train N]`.

Its weights are random, so that no canvas ever converges: the requests' or the model's limit ends each. With --train its
weights are first trained on a toy text, so that canvases converge by the sampler's own rule and answers end with <eos>.
"""

import argparse
import json
import random
from pathlib import Path

VOCAB = 2048
EOS = 1
FIRST_LETTER = 3
SENTENCES = (
    "the queue is empty. ", "a step takes ten milliseconds. ", "pages are short. ",
    "the batch waits for its longest row. ", "no request arrives. ", "time flies like an arrow. ",
)  # fmt: skip
LAST = 0.2  # probability that a sentence is the answer's last
BATCH = 8
# Of a trained model: the mean entropy (nat) below which a canvas may stop, and the entropy bound of acceptance. The
# checkpoint's 0.005 and 0.1 need longer training than minutes.
CONFIDENT, ENTROPY_BOUND = 0.3, 1.0


def make_model(folder: Path, canvas: int = 64, steps: int = 12, train: int = 0) -> None:
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
        eos_token_id=EOS, bos_token_id=2,
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
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<eos>": EOS, "<bos>": 2}
    vocab = {**special, **{letter: i + FIRST_LETTER for i, letter in enumerate(letters)}}
    made = Tokenizer(models.BPE(vocab, []))
    made.add_special_tokens(list(special))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model = DiffusionGemmaForBlockDiffusion(config)
    if train:
        train_on_text(model, [made.encode(sentence).ids for sentence in SENTENCES], canvas, train)
    model.to(torch.bfloat16).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    rule = {"max_denoising_steps": steps, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
            "confidence_threshold": CONFIDENT if train else 0.005, "eos_token_id": EOS, "pad_token_id": 0,
            "bos_token_id": 2,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig",
                               "entropy_bound": ENTROPY_BOUND if train else 0.1}}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(rule))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "pad_token": "<pad>",
             "eos_token": "<eos>", "bos_token": "<bos>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def answer(draw: random.Random, sentences: list[list[int]], length: int) -> list[int]:
    """An answer's tokens: random sentences, then <eos>."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += draw.choice(sentences)
        if draw.random() < LAST:
            tokens += [EOS] * length
    return tokens[:length]


def train_on_text(model, sentences: list[list[int]], canvas: int, num_steps: int) -> None:
    """Train a model to restore canvases with random tokens at random positions.

    A prompt is random letters, as the traffic's are; half of them are followed by a part of the answer.
    """
    import torch

    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * max(0.02, 1 - i / num_steps)
    )
    for step in range(num_steps):
        before = canvas * draw.randrange(2)
        prompt = draw.randrange(4, 48)
        texts = torch.tensor([answer(draw, sentences, before + canvas) for _ in range(BATCH)])
        letters = torch.randint(FIRST_LETTER, FIRST_LETTER + 256, (BATCH, prompt))
        context, target = torch.cat([letters, texts[:, :before]], 1), texts[:, before:]
        noise = torch.rand(BATCH, 1) < 0.3  # all of a first canvas is noise
        replaced = (torch.rand(target.shape) < torch.rand(BATCH, 1)) | noise
        noisy = torch.where(replaced, torch.randint(0, VOCAB, target.shape), target)
        given = {"input_ids": context, "decoder_input_ids": noisy}
        if step % 2:  # the sampler passes each step's distribution to the next
            with torch.no_grad():
                given["self_conditioning_logits"] = model(**given).logits
        loss = torch.nn.functional.cross_entropy(model(**given).logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--canvas", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="most denoising steps of a canvas")
    parser.add_argument("--train", type=int, default=0, help="training steps; 0: the weights stay random")
    args = parser.parse_args()
    make_model(args.out, args.canvas, args.steps, args.train)
