"""FOCUS's selection in plain PyTorch, for all sequences at once: the specification.

It and the kernel equal the engine's rule (engine/policies/focus.py) bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """Each sequence's masked tokens, and its progress in the block."""

    masked: Tensor  # [M] int64, rows among the T computed, ascending in each sequence
    masked_start: Tensor  # [S + 1] int32
    positions: Tensor  # [T] int32, in the block
    num_decoded: Tensor  # [S] int32, tokens decoded in this block
    num_steps: Tensor  # [S] int32, steps that decoded any
    progress: Tensor  # [S] int32, rightmost masked position retained in this block, or -1


def focus_select(
    importance_first: Tensor, importance_second: Tensor, masks: Masks, alpha: float, sample_deviation: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows are sequences, padded to the longest list of masked tokens."""
    masked, masked_start, positions, num_decoded, num_steps, progress = masks
    retained = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
    num_masked = masked_start.diff()
    width = int(num_masked.max()) if len(num_masked) else 0
    if width == 0:
        return retained, progress.clone()
    columns = torch.arange(width, device=masked.device)
    there = columns < num_masked[:, None]  # [S, width]
    index = (masked_start[:-1, None] + columns).clamp(max=len(masked) - 1)
    delta = importance_second[index] - importance_first[index]
    spots = torch.where(there, positions[masked[index]], -1)

    # Sums go from left to right: all implementations give the same bits.
    wide = torch.where(there, delta.double(), 0.0)
    count = num_masked.clamp(min=1)
    mean = torch.zeros(len(count), dtype=torch.float64, device=delta.device)
    for j in range(width):
        mean = mean + wide[:, j]
    mean = mean / count
    square = torch.where(there, (wide - mean[:, None]) * (wide - mean[:, None]), 0.0)
    variance = torch.zeros_like(mean)
    for j in range(width):
        variance = variance + square[:, j]
    deviation = (variance / (count - int(sample_deviation)).clamp(min=1)).sqrt()
    high = there & (wide >= (mean + deviation)[:, None])

    decoded = torch.where(num_steps > 0, num_decoded.double() / num_steps.clamp(min=1), 1.0)
    budget = (decoded.clamp(min=1.0) * alpha).ceil().clamp(min=1.0).minimum(num_masked.double())
    before = (delta[:, :, None] < delta[:, None, :]) | (
        (delta[:, :, None] == delta[:, None, :]) & (columns[:, None] > columns)
    )
    rank = (before & there[:, None, :]).sum(2)
    selected = there & (rank < high.sum(1).maximum(budget)[:, None])
    keep = selected.clone()
    keep[:, :-1] |= selected[:, 1:] & (spots.diff(dim=1) == 1)
    rightmost = torch.where(keep, spots, -1).amax(1)
    keep |= there & (spots < rightmost[:, None]) & (spots > progress[:, None])
    keep |= there & (num_masked <= budget)[:, None]
    retained[masked[: int(masked_start[-1])]] = keep[there]  # the list may be longer
    return retained, torch.where(keep, spots, -1).amax(1).maximum(progress).to(progress.dtype)
