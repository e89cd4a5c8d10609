"""From the fused projection to queries, keys and values: heads normed, and turned by their positions."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape
from . import reference


def qk_norm_rope(
    qkv: torch.Tensor,
    num_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, H, D], k [N, Hkv, D] and v [N, Hkv, D], each dense and of qkv's dtype.

    Each head of q and k is RMS-normed (Qwen3, SDAR), and component i of a head turned with i + D / 2 (RoPE).

    qkv [N, H + 2 Hkv, D]: queries, keys, values; num_heads: H; q_weight, k_weight [D], or None for no norm; cos, sin
    [N, D / 2] of each row's angles. All of one dtype; the arithmetic is in fp32.
    """
    check_shape("qkv", qkv, "N", "heads", "D")
    num_rows, heads, head_dim = qkv.shape
    if not 0 < num_heads < heads or (heads - num_heads) % 2:
        raise ValueError(f"num_heads is {num_heads}, expected to leave an even number of the {heads} heads of qkv")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"qkv has heads of {head_dim}, expected an even number")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight or k_weight is None, expected both or neither")
    check_dtype("qkv", qkv, torch.float32, torch.bfloat16, torch.float16)
    check_dense("qkv", qkv)
    others = {"cos": cos, "sin": sin}
    for name, tensor in others.items():
        check_shape(name, tensor, num_rows, head_dim // 2)
    for name, weight in {"q_weight": q_weight, "k_weight": k_weight}.items():
        if weight is not None:
            check_shape(name, weight, head_dim)
            others[name] = weight
    for name, tensor in others.items():
        check_dtype(name, tensor, qkv.dtype)
        check_device(name, tensor, qkv.device)
        check_dense(name, tensor)
    arguments = (qkv, num_heads, q_weight, k_weight, eps, cos, sin)
    if take("qk_norm_rope", qkv) == "reference":
        return reference.qk_norm_rope(*arguments)
    from . import kernel

    return kernel.qk_norm_rope(*arguments)
