"""A stream with a normed output added, against fp64."""

import pytest
import torch

from dsim.kernels.add_rms_norm import sandwich_norm

from .places import BF16, FP32, Place, normal

EPS = 1e-3
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
    found = place.call(sandwich_norm, x, parts, weights if num_parts == 2 else None, weight, scale, after, EPS)

    def normed(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (width,), by.double(), EPS)

    total = parts[0].double()
    if num_parts == 2:
        total = sum(normed(part.double(), by) for part, by in zip(parts, weights, strict=True))
    total = (x.double() + normed(total, weight)) * (0.7 if scaled else 1.0)
    for got, want in zip(found, (total, normed(total, after)), strict=True):
        assert (got.dtype, got.is_contiguous(), got.shape) == (dtype, True, want.shape)
        if want.numel():
            assert float((got.double() - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max())
