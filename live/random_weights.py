"""Random weights and randomly drawn experts, made on the device."""

import math

import torch
from torch import Tensor

DEEP = ("output.weight", "o_proj.weight", "down.weight", "down_proj.weight", "experts.down", "experts.down_proj")
ROWS = 1 << 15  # of a table of logits; larger steps repeat them
APART = 64  # rows between layers' tables, aligned to 16 bytes


def fill(weight: Tensor, name: str, layers: int, generator: torch.Generator) -> None:
    """Random numbers that keep activations finite; norms 1, biases 0."""
    if weight.ndim == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        weight.normal_(std=0.02 / (math.sqrt(2 * layers) if name.endswith(DEEP) else 1.0), generator=generator)


def drawn_experts(num: int, layers: int, seed: int, device: str) -> list[Tensor]:
    """Each layer's router logits for a step's rows, [ROWS, num] in fp32.

    With random weights a sequence's masks, of one embedding, would choose the same experts. So each row draws experts
    evenly and without repetition, by Gumbel noise.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    table = torch.empty(ROWS + APART * layers, num, dtype=torch.float32, device=device)
    table.exponential_(generator=generator).log_().neg_()
    return [table[APART * i : APART * i + ROWS] for i in range(layers)]


def of_rows(table: Tensor, rows: int) -> Tensor:
    """A table's first rows, repeated as needed, [rows, num]."""
    return table[:rows] if rows <= len(table) else table.repeat(-(-rows // len(table)), 1)[:rows]
