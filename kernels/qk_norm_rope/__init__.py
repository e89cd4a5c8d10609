"""From the fused projection to queries, keys and values: heads normed, and turned by their positions."""

from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def qk_norm_rope(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, D], k [N, Hkv, D] and v [N, Hkv, D], each contiguous and of qkv's dtype.

    Each head of q and k is RMS-normed (Qwen3, SDAR), and component i of a head turned with i + D / 2 (RoPE).

    qkv [N, H + 2 Hkv, D]: queries, keys, values; num_heads: H; q_weight, k_weight [D], or None for no norm; cos, sin
    [N, D / 2] of each row's angles. All of one dtype; the arithmetic is in fp32.
    """
    check_tensor("qkv", qkv, qkv.device, FLOATS, "N", "heads", "D")
    num_rows, heads, head_dim = qkv.shape
    if not 0 < num_heads < heads or (heads - num_heads) % 2:
        raise ValueError(f"num_heads is {num_heads}, expected to leave an even number of the {heads} heads of qkv")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"qkv has heads of {head_dim}, expected an even number")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight or k_weight is None, expected both or neither")
    check_tensor("cos", cos, qkv.device, qkv.dtype, num_rows, head_dim // 2)
    check_tensor("sin", sin, qkv.device, qkv.dtype, num_rows, head_dim // 2)
    if q_weight is not None and k_weight is not None:
        check_tensor("q_weight", q_weight, qkv.device, qkv.dtype, head_dim)
        check_tensor("k_weight", k_weight, qkv.device, qkv.dtype, head_dim)
    return run(reference.qk_norm_rope, qkv, qkv, num_heads, q_weight, k_weight, eps, cos, sin)
