"""A decoder without cache or pages, to hold the executor against: whole sequences under an explicit mask; batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsim.live.config import ModelConfig
from dsim.live.forward import Batch
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


def batch_of(
    chance: np.random.Generator, history: Any, positions: Sequence[Any], block: int, *, page: int = 8, vocab: int = 96,
    **more: Any,
) -> Batch:  # fmt: skip
    """Sequences that compute these positions, of which those behind the history are listed in its block."""
    num, lengths, every = len(positions), [len(each) for each in positions], np.concatenate(positions)
    pages = int(every.max()) // page + 1
    table = chance.permutation(num * pages).reshape(num, pages).astype(np.int32)
    rows = np.repeat(np.arange(num), lengths)
    places = table[rows, every // page].astype(np.int64) * page + every % page
    columns = every - np.array(history)[rows]
    listed = np.zeros((num, block if (columns >= 0).any() else 1), np.bool_)
    listed[rows[columns >= 0], columns[columns >= 0]] = True
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = chance.integers(0, vocab, len(rows))
    sampled = more.pop("sampled", np.arange(len(rows)))
    return Batch(tokens, every, places, starts, table, np.array(history), listed, block, sampled, **more)
