"""The gated input, against fp64, over widths and heights of ugly sizes."""

import pytest
import torch

from dsim.kernels.swiglu import swiglu

from .places import BF16, FP16, FP32, Place, normal

# The exponential of a gate that is shut overflows to infinity, whose reciprocal is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

# silu and the product are each rounded once: by half a unit of the last place, relative to the result 2^-11, in fp16,
# and in bf16 by a whole one, 2^-7, since the interpreter cuts off what does not fit. Each step in fp32 adds some 2^-24,
# and an exponential by way of powers of two, as on a GPU, |gate| times that. Where a gate's exponential overflows, its
# silu, less than 2^-121, is 0.
ROUNDING = {FP32: 0.0, BF16: 2**-7, FP16: 2**-11}
IN_FP32 = 2**-20


def check(place: Place, gate_up: torch.Tensor) -> None:
    """Against fp64, where the result is finite; otherwise its dtype must have no room for the product."""
    actual = place.call(swiglu, gate_up)
    assert (actual.is_contiguous(), actual.dtype) == (True, gate_up.dtype)
    kind = torch.finfo(actual.dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    beyond = expected.abs() > kind.max
    expected[beyond] = expected[beyond].sign() * torch.inf
    relative = 2 * ROUNDING[actual.dtype] + IN_FP32 + gate.abs().clamp(max=100) * 2**-23
    least = max(kind.smallest_normal * kind.eps, 2**-121)
    assert torch.equal(actual.double()[beyond], expected[beyond])
    error = (actual.double() - expected).abs()[~beyond]
    limit = (relative * expected.abs() + (up.abs() + 1) * least)[~beyond]
    assert (error <= limit).all(), (error / limit).max()


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "dtype"),
    [
        (0, 66, FP16), (1, 2, FP32), (200, 2, BF16), (63, 66, FP16), (63, 3000, FP32), (63, 3000, BF16),
        (3, 24576, FP16), (1, 64002, BF16), (63, 0, FP32),
    ],
)  # fmt: skip
def test_the_product_is_that_of_fp64(place: Place, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    check(place, 3 * normal(num_columns, num_rows, num_columns, dtype=dtype))


def test_rows_may_be_columns_of_a_wider_tensor(place: Place) -> None:
    check(place, normal(0, 5, 5000)[:, 7:3007])


def test_every_gate_of_fp16_is_rounded_before_it_is_multiplied(place: Place) -> None:
    # All 63488 finite numbers as gates. Where fp32 leaves no doubt of what silu rounds to, the product is certain.
    gate = torch.arange(-32768, 32768).short().view(FP16)
    gate = gate[gate.isfinite()].view(62, 1024)
    up = normal(2, *gate.shape, dtype=FP16)
    silu = gate.double() * gate.double().sigmoid()
    low, high = ((silu * (1 + error)).half() for error in (-1e-5, 1e-5))
    out = place.call(swiglu, torch.cat((gate, up), dim=1))
    settled = low == high
    assert settled.float().mean() > 0.9
    torch.testing.assert_close(out[settled], (low.double() * up.double()).half()[settled], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_gate_far_from_0_is_open_or_shut_and_never_nan(place: Place, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    gates = torch.tensor([100, -100, 88, -88, 89, -89, most, -most, 0, -0.0], dtype=dtype).expand(3, -1)
    check(place, torch.cat((gates, torch.tensor([[-3.0], [0.0], [1.0]]).to(dtype).expand(-1, 10)), dim=1))


def test_a_gate_may_be_gelu_s(place: Place) -> None:
    gate_up = 3 * normal(0, 5, 3000)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(place.call(swiglu, gate_up, "gelu").double(), expected, rtol=1e-5, atol=1e-6)
