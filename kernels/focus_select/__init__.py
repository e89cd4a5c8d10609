"""FOCUS's selection: which tokens go on to the remaining layers (focus.md 3.4)."""

import torch
from torch import Tensor

from .. import run
from ..checks import check_range, check_starts, check_tensor
from . import reference
from .reference import Masks as Masks


def focus_select(
    importance_first: Tensor,
    importance_second: Tensor,
    masks: Masks,
    alpha: float,
    *,
    sample_deviation: bool = False,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Which of the T computed tokens are retained, bool [T], and each sequence's progress after, int32 [S].

    The rule is engine/policies/focus.py's. Tokens that are not masked are always retained.

    importance_first, importance_second [M] fp32: of masked tokens, in the first and second layer. check: refuse values
    out of range; waits for the device.
    """
    masked, start, device = masks.masked, masks.masked_start, masks.masked.device
    check_tensor("masked", masked, device, torch.int64, "M")
    for name, importance in (("importance_first", importance_first), ("importance_second", importance_second)):
        check_tensor(name, importance, device, torch.float32, len(masked))
    check_tensor("masked_start", start, device, torch.int32, "S+1")
    check_tensor("positions", masks.positions, device, torch.int32, "T")
    for name in ("num_decoded", "num_steps", "progress"):
        check_tensor(name, getattr(masks, name), device, torch.int32, len(start) - 1)
    if not 1.0 <= alpha < float("inf"):
        raise ValueError(f"alpha is {alpha}, expected a finite number of at least 1")
    if check:
        check_starts("masked_start", start, len(masked), "masked")
        check_range("masked", masked, 0, len(masks.positions) - 1)
        check_range("num_steps", masks.num_steps, 0, 2**31 - 1)
    return run(reference.focus_select, masked, importance_first, importance_second, masks, alpha, sample_deviation)
