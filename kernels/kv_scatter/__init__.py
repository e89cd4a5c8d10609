"""Write the keys and values of ragged tokens to their pages."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def kv_scatter(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *, check: bool = True) -> None:
    """Write row i of k and v, [N, Hkv, D], to slot slots[i] = page * page_size + offset; skip negative slots.

    k_pages, v_pages [num_pages, page_size, Hkv, D] are written in place, in the dtype of k and v; slots [N] int64, all
    different. check: refuse slots beyond the pages; waits for the device.
    """
    check_tensor("k", k, k.device, FLOATS, "N", "Hkv", "D")
    check_tensor("v", v, k.device, k.dtype, *k.shape)
    check_tensor("k_pages", k_pages, k.device, k.dtype, "num_pages", "page_size", *k.shape[1:])
    check_tensor("v_pages", v_pages, k.device, k.dtype, *k_pages.shape)
    check_tensor("slots", slots, k.device, torch.int64, k.shape[0])
    num_slots = k_pages.shape[0] * k_pages.shape[1]
    if check and len(slots) and int(slots.max()) >= num_slots:
        raise ValueError(f"slots holds {int(slots.max())}, expected at most {num_slots - 1}")
    run(reference.kv_scatter, k, k, v, k_pages, v_pages, slots)
