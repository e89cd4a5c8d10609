"""The experts by PyTorch's grouped product, for many rows: two products of all experts at once.

`torch.nn.functional.grouped_mm` (PyTorch 2.10), before it `torch._grouped_mm`. On GPUs of capability 9.0 and 10.0 it
reads each expert's number of rows on the device; elsewhere it waits for the device, and no graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from .. import run
from ..swiglu import swiglu
from . import reference

DTYPES = (torch.bfloat16,)


def at_hand() -> Any | None:
    """PyTorch's grouped product, or None."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    product, top_k = at_hand(), experts.shape[1]
    assert product is not None, "chosen where it is"
    start, order, place = run(reference.pairs_by_expert, experts, experts, len(gate_up))
    gates = product(x[order // top_k], gate_up.transpose(1, 2), offs=start[1:])
    read = product(swiglu(gates, activation), down.transpose(1, 2), offs=start[1:])
    return run(reference.sum_of_pairs, x, read, place, weights)
