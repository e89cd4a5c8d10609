"""The residual sum and its norm, against fp64, over widths and heights of ugly sizes."""

import pytest
import torch

from dsim.kernels.add_rms_norm import add_rms_norm, sandwich_norm

from .places import BF16, EVERYWHERE, FP16, FP32, Place, normal

# A result is rounded once: by half a unit of its last place, relative to it 2^-11, in fp16, and in bf16 by a whole one,
# 2^-7, since the interpreter cuts off what does not fit. Each step in fp32 adds some 2^-24, whatever the dtype.
ROUNDING = {FP32: 0.0, BF16: 2**-7, FP16: 2**-11}
IN_FP32 = 2**-20


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` is in fp64, `actual` contiguous; its least number is the least error."""
    assert actual.is_contiguous()
    least = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[actual.dtype] + IN_FP32, atol=least)


def check(place: Place, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The sum against fp64, and the norm against that of the sum which the next sub-layer will find."""
    total, normed = place.call(add_rms_norm, x, added, weight, eps)
    assert (total.dtype, normed.dtype, total.shape, normed.shape) == (x.dtype, x.dtype, x.shape, x.shape)
    if added is None:
        assert torch.equal(total, x)
    else:
        near(total, x.double() + added.double())
    stream = total.double()
    near(normed, stream / (stream.square().mean(1, keepdim=True) + eps).sqrt() * weight.double())
    return normed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"),
    [
        (0, 100, BF16), (1, 1, FP16), (63, 1, FP32), (200, 100, FP16), (63, 4096, BF16), (1, 4096, FP16),
        (63, 5000, FP32), (63, 5000, BF16), (2, 32001, FP32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("adds", [True, False], ids=["sum", "norm alone"])
def test_the_sum_and_its_norm_are_those_of_fp64(
    place: Place, num_rows: int, width: int, dtype: torch.dtype, adds: bool
) -> None:
    x, added = normal(width, 2, num_rows, width, dtype=dtype).unbind()
    weight = (1 + normal(width + 1, width) / 2).to(dtype)
    check(place, x, added if adds else None, weight, eps=0.25)  # enough to be seen


def test_rows_may_be_columns_of_wider_tensors(place: Place) -> None:
    wide, wider = normal(0, 7, 300), normal(1, 7, 500)
    for added in (wider[:, 3:103], None):
        check(place, wide[:, 100:200], added, wide[6, 200:], 1e-6)


@pytest.mark.parametrize(("dtype", "large"), [(BF16, 256), (FP16, 2048)])
def test_what_is_normed_is_the_sum_as_its_dtype_holds_it(place: Place, dtype: torch.dtype, large: int) -> None:
    # large + 1 is halfway to the next number and rounds to large: all values of the sum are alike, and their norm is 1.
    # Of the sum in fp32 the first would be 1 - 1 / large, the next number below 1 or more.
    x, added = (torch.full((2, 100), value, dtype=dtype) for value in (large, 1))
    added[:, 0] = 0
    total, normed = place.call(add_rms_norm, x, added, torch.ones(100, dtype=dtype), 0.0)
    assert (total == large).all()
    assert (normed == 1).all()


def test_rows_of_zeros_and_squares_beyond_fp16_leave_no_infinity(place: Place) -> None:
    x = torch.zeros(4, 100, dtype=FP16)
    x[1:3] = 1e4 * normal(1, 2, 100).clamp(-2, 2)
    x[3] = 6e-8  # the least there is: its square is nothing compared with eps
    check(place, x, x, torch.full((100,), 0.5, dtype=FP16), 1e-6)
    normed = check(place, x, None, torch.ones(100, dtype=FP16), 1e-6)
    assert normed.isfinite().all()
    assert not normed[0].any()


# ---- a stream with normed parts added -----------------------------------------------------------------------------

SANDWICH_EPS = 1e-3
# Each of four roundings is by at most a unit of the last place under the interpreter, which truncates.
TOLERANCE = {FP32: 2e-6, BF16: 5 * 2**-8}


@pytest.mark.parametrize(
    ("num_rows", "width", "num_parts", "scaled", "dtype"),
    [(5, 100, 1, False, FP32), (3, 63, 2, True, FP32), (2, 2816, 2, True, BF16), (0, 8, 1, False, FP32)],
)
def test_the_sum_and_its_norms_are_those_of_fp64(
    place: Place, num_rows: int, width: int, num_parts: int, scaled: bool, dtype: torch.dtype
) -> None:
    x, *parts = normal(width, 1 + num_parts, num_rows, width + 5, dtype=dtype)[..., :width]
    weights, weight, after = normal(1, 2, width), normal(2, width), normal(3, width)
    scale = torch.tensor([0.7]) if scaled else None
    found = place.call(sandwich_norm, x, parts, weights if num_parts == 2 else None, weight, scale, after, SANDWICH_EPS)

    def normed(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (width,), by.double(), SANDWICH_EPS)

    total = parts[0].double()
    if num_parts == 2:
        total = sum(normed(part.double(), by) for part, by in zip(parts, weights, strict=True))
    total = (x.double() + normed(total, weight)) * (0.7 if scaled else 1.0)
    for got, want in zip(found, (total, normed(total, after)), strict=True):
        assert (got.dtype, got.is_contiguous(), got.shape) == (dtype, True, want.shape)
        if want.numel():
            assert float((got.double() - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max())
