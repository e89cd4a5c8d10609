"""The residual sum and its norm, against fp64, over widths and heights of ugly sizes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.kernels.add_rms_norm import add_rms_norm

from .places import EVERYWHERE, Place

# A result is rounded once: by half a unit of its last place, relative to it 2^-11, in fp16, and in bf16 by a whole one,
# 2^-7, since the interpreter cuts off what does not fit. Each step in fp32 adds some 2^-24, whatever the dtype.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-11}
IN_FP32 = 2**-20


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` is in fp64, `actual` dense; its least number is the least error."""
    assert actual.is_contiguous()
    least = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=ROUNDING[actual.dtype] + IN_FP32, atol=least)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.cpu().double()
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


def check(place: Place, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> None:
    """The sum against fp64, and the norm against that of the sum which the next sub-layer will find."""
    inputs = [t if t is None else t.to(place.device) for t in (x, added, weight)]
    before = [t if t is None else t.clone() for t in inputs]
    with place.proved("add_rms_norm"):
        total, normed = add_rms_norm(*inputs, eps)
    for tensor, was in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, was)
    assert (total.dtype, normed.dtype, total.shape, normed.shape) == (x.dtype, x.dtype, x.shape, x.shape)
    if added is None:
        assert total is inputs[0]
    else:
        near(total, x.double() + added.double())
    near(normed, norm(total, weight, eps))


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"),
    [
        (0, 100, torch.bfloat16),
        (1, 1, torch.float16),
        (63, 1, torch.float32),
        (200, 100, torch.float16),
        (63, 4096, torch.bfloat16),
        (1, 4096, torch.float16),
        (63, 5000, torch.float32),
        (63, 5000, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("adds", [True, False], ids=["sum", "norm alone"])
def test_the_sum_and_its_norm_are_those_of_fp64(
    place: Place, num_rows: int, width: int, dtype: torch.dtype, adds: bool
) -> None:
    generator = torch.Generator().manual_seed(width)
    x, added = (torch.randn(num_rows, width, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(width, generator=generator) / 2).to(dtype)
    check(place, x, added if adds else None, weight, eps=0.25)  # enough to be seen


@pytest.mark.parametrize("place", EVERYWHERE)
def test_rows_may_be_columns_of_wider_tensors(place: Place) -> None:
    generator = torch.Generator().manual_seed(0)
    wide, wider = (torch.randn(7, width, generator=generator).to(place.device) for width in (300, 500))
    x, added, weight = wide[:, 100:200], wider[:, 3:103], wide[6, 200:]
    with place.proved("add_rms_norm"):
        total, normed = add_rms_norm(x, added, weight, 1e-6)
        same, alone = add_rms_norm(x, None, weight, 1e-6)
    near(total, x.cpu().double() + added.cpu().double())
    near(normed, norm(total, weight.cpu(), 1e-6))
    assert same is x
    near(alone, norm(x, weight.cpu(), 1e-6))


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_what_is_normed_is_the_sum_as_its_dtype_holds_it(place: Place, dtype: torch.dtype, large: int) -> None:
    # large + 1 is halfway to the next number and rounds to large: all values of the sum are alike, and their norm is 1.
    # Of the sum in fp32 the first would be 1 - 1 / large, the next number below 1 or more.
    x, added = (torch.full((2, 100), value, dtype=dtype, device=place.device) for value in (large, 1))
    added[:, 0] = 0
    with place.proved("add_rms_norm"):
        total, normed = add_rms_norm(x, added, torch.ones(100, dtype=dtype, device=place.device), 0.0)
    assert (total == large).all()
    assert (normed == 1).all()


@pytest.mark.parametrize("place", EVERYWHERE)
def test_rows_of_zeros_and_squares_beyond_fp16_leave_no_infinity(place: Place) -> None:
    x = torch.zeros(4, 100, dtype=torch.float16)
    x[1:3] = 1e4 * torch.randn(2, 100, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    x[3] = 6e-8  # the least there is: its square is nothing beside eps
    check(place, x, x, torch.full((100,), 0.5, dtype=torch.float16), 1e-6)
    with place.proved("add_rms_norm"):
        normed = add_rms_norm(x.to(place.device), None, torch.ones(100).half().to(place.device), 1e-6)[1]
    assert normed.isfinite().all()
    assert not normed[0].any()


@pytest.mark.parametrize("place", EVERYWHERE)
@given(scale=st.integers(-30, 30), width=st.integers(1, 300), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_a_norm_has_mean_square_1_whatever_the_scale(place: Place, scale: int, width: int, seed: int) -> None:
    x = 2.0**scale * torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    with place.proved("add_rms_norm"):
        _, normed = add_rms_norm(x.to(place.device), None, torch.ones(width, device=place.device), 0.0)
    torch.testing.assert_close(normed.double().square().mean(1).cpu(), torch.ones(2).double(), rtol=2 * IN_FP32, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(8)}, r"x has shape \[8\], expected \[N, h\]"),
        ({"weight": torch.ones(4)}, r"weight has shape \[4\], expected \[8\]"),
        ({"weight": torch.ones(1, 8)}, r"weight has shape \[1, 8\], expected \[8\]"),
        ({"added": torch.zeros(1, 8)}, r"added has shape \[1, 8\], expected \[3, 8\]"),
        ({"x": torch.zeros(3, 8).long()}, "x is torch.int64, expected torch.float32 or torch.bfloat16 or"),
        ({"weight": torch.ones(8).half()}, "weight is torch.float16, expected torch.float32"),
        ({"added": torch.zeros(3, 8).bfloat16()}, "added is torch.bfloat16, expected torch.float32"),
        ({"added": torch.zeros(3, 8, device="meta")}, "added is on meta, expected cpu"),
        ({"weight": torch.ones(8, device="meta")}, "weight is on meta, expected cpu"),
        ({"x": torch.zeros(8, 3).T}, "x has stride 3 in its last dimension, expected 1"),
        ({"added": torch.zeros(8, 3).T}, "added has stride 3 in its last dimension, expected 1"),
        ({"weight": torch.ones(16)[::2]}, "weight has stride 2 in its last dimension, expected 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.zeros(3, 8), "added": torch.zeros(3, 8), "weight": torch.ones(8), "eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**{**arguments, **changes})
