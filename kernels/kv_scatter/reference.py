"""Keys and values to pages in plain PyTorch: the specification."""

from torch import Tensor


def kv_scatter(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    rows = (slots >= 0).nonzero().squeeze(1)
    pages, offsets = slots[rows] // k_pages.shape[1], slots[rows] % k_pages.shape[1]
    k_pages[pages, offsets] = k[rows]
    v_pages[pages, offsets] = v[rows]
