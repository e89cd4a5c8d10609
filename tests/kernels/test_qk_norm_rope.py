"""Heads normed in fp64 and turned as complex numbers, and values as they came."""

from typing import Any

import pytest
import torch

from dsim.kernels.qk_norm_rope import qk_norm_rope

from .places import EVERYWHERE, Place

# A turn mixes a pair of components, so errors are relative to the pair's length. What is rounded: the normed pair, both
# products of a turn (by the reference alone) and their sum, each by at most half a unit of the length's last place:
# three times 2^-11 in fp16, 2^-8 in bf16. The kernel rounds twice, but under the interpreter, which cuts off what does
# not fit in bf16, by whole units: four times 2^-8. Each step in fp32 adds some 2^-24, whatever the dtype.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 4 * 2**-8, torch.float16: 3 * 2**-11}
IN_FP32 = 2**-20
EPS = 0.25  # enough to be seen


def expected(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[N, heads, D / 2] of complex numbers: component i and, imaginary, i + D / 2."""
    x = x.cpu().double()
    if weight is not None:
        x = torch.nn.functional.rms_norm(x, weight.shape, weight.cpu().double(), EPS)
    turn = torch.complex(cos.cpu().double(), sin.cpu().double())
    return torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.is_contiguous()
    error = (torch.complex(*actual.cpu().double().chunk(2, dim=-1)) - expected).abs()
    least = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    limit = (ROUNDING[actual.dtype] + IN_FP32) * expected.abs() + 4 * least
    assert (error <= limit).all(), float((error / limit).max())


def angles(num_rows: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.randint(0, 4000, (num_rows, 1), generator=torch.Generator().manual_seed(num_rows)).double()
    turns = positions * 1e4 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return turns.cos().to(dtype).to(device), turns.sin().to(dtype).to(device)


def check(place: Place, qkv: torch.Tensor, num_heads: int, weights: tuple[torch.Tensor | None, ...]) -> None:
    num_rows, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    inputs = [qkv, *weights, *angles(num_rows, head_dim, qkv.dtype, place.device)]
    before = [t if t is None else t.clone() for t in inputs]
    with place.proved("qk_norm_rope"):
        q, k, v = qk_norm_rope(inputs[0], num_heads, inputs[1], inputs[2], EPS, *inputs[3:])
    for tensor, was in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, was)
    assert (q.dtype, k.dtype, v.dtype) == (qkv.dtype,) * 3
    assert (q.shape, k.shape) == ((num_rows, num_heads, head_dim), (num_rows, num_kv_heads, head_dim))
    near(q, expected(qkv[:, :num_heads], inputs[1], *inputs[3:]))
    near(k, expected(qkv[:, num_heads : num_heads + num_kv_heads], inputs[2], *inputs[3:]))
    assert torch.equal(v, qkv[:, num_heads + num_kv_heads :])
    assert v.is_contiguous()


def world(
    place: Place, num_rows: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(num_rows, heads, head_dim, generator=generator)
    weights = 1 + torch.randn(2, head_dim, generator=generator) / 2
    return qkv.to(dtype).to(place.device), tuple(weights.to(dtype).to(place.device).unbind())


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "head_dim", "dtype", "normed"),
    [
        (0, 4, 2, 64, torch.float32, True),
        (1, 1, 1, 24, torch.float32, True),
        (1, 3, 1, 2, torch.float16, True),
        (63, 4, 2, 64, torch.float16, True),
        (63, 3, 1, 24, torch.bfloat16, True),
        (7, 32, 8, 128, torch.bfloat16, True),
        (2, 32, 8, 128, torch.float32, True),
        (1, 32, 8, 64, torch.float16, False),
        (63, 4, 2, 128, torch.bfloat16, False),
        (200, 1, 1, 24, torch.float32, False),
    ],
)
def test_heads_are_normed_and_turned_and_values_moved(
    place: Place, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    qkv, weights = world(place, num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype)
    check(place, qkv, num_heads, weights if normed else (None, None))


@pytest.mark.parametrize("place", EVERYWHERE)
def test_heads_may_be_columns_of_a_projection_and_angles_of_a_table(place: Place) -> None:
    generator = torch.Generator().manual_seed(3)
    projection = torch.randn(5, 9 * 24, generator=generator).to(place.device)
    check(place, projection.view(5, 9, 24)[:, 1:9], 4, (None, None))
    check(place, projection.view(5, 3, 72)[..., 30:54], 1, (projection[0, 7:31], projection[1, :24]))
    check(place, projection.view(5, 9, 24)[::2], 3, tuple(projection[:2, 1:25].unbind()))
    table = torch.randn(5, 40, generator=generator).to(place.device)
    cos, sin = table[:, 3:15], projection[:, 100:112]
    qkv = projection.view(5, 9, 24)
    with place.proved("qk_norm_rope"):
        q, k, _ = qk_norm_rope(qkv, 7, None, None, EPS, cos, sin)
    near(q, expected(qkv[:, :7], None, cos, sin))
    near(k, expected(qkv[:, 7:8], None, cos, sin))


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_normed_head_is_rounded_before_it_is_turned(place: Place) -> None:
    # With 1 for both cosine and sine, products are exact and nothing but the head and the sum is rounded. Where fp32
    # leaves no doubt of what a head rounds to, the sum is certain.
    qkv, weights = world(place, 8, 8, 64, torch.float16)
    ones = torch.ones(8, 32, dtype=torch.float16, device=place.device)
    with place.proved("qk_norm_rope"):
        q, k, _ = qk_norm_rope(qkv, 4, *weights, EPS, ones, ones)
    for turned, heads, weight in ((q, qkv[:, :4], weights[0]), (k, qkv[:, 4:6], weights[1])):
        normed = torch.nn.functional.rms_norm(heads.cpu().double(), (64,), weight.cpu().double(), EPS)
        low, high = ((normed * (1 + error)).half() for error in (-1e-5, 1e-5))
        a, b = low.double().chunk(2, dim=-1)
        settled = torch.stack((low == high).chunk(2, dim=-1)).all(0).repeat(1, 1, 2)
        assert settled.float().mean() > 0.9
        assert torch.equal(turned.cpu()[settled], torch.cat((a - b, b + a), dim=-1).half()[settled])


@pytest.mark.parametrize("place", EVERYWHERE)
def test_heads_of_zeros_and_squares_beyond_fp16_leave_no_infinity(place: Place) -> None:
    qkv, weights = world(place, 3, 4, 24, torch.float16)
    qkv[:, 0] = 0
    qkv[:, 1:] *= 1e4
    assert float(qkv.abs().max()) > 2e4
    check(place, qkv, 2, weights)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_position_0_turns_nothing(place: Place, dtype: torch.dtype) -> None:
    qkv, _ = world(place, 5, 6, 24, dtype)
    cos = torch.ones(5, 12, dtype=dtype, device=place.device)
    with place.proved("qk_norm_rope"):
        q, k, v = qk_norm_rope(qkv, 4, None, None, EPS, cos, torch.zeros_like(cos))
    assert torch.equal(torch.cat((q, k, v), dim=1), qkv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(3, 64)}, r"qkv has shape \[3, 64\], expected \[N, heads, D\]"),
        ({"num_heads": 0}, "num_heads is 0, expected .* 8 "),
        ({"num_heads": 3}, "num_heads is 3, expected .* 8 "),
        ({"qkv": torch.zeros(3, 7, 8)}, "num_heads is 4, expected .* 7 "),
        ({"qkv": torch.zeros(3, 8, 7)}, "qkv has heads of 7, expected an even number"),
        ({"q_weight": None}, "q_weight or k_weight is None, expected both or neither"),
        ({"q_weight": torch.ones(4)}, r"q_weight has shape \[4\], expected \[8\]"),
        ({"k_weight": torch.ones(1, 8)}, r"k_weight has shape \[1, 8\], expected \[8\]"),
        ({"cos": torch.ones(3, 8)}, r"cos has shape \[3, 8\], expected \[3, 4\]"),
        ({"sin": torch.ones(2, 4)}, r"sin has shape \[2, 4\], expected \[3, 4\]"),
        ({"qkv": torch.zeros(3, 8, 8).double()}, "qkv is torch.float64, expected torch.float32 or torch.bfloat16 or"),
        ({"cos": torch.ones(3, 4).half()}, "cos is torch.float16, expected torch.float32"),
        ({"sin": torch.ones(3, 4).double()}, "sin is torch.float64, expected torch.float32"),
        ({"q_weight": torch.ones(8).half()}, "q_weight is torch.float16, expected torch.float32"),
        ({"k_weight": torch.ones(8).bfloat16()}, "k_weight is torch.bfloat16, expected torch.float32"),
        ({"cos": torch.ones(3, 4, device="meta")}, "cos is on meta, expected cpu"),
        ({"k_weight": torch.ones(8, device="meta")}, "k_weight is on meta, expected cpu"),
        ({"qkv": torch.zeros(3, 8, 16)[..., ::2]}, "qkv has stride 2 in its last dimension, expected 1"),
        ({"cos": torch.ones(4, 3).T}, "cos has stride 3 in its last dimension, expected 1"),
        ({"sin": torch.ones(4, 3).T}, "sin has stride 3 in its last dimension, expected 1"),
        ({"q_weight": torch.ones(16)[::2]}, "q_weight has stride 2 in its last dimension, expected 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "qkv": torch.zeros(3, 8, 8),
        "num_heads": 4,
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
        "eps": 1e-6,
        "cos": torch.ones(3, 4),
        "sin": torch.zeros(3, 4),
    }
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**{**arguments, **changes})
