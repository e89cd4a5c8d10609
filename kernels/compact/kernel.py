"""Packing in Triton: one launch for all tensors and the bookkeeping."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words of a row, or flags, at a time


def compact(
    retained: Tensor, query_start: Tensor, tensors: tuple[Tensor, ...], num_retained: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    num_rows = len(retained)
    start_after = torch.empty_like(query_start)
    rows = torch.empty(num_retained, dtype=torch.int64, device=retained.device)
    kept = [torch.empty((num_retained, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in tensors]
    sources = [_words(tensor) for tensor in tensors]
    targets = [_words(tensor) for tensor in kept]
    widths = [tensor.shape[1] for tensor in sources]
    strides = [tensor.stride(0) for tensor in sources]
    missing = 8 - len(tensors)
    _compact[(num_rows + len(query_start),)](
        retained.view(torch.uint8), query_start, start_after, rows,
        *sources, *([rows] * missing), *targets, *([rows] * missing), *strides, *([0] * missing),
        num_rows, num_retained, WIDTHS=(*widths, *([0] * missing)), BLOCK=BLOCK,
    )  # fmt: skip
    return start_after, rows, kept


def _words(tensor: Tensor) -> Tensor:
    """The rows as integers of the widest type that divides their length, stride and offset."""
    size, width = tensor.element_size(), tensor[0].numel() if len(tensor) else 0
    flat = tensor.as_strided((len(tensor), width), (tensor.stride(0), 1))
    for words, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        apart = [width * size, tensor.stride(0) * size, tensor.storage_offset() * size]
        if words >= size and all(n % words == 0 for n in apart):
            return flat.view(dtype)
    return flat.view(torch.uint8) if size == 1 else flat.view({2: torch.int16, 4: torch.int32}[size])


@triton.jit
def _move(from_ptr, to_ptr, i_from, i_to, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for i in range(0, WIDTH, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b = tl.load(from_ptr + i_from * stride + o, mask=o < WIDTH)
        tl.store(to_ptr + i_to * WIDTH + o, b, mask=o < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "num_retained"])
def _compact(
    retained_ptr, start_ptr, start_after_ptr, rows_ptr,
    from0, from1, from2, from3, from4, from5, from6, from7, to0, to1, to2, to3, to4, to5, to6, to7,
    stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7,
    num_rows, num_retained, WIDTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row and one an entry of query_start; each counts the retained rows before it."""
    i_program = tl.program_id(0)
    is_row = i_program < num_rows
    if is_row:
        i_row = i_program
    else:
        i_row = tl.load(start_ptr + i_program - num_rows)
    b_before = tl.zeros([BLOCK], tl.int32)
    for i in range(0, i_row, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_before += (tl.load(retained_ptr + o, mask=o < i_row, other=0) != 0).to(tl.int32)
    i_to = tl.sum(b_before).to(tl.int64)
    if not is_row:
        tl.store(start_after_ptr + i_program - num_rows, i_to.to(tl.int32))
        return
    if (tl.load(retained_ptr + i_row) == 0) | (i_to >= num_retained):
        return
    i_from = i_row.to(tl.int64)
    tl.store(rows_ptr + i_to, i_from)
    _move(from0, to0, i_from, i_to, stride0, WIDTHS[0], BLOCK)
    _move(from1, to1, i_from, i_to, stride1, WIDTHS[1], BLOCK)
    _move(from2, to2, i_from, i_to, stride2, WIDTHS[2], BLOCK)
    _move(from3, to3, i_from, i_to, stride3, WIDTHS[3], BLOCK)
    _move(from4, to4, i_from, i_to, stride4, WIDTHS[4], BLOCK)
    _move(from5, to5, i_from, i_to, stride5, WIDTHS[5], BLOCK)
    _move(from6, to6, i_from, i_to, stride6, WIDTHS[6], BLOCK)
    _move(from7, to7, i_from, i_to, stride7, WIDTHS[7], BLOCK)
