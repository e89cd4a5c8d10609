"""FOCUS's selection: which tokens go on to the rest of the model's layers (focus.md 3.4)."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_range, check_shape, check_starts
from . import reference


def focus_select(
    importance_first: torch.Tensor,
    importance_second: torch.Tensor,
    masked: torch.Tensor,
    masked_start: torch.Tensor,
    positions: torch.Tensor,
    num_decoded: torch.Tensor,
    num_steps: torch.Tensor,
    progress: torch.Tensor,
    alpha: float,
    *,
    sample_deviation: bool = False,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the T tokens computed are retained, bool [T], and each sequence's progress after that, int32 [S].

    The rule is engine/policies/focus.py's. Tokens that are not masked are always retained.

    importance_first, importance_second [M] fp32: of the masked tokens in the first and the second layer; masked [M]
    int64: their rows among the T, ascending in each sequence; masked_start [S+1] int32; positions [T] int32, in the
    block; num_decoded, num_steps [S] int32: tokens decoded in this block, and steps that decoded any; progress [S]
    int32: the rightmost masked position retained so far in this block, or -1. check: refuse values out of range, which
    waits for the device.
    """
    num_sequences = masked_start.shape[0] - 1
    check_shape("masked", masked, "M")
    check_shape("importance_first", importance_first, len(masked))
    check_shape("importance_second", importance_second, len(masked))
    check_shape("masked_start", masked_start, "S+1")
    check_shape("positions", positions, "T")
    check_dtype("importance_first", importance_first, torch.float32)
    check_dtype("importance_second", importance_second, torch.float32)
    check_dtype("masked", masked, torch.int64)
    by_sequence = {"num_decoded": num_decoded, "num_steps": num_steps, "progress": progress}
    for name, tensor in by_sequence.items():
        check_shape(name, tensor, num_sequences)
    for name, tensor in {"masked_start": masked_start, "positions": positions, **by_sequence}.items():
        check_dtype(name, tensor, torch.int32)
    arguments = (
        importance_first, importance_second, masked, masked_start, positions, num_decoded, num_steps, progress,
    )  # fmt: skip
    for tensor in arguments:
        check_device("an argument", tensor, masked.device)
        check_dense("an argument", tensor)
    if not 1.0 <= alpha < float("inf"):
        raise ValueError(f"alpha is {alpha}, expected a finite number of at least 1")
    if check:
        check_starts("masked_start", masked_start, len(masked), "masked")
        check_range("masked", masked, 0, len(positions) - 1)
        check_range("num_steps", num_steps, 0, 2**31 - 1)
    if take("focus_select", masked) == "reference":
        return reference.focus_select(*arguments, alpha, sample_deviation)
    from . import kernel

    return kernel.focus_select(*arguments, alpha, sample_deviation)
