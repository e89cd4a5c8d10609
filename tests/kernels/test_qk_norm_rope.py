"""Heads normed in fp64 and turned as complex numbers, and values as they came."""

import pytest
import torch
from torch import Tensor

from dsim.kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope

from ..checks import cases
from .places import BF16, EVERYWHERE, FP16, FP32, Place, moved, normal

# A turn mixes a pair of components, so errors are relative to the pair's length. What is rounded: the normed pair, both
# products of a turn (by the reference alone) and their sum, each by at most half a unit of the length's last place:
# three times 2^-11 in fp16, 2^-8 in bf16. The kernel rounds twice, but under the interpreter, which cuts off what does
# not fit in bf16, by whole units: four times 2^-8. Each step in fp32 adds some 2^-24, whatever the dtype.
ROUNDING = {FP32: 0.0, BF16: 4 * 2**-8, FP16: 3 * 2**-11}
IN_FP32 = 2**-20
EPS = 0.25  # enough to be seen


def turned(
    place: Place, qkv: Tensor, num_heads: int, weights: tuple[Tensor | None, ...], turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the keys and values of a page for each row, in order."""
    num_rows, heads, head_dim = qkv.shape
    pages = torch.full(
        (2, num_rows, 1, (heads - num_heads) // 2, head_dim), torch.nan, dtype=qkv.dtype, device=place.device
    )
    arguments = moved((qkv, num_heads, Norms(*weights, EPS), Turns(*turns)), place.device)
    slots = torch.arange(num_rows, device=place.device)
    with place.proved("qk_norm_rope"):
        q = qk_norm_rope(*arguments, Pages(pages[0], pages[1], slots))
    k, v = pages.cpu()[:, :, 0]
    return q.cpu(), k, v


def near(actual: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    """Heads against fp64: component i and, imaginary, i + D / 2."""
    assert (actual.dtype, actual.shape) == (x.dtype, x.shape)
    x = x.double()
    if weight is not None:
        x = torch.nn.functional.rms_norm(x, weight.shape, weight.double(), EPS)
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())[:, None]
    error = (torch.complex(*actual.double().chunk(2, dim=-1)) - expected).abs()
    least = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    limit = (ROUNDING[actual.dtype] + IN_FP32) * expected.abs() + 4 * least
    assert (error <= limit).all(), float((error / limit).max())


def angles(num_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 4000, (num_rows, 1), generator=torch.Generator().manual_seed(num_rows)).double()
    turns = positions * 1e4 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return turns.cos().to(dtype), turns.sin().to(dtype)


def check(
    place: Place, qkv: Tensor, num_heads: int, weights: tuple[Tensor | None, ...],
    turns: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    num_rows, heads, head_dim = qkv.shape
    values = (heads + num_heads) // 2
    turns = angles(num_rows, head_dim, qkv.dtype) if turns is None else turns
    q, k, v = turned(place, qkv, num_heads, weights, turns)
    near(q, qkv[:, :num_heads], weights[0], *turns)
    near(k, qkv[:, num_heads:values], weights[1], *turns)
    assert torch.equal(v, qkv[:, values:])


def world(num_rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    weights = (1 + normal(head_dim + 1, 2, head_dim) / 2).to(dtype)
    return normal(head_dim, num_rows, heads, head_dim, dtype=dtype), weights.unbind()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", EVERYWHERE)
@cases(
    "num_rows num_heads num_kv_heads head_dim dtype normed",
        (0, 4, 2, 64, FP32, True), (1, 1, 1, 24, FP32, True), (1, 3, 1, 2, FP16, True), (63, 4, 2, 64, FP16, True),
        (63, 3, 1, 24, BF16, True), (7, 32, 8, 128, BF16, True), (2, 32, 8, 128, FP32, True),
        (1, 32, 8, 64, FP16, False), (63, 4, 2, 128, BF16, False), (200, 1, 1, 24, FP32, False),
)  # fmt: skip
def test_heads_are_normed_and_turned_and_values_moved(
    place: Place, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    qkv, weights = world(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype)
    check(place, qkv, num_heads, weights if normed else (None, None))


def test_heads_may_be_columns_of_a_projection_and_angles_of_a_table(place: Place) -> None:
    projection, table = normal(3, 5, 9 * 24), normal(4, 5, 40)
    check(place, projection.view(5, 9, 24)[:, 1:9], 4, (None, None))
    check(place, projection.view(5, 3, 72)[..., 30:54], 1, (projection[0, 7:31], projection[1, :24]))
    check(place, projection.view(5, 9, 24)[::2], 3, tuple(projection[:2, 1:25].unbind()))
    check(place, projection.view(5, 9, 24), 7, (None, None), (table[:, 3:15], projection[:, 100:112]))


def test_a_normed_head_is_rounded_before_it_is_turned(place: Place) -> None:
    # With 1 for both cosine and sine, products are exact and nothing but the head and the sum is rounded. Where fp32
    # leaves no doubt of what a head rounds to, the sum is certain.
    qkv, weights = world(8, 8, 64, FP16)
    ones = torch.ones(8, 32, dtype=FP16)
    q, k, _ = turned(place, qkv, 4, weights, (ones, ones))
    for actual, heads, weight in ((q, qkv[:, :4], weights[0]), (k, qkv[:, 4:6], weights[1])):
        normed = torch.nn.functional.rms_norm(heads.double(), (64,), weight.double(), EPS)
        low, high = ((normed * (1 + error)).half() for error in (-1e-5, 1e-5))
        a, b = low.double().chunk(2, dim=-1)
        settled = torch.stack((low == high).chunk(2, dim=-1)).all(0).repeat(1, 1, 2)
        assert settled.float().mean() > 0.9
        assert torch.equal(actual[settled], torch.cat((a - b, b + a), dim=-1).half()[settled])


def test_heads_of_zeros_and_squares_beyond_fp16_leave_no_infinity(place: Place) -> None:
    qkv, weights = world(3, 4, 24, FP16)
    qkv[:, 0] = 0
    qkv[:, 1:] *= 1e4
    assert float(qkv.abs().max()) > 2e4
    check(place, qkv, 2, weights)


@pytest.mark.parametrize(("num_rows", "dtype", "normed"), [(0, FP32, True), (23, BF16, True), (7, FP32, False)])
def test_keys_and_values_go_to_their_slots_with_the_same_bits_and_no_other_slot_is_touched(
    place: Place, num_rows: int, dtype: torch.dtype, normed: bool
) -> None:
    qkv, weights = world(num_rows, 8, 24, dtype)
    chosen = weights if normed else (None, None)
    turns = angles(num_rows, 24, dtype)
    q, *rows = turned(place, qkv, 4, chosen, turns)
    pool = torch.full((2, 3, 4, 16, 2, 24), torch.nan, dtype=dtype, device=place.device)  # [k or v, layer, page, ...]
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
    slots[::5] = -1
    expected = pool.cpu().clone()
    expected[:, 1].flatten(1, 2)[:, slots[slots >= 0]] = torch.stack(rows)[:, slots >= 0]
    on_device = moved((qkv, 4, Norms(*chosen, EPS), Turns(*turns)), place.device)
    with place.proved("qk_norm_rope"):
        found = qk_norm_rope(*on_device, Pages(pool[0, 1], pool[1, 1], slots.to(place.device)))
    assert torch.equal(found.cpu(), q)
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)
