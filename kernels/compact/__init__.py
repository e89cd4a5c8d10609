"""Pack retained rows of several tensors: hidden states, queries, keys, positions, RoPE rows."""

import torch
from torch import Tensor

from .. import run
from ..checks import check_starts, check_tensor
from . import reference

MAX_TENSORS = 8


def compact(
    retained: Tensor, query_start: Tensor, *tensors: Tensor, num_retained: int | None = None, check: bool = True
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Each sequence's first retained row, [S+1] int32; the rows' indices, [R] int64; and the packed tensors, [R, ...].

    retained [T] bool; query_start [S+1] int32; at most 8 tensors [T, ...] of any dtypes, with contiguous rows.
    num_retained: R; None: the host waits for it.
    """
    num_rows, device = retained.shape[0], retained.device
    check_tensor("retained", retained, device, torch.bool, "T")
    check_tensor("query_start", query_start, device, torch.int32, "S+1")
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ValueError(f"{len(tensors)} tensors are to be compacted, expected 1 to {MAX_TENSORS}")
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0 or len(tensor) != num_rows:
            raise ValueError(f"tensor {i} has shape {list(tensor.shape)}, expected {num_rows} rows")
        if num_rows and not tensor[0].is_contiguous():
            raise ValueError(f"tensor {i} has strides {list(tensor.stride())}, expected contiguous rows")
        if tensor.device != device:
            raise ValueError(f"tensor {i} is on {tensor.device}, expected {device}")
    if check:
        check_starts("query_start", query_start, num_rows, "retained")
        if num_retained is not None and num_retained != int(retained.sum()):
            raise ValueError(f"num_retained is {num_retained}, expected {int(retained.sum())}")
    if num_retained is None:
        num_retained = int(retained.sum())
    return run(reference.compact, retained, retained, query_start, tensors, num_retained)
