"""Moving the rows that go on together: hidden states, residuals, queries, keys, values, positions, RoPE rows."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape, check_starts
from . import reference

MAX_TENSORS = 8


def compact(
    retained: torch.Tensor,
    query_start: torch.Tensor,
    *tensors: torch.Tensor,
    num_retained: int | None = None,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Where each sequence's retained rows begin, [S+1] int32, which they were, [R] int64, and every tensor's, [R, ...].

    retained [T] bool; query_start [S+1] int32; at most 8 tensors [T, ...], of any dtypes, whose rows lie together in
    memory. num_retained: how many are retained, if the host knows it; otherwise it is asked of the device.
    """
    num_rows = retained.shape[0]
    check_shape("retained", retained, "T")
    check_dtype("retained", retained, torch.bool)
    check_shape("query_start", query_start, "S+1")
    check_dtype("query_start", query_start, torch.int32)
    check_device("query_start", query_start, retained.device)
    check_dense("retained", retained)
    check_dense("query_start", query_start)
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ValueError(f"{len(tensors)} tensors are to be compacted, expected 1 to {MAX_TENSORS}")
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0 or len(tensor) != num_rows:
            raise ValueError(f"tensor {i} has shape {list(tensor.shape)}, expected {num_rows} rows")
        if num_rows and not tensor[0].is_contiguous():
            raise ValueError(f"tensor {i} has strides {list(tensor.stride())}, expected rows that lie together")
        check_device(f"tensor {i}", tensor, retained.device)
    if check:
        check_starts("query_start", query_start, num_rows, "retained")
        if num_retained is not None and num_retained != int(retained.sum()):
            raise ValueError(f"num_retained is {num_retained}, expected {int(retained.sum())}")
    if num_retained is None:
        num_retained = int(retained.sum())
    if take("compact", retained) == "reference":
        return reference.compact(retained, query_start, tensors, num_retained)
    from . import kernel

    return kernel.compact(retained, query_start, tensors, num_retained)
