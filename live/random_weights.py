"""Random weights, made in place on the device: matrices of normal numbers, and experts that are drawn."""

import math

import torch
from torch import Tensor

DEEP = ("output.weight", "o_proj.weight", "down.weight", "down_proj.weight", "experts.down", "experts.down_proj")
ROWS = 1 << 15  # of a table of experts' logits; a step of more rows repeats them
APART = 64  # rows between the tables of two layers: all begin at a multiple of 16 bytes


def fill(weight: Tensor, name: str, layers: int, generator: torch.Generator) -> None:
    """Random numbers for the weight of this name, scaled so that activations stay finite: norms 1, biases 0."""
    if weight.ndim == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        weight.normal_(std=0.02 / (math.sqrt(2 * layers) if name.endswith(DEEP) else 1.0), generator=generator)


def drawn_experts(num: int, layers: int, skew: float, seed: int, device: str) -> list[Tensor]:
    """Each layer's router logits, [ROWS, num] in fp32, by a row's number in its step.

    Random weights would send all masks of a sequence to the same experts, since masks have one embedding. So a row
    draws its experts, without repetition and in proportion to their popularity: that of expert j is (j + 1)^-skew,
    by Gumbel noise on its logarithm. Skew 0: all experts are alike.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    table = torch.empty(ROWS + APART * layers, num, dtype=torch.float32, device=device)
    table.exponential_(generator=generator).log_().neg_()
    table -= skew * torch.arange(1, num + 1, dtype=torch.float32, device=device).log()
    return [table[APART * i : APART * i + ROWS] for i in range(layers)]


def of_rows(table: Tensor, rows: int) -> Tensor:
    """A step's logits, [rows, num]."""
    return table[:rows] if rows <= len(table) else table.repeat(-(-rows // len(table)), 1)[:rows]
