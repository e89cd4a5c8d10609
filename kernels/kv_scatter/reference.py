"""Keys and values of ragged tokens written to their pages, in plain PyTorch: the specification."""

import torch


def kv_scatter(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """See the launcher."""
    rows = (slots >= 0).nonzero().squeeze(1)
    pages, offsets = slots[rows] // k_pages.shape[1], slots[rows] % k_pages.shape[1]
    k_pages[pages, offsets] = k[rows]
    v_pages[pages, offsets] = v[rows]
