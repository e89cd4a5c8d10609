"""Train the shipped full-sequence model: `python research/tiny/train_both_ways.py --steps 800 -o DIR`.

From the block-diffusion model's weights it learns to see both ways, as LLaDA is trained: a clean prompt, then masks
that every position sees. Half of the rows are masked at random (LLaDA, algorithm 1), half as block decoding leaves
them.
"""

import argparse
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dsim.live.model import Decoder
from dsim.live.weights import config_of, load
from dsim.research.tiny.saved import save_model

NAME = "tiny-both-ways"
CONTEXT, BATCH = 320, 8
RATE = 1e-3
CERTAINTY = 0.5  # largest weight of the entropy, as in train.py
EVERY = 50  # steps between reports


class BothWays:
    """Whole sequences, [batch x CONTEXT] rows."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(self.batch, CONTEXT, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.batch * CONTEXT, -1, q.shape[-1])


def masks(chance: np.random.Generator, batch: int, block: int) -> np.ndarray:
    """[batch, CONTEXT]: of the answers, which begin at different positions; at least one a row."""
    column = np.arange(CONTEXT)
    prompt = chance.integers(8, CONTEXT - block, size=(batch, 1))
    share = chance.random((batch, 1))
    spread = chance.random((batch, CONTEXT)) < share
    current = prompt + block * np.floor(chance.random((batch, 1)) * -(-(CONTEXT - prompt) // block))
    in_blocks = (column >= current + block) | ((column >= current) & spread)
    masked = np.where(chance.random((batch, 1)) < 0.5, in_blocks, spread) & (column >= prompt)
    masked[~masked.any(axis=1), -1] = True
    return masked


def loss_of(model: Decoder, text: Tensor, masked: Tensor, certainty: float) -> tuple[Tensor, Tensor]:
    """The loss, and its cross-entropy (nats a masked byte)."""
    tokens = torch.where(masked, model.config.mask_token, text).reshape(-1)
    states = model(tokens, torch.arange(CONTEXT).repeat(len(text)), BothWays(len(text)))
    logs = functional.log_softmax(model.logits(states[masked.reshape(-1)]), dim=-1)
    target = text[masked]
    plain = functional.nll_loss(logs, target)
    right = logs.argmax(dim=-1) == target
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return plain + certainty * (entropy * right).mean(), plain


def train(folder: Path, steps: int, seed: int) -> None:
    model = Decoder(config_of(NAME))
    model.load_state_dict(load("tiny", "cpu", torch.float32).state_dict())
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embedding" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim != 2 or "embedding" in name]
    optimisers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    texts = [corpus.source(held_out=False), corpus.records(seed, 4_000_000)]
    tests = {"source": corpus.source(held_out=True), "records": corpus.records(seed + 1, 200_000)}
    begin, total = time.time(), 0.0
    for step in range(steps):
        chance = np.random.default_rng([seed, step])
        done = step / steps
        rows = []
        for which in chance.choice(2, size=BATCH, p=[0.6, 0.4]):
            at = int(chance.integers(len(texts[which]) - CONTEXT))
            rows.append(texts[which][at : at + CONTEXT])
        text = torch.from_numpy(np.stack(rows).astype(np.int64))
        masked = torch.from_numpy(masks(chance, BATCH, model.config.block_length))
        aim, plain = loss_of(model, text, masked, CERTAINTY * max(0.0, 2 * done - 1))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 20, max(0.02, (1.0 - done) / 0.7))
            optimiser.zero_grad()
        torch.autograd.backward(aim)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        total += float(plain.detach())
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            held = ", ".join(f"{name} {held_out_loss(model, test):.3f}" for name, test in tests.items())
            pace = (time.time() - begin) / (step + 1)
            print(f"step {step + 1}: {total / EVERY:.3f} nats, held out {held}; {pace:.2f} s a step", flush=True)
            total = 0.0
            save_model(model, folder, torch.float16)


@torch.no_grad()
def held_out_loss(model: Decoder, text: np.ndarray, rows: int = 32) -> float:
    """As in train.py."""
    at = np.linspace(0, len(text) - CONTEXT, rows).astype(int)
    pieces = torch.from_numpy(np.stack([text[i : i + CONTEXT] for i in at]).astype(np.int64))
    masked = torch.from_numpy(masks(np.random.default_rng(0), rows, model.config.block_length))
    return float(loss_of(model, pieces, masked, 0.0)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    train(given.out, given.steps, given.seed)
