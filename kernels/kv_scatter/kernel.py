"""Keys and values to pages in Triton: one program a token."""

import triton
import triton.language as tl
from torch import Tensor


def kv_scatter(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    _scatter[(num_tokens,)](
        k, v, k_pages, v_pages, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), v_pages.stride(0), v_pages.stride(1),
        v_pages.stride(2),
        H=num_heads, D=head_dim, PAGE=k_pages.shape[1], BLOCK=triton.next_power_of_2(num_heads * head_dim),
    )  # fmt: skip


@triton.jit
def _scatter(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, k_row, k_head, v_row, v_head,
    k_page, k_slot, k_page_head, v_page, v_slot, v_page_head,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < H * D
    o_head, o_d = o // D, o % D
    # Read the row before the slot: one wait instead of two.
    b_k = tl.load(k_ptr + i_row * k_row + o_head * k_head + o_d, mask=m)
    b_v = tl.load(v_ptr + i_row * v_row + o_head * v_head + o_d, mask=m)
    slot = tl.load(slots_ptr + i_row)
    if slot < 0:
        return
    page, offset = slot // PAGE, slot % PAGE
    tl.store(k_pages_ptr + page * k_page + offset * k_slot + o_head * k_page_head + o_d, b_k, mask=m)
    tl.store(v_pages_ptr + page * v_page + offset * v_slot + o_head * v_page_head + o_d, b_v, mask=m)
