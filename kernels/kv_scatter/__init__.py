"""Writing the keys and values of ragged tokens to their pages."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape
from . import reference


def kv_scatter(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    check: bool = True,
) -> None:
    """Write row i of k and v, [N, Hkv, D], to slot slots[i] = page * page_size + offset; a negative slot is skipped.

    k_pages, v_pages [num_pages, page_size, Hkv, D] are written in place, in the dtype they share with k and v; slots
    [N] int64, no slot twice. check: refuse slots beyond the pages, which waits for the device.
    """
    check_shape("k", k, "N", "Hkv", "D")
    check_shape("v", v, *k.shape)
    check_shape("k_pages", k_pages, "num_pages", "page_size", *k.shape[1:])
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_shape("slots", slots, k.shape[0])
    check_dtype("k", k, torch.float32, torch.bfloat16, torch.float16)
    for name, tensor in {"v": v, "k_pages": k_pages, "v_pages": v_pages}.items():
        check_dtype(name, tensor, k.dtype)
    check_dtype("slots", slots, torch.int64)
    for name, tensor in {"v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots}.items():
        check_device(name, tensor, k.device)
    for name, tensor in {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots}.items():
        check_dense(name, tensor)
    num_slots = k_pages.shape[0] * k_pages.shape[1]
    if check and len(slots) and int(slots.max()) >= num_slots:
        raise ValueError(f"slots holds {int(slots.max())}, expected at most {num_slots - 1}")
    if take("kv_scatter", k) == "reference":
        reference.kv_scatter(k, v, k_pages, v_pages, slots)
    else:
        from . import kernel

        kernel.kv_scatter(k, v, k_pages, v_pages, slots)
