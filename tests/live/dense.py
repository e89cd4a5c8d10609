"""A decoder without cache or pages: whole sequences under an explicit mask, to hold the executor against."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsim.live.config import ModelConfig
from dsim.live.model import Decoder
from dsim.profiler.measure import describe, shape_of
from dsim.profiler.profile import load, save

SMALL = ModelConfig("small", 2, 48, 4, 2, 16, 80, 97, 256, 4, 96, rope_theta=1e4)


def save_profile(config: ModelConfig, known: str, name: str, **changes: Any) -> None:
    """NAME.json here: a shipped profile with changes, as if it had been measured of this model on this machine."""
    profile = load(known)
    device, memory = replace(profile.device, name=describe("cpu").name), replace(profile.memory, vocab=config.vocab)
    measured = replace(profile, name=name, model=shape_of(config), device=device, **changes)
    save(replace(measured, memory=replace(memory, kv_bytes_per_token=512)), f"{name}.json")


class Dense:
    """Attention of one sequence's rows under a mask [rows, rows]."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1)


def block_causal(length: int, block: int) -> Tensor:
    """A query sees its own block and those before it, [length, length]."""
    at = torch.arange(length) // block
    return at[:, None] >= at


@torch.no_grad()
def logits(model: Decoder, tokens: list[int], block: int) -> Tensor:
    """[positions, vocab]."""
    mask = block_causal(len(tokens), block)
    return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), Dense(mask)))
