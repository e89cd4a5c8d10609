"""Train the tiny model: `python research/tiny/train.py --steps 4500 -o DIR`; run again, it continues.

A masked copy follows each sequence: its blocks see themselves and the clean blocks before; the clean half is
block-causal. The loss is the masked bytes' cross-entropy (the training layout of block diffusion, BD3-LM, section 3),
towards the end with the entropy where the likeliest byte is right: confidence decides how many positions commit in a
step (certainty forcing, dParallel).
"""

import argparse
import math
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dsim.live.model import Decoder
from dsim.live.weights import config_of
from dsim.research.tiny.saved import save_model

CONTEXT, BATCH = 512, 8
RATE = 3e-3
CERTAINTY = 0.5  # largest weight of the entropy
CERTAINTY_FROM = 0.5  # share of the steps before it
EVERY = 100  # steps, reports and checkpoints


class Layout:
    """Attention of [clean, masked copy], by the block of each position."""

    def __init__(self, batch: int, block: int, hidden: Tensor) -> None:
        """hidden [CONTEXT]: invisible positions of the copy, as a chunk leaves out a block's suffix."""
        at = torch.arange(CONTEXT) // block
        clean_clean = at[:, None] >= at
        copy_clean = at[:, None] > at
        copy_copy = (at[:, None] == at) & (~hidden | torch.eye(CONTEXT, dtype=torch.bool))
        nothing = torch.zeros_like(clean_clean)
        self.mask = torch.cat([torch.cat([clean_clean, nothing], 1), torch.cat([copy_clean, copy_copy], 1)])
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(self.batch, 2 * CONTEXT, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.batch * 2 * CONTEXT, -1, q.shape[-1])


def masks(chance: np.random.Generator, batch: int, block: int) -> np.ndarray:
    """[batch, CONTEXT]: half of the blocks at random, half from left to right, as in decoding."""
    blocks = CONTEXT // block
    share = chance.random((batch, blocks, 1))
    shuffled = chance.random((batch, blocks, block))
    ordered = (np.arange(block) + 0.5) / block + 0.25 * chance.standard_normal((batch, blocks, block))
    order = np.where(chance.random((batch, blocks, 1)) < 0.5, shuffled, ordered)
    # The last in the order, at least one in a block.
    masked = order >= 1.0 - share
    np.put_along_axis(masked, order.argmax(axis=2)[..., None], True, axis=2)
    return masked.reshape(batch, CONTEXT)


def hidden_suffix(chance: np.random.Generator, block: int) -> Tensor:
    """[CONTEXT]: half of the time, what follows a random position of each block."""
    if chance.random() < 0.5:
        return torch.zeros(CONTEXT, dtype=torch.bool)
    seen = chance.integers(2, block + 1, size=(CONTEXT // block, 1))
    return torch.from_numpy((np.arange(block) >= seen).reshape(-1))


def loss_of(model: Decoder, text: Tensor, masked: Tensor, hidden: Tensor, certainty: float) -> tuple[Tensor, Tensor]:
    """The loss, and its cross-entropy (nats a byte), over visible masks."""
    block = model.config.block_length
    layout = Layout(len(text), block, hidden)
    copy = torch.where(masked, model.config.mask_token, text)
    tokens = torch.cat([text, copy], dim=1).reshape(-1)
    positions = torch.arange(CONTEXT).repeat(2 * len(text))
    states = model(tokens, positions, layout).view(len(text), 2, CONTEXT, -1)[:, 1]
    counted = masked & ~hidden
    logs = functional.log_softmax(model.logits(states[counted]), dim=-1)
    target = text[counted]
    plain = functional.nll_loss(logs, target)
    if not certainty:
        return plain, plain
    right = logs.argmax(dim=-1) == target
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return plain + certainty * (entropy * right).mean(), plain


def batch_of(chance: np.random.Generator, texts: list[np.ndarray], shares: list[float]) -> Tensor:
    """[BATCH, CONTEXT] bytes from random places of texts."""
    rows = []
    for which in chance.choice(len(texts), size=BATCH, p=shares):
        at = int(chance.integers(len(texts[which]) - CONTEXT))
        rows.append(texts[which][at : at + CONTEXT])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def train(folder: Path, steps: int, seed: int) -> None:
    """From the checkpoint in `folder`, if there is one; saves the model there."""
    config = config_of("tiny")
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            deep = name.endswith(("output.weight", "down.weight"))
            torch.nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.layers) if deep else 1.0))
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embedding" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim != 2 or "embedding" in name]
    optimisers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    texts = [corpus.source(held_out=False), corpus.records(seed, 4_000_000)]
    tests = {"source": corpus.source(held_out=True), "records": corpus.records(seed + 1, 200_000)}
    begin = 0
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        begin = state["step"]
        model.load_state_dict(state["model"])
        for optimiser, kept in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
    since, total = time.time(), 0.0
    for step in range(begin, steps):
        chance = np.random.default_rng([seed, step])
        done = step / steps
        rate = RATE * min(1.0, (step + 1) / 100, max(0.02, (1.0 - done) / 0.5))
        certainty = CERTAINTY * max(0.0, (done - CERTAINTY_FROM) / (1.0 - CERTAINTY_FROM))
        text = batch_of(chance, texts, [0.7, 0.3])
        masked = torch.from_numpy(masks(chance, BATCH, config.block_length))
        aim, plain = loss_of(model, text, masked, hidden_suffix(chance, config.block_length), certainty)
        for optimiser in optimisers:
            optimiser.zero_grad()
        torch.autograd.backward(aim)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        total += float(plain.detach())
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            pace = (time.time() - since) / (step + 1 - begin)
            held = ", ".join(f"{name} {held_out_loss(model, test):.3f}" for name, test in tests.items())
            print(f"step {step + 1}: {total / EVERY:.3f} nats a byte, held out {held}; {pace:.2f} s a step", flush=True)
            total = 0.0
            kept = [optimiser.state_dict() for optimiser in optimisers]
            torch.save({"step": step + 1, "model": model.state_dict(), "optimisers": kept}, folder / "part.pt")
            (folder / "part.pt").replace(checkpoint)
    save_model(model, folder, torch.float16)


@torch.no_grad()
def held_out_loss(model: Decoder, text: np.ndarray, rows: int = 64) -> float:
    """Nats a masked byte, over evenly spaced pieces, always with the same masks."""
    chance = np.random.default_rng(0)
    at = np.linspace(0, len(text) - CONTEXT, rows).astype(int)
    pieces = torch.from_numpy(np.stack([text[i : i + CONTEXT] for i in at]).astype(np.int64))
    masked = torch.from_numpy(masks(chance, rows, model.config.block_length))
    return float(loss_of(model, pieces, masked, torch.zeros(CONTEXT, dtype=torch.bool), 0.0)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    train(given.out, given.steps, given.seed)
