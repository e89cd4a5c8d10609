"""What a gate lets through, against fp64, over widths and heights of ugly sizes."""

import pytest
import torch

from dsim.kernels.swiglu import swiglu

from .places import EVERYWHERE, Place

# The exponential of a gate that is shut overflows to infinity, whose reciprocal is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

# silu and the product are each rounded once: by half a unit of the last place, relative to the result 2^-11, in fp16,
# and in bf16 by a whole one, 2^-7, since the interpreter cuts off what does not fit. Each step in fp32 adds some 2^-24,
# and an exponential by way of powers of two, as on a GPU, |gate| times that. Where a gate's exponential overflows, its
# silu, less than 2^-121, is 0.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-11}
IN_FP32 = 2**-20


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.cpu().double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def near(actual: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Against fp64, where `actual` is finite; otherwise its dtype must have no room for the product."""
    assert actual.is_contiguous()
    expected, kind = gated(gate_up), torch.finfo(actual.dtype)
    gate, up = gate_up.cpu().double().abs().chunk(2, dim=-1)
    beyond = expected.abs() > kind.max
    expected[beyond] = expected[beyond].sign() * torch.inf
    relative = 2 * ROUNDING[actual.dtype] + IN_FP32 + gate.clamp(max=100) * 2**-23
    least = max(kind.smallest_normal * kind.eps, 2**-121)
    actual = actual.cpu().double()
    assert torch.equal(actual[beyond], expected[beyond])
    error, limit = (actual - expected).abs()[~beyond], (relative * expected.abs() + (up + 1) * least)[~beyond]
    assert (error <= limit).all(), (error / limit).max()


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "dtype"),
    [
        (0, 66, torch.float16),
        (1, 2, torch.float32),
        (200, 2, torch.bfloat16),
        (63, 66, torch.float16),
        (63, 3000, torch.float32),
        (63, 3000, torch.bfloat16),
        (3, 24576, torch.float16),
        (3, 24576, torch.bfloat16),
        (63, 0, torch.float32),
    ],
)
def test_the_product_is_that_of_fp64(place: Place, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(num_columns))).to(dtype)
    given = gate_up.to(place.device, copy=True)
    with place.proved("swiglu"):
        out = swiglu(given)
    assert torch.equal(given.cpu(), gate_up)
    assert (out.dtype, out.shape) == (dtype, (num_rows, num_columns // 2))
    near(out, gate_up)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_rows_may_be_columns_of_a_wider_tensor(place: Place) -> None:
    wide = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0)).to(place.device)
    with place.proved("swiglu"):
        out = swiglu(wide[:, 7:3007])
    near(out, wide[:, 7:3007])


@pytest.mark.parametrize("place", EVERYWHERE)
def test_every_gate_of_fp16_is_rounded_before_it_is_multiplied(place: Place) -> None:
    # All 63488 finite numbers as gates. Where fp32 leaves no doubt of what silu rounds to, the product is certain.
    gate = torch.arange(-32768, 32768).short().view(torch.float16)
    gate = gate[gate.isfinite()].view(62, 1024)
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(2)).half()
    silu = gate.double() * gate.double().sigmoid()
    low, high = ((silu * (1 + error)).half() for error in (-1e-5, 1e-5))
    with place.proved("swiglu"):
        out = swiglu(torch.cat((gate, up), dim=1).to(place.device)).cpu()
    settled = low == high
    assert settled.float().mean() > 0.9
    torch.testing.assert_close(out[settled], (low.double() * up.double()).half()[settled], rtol=0, atol=0)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gate_far_from_0_is_open_or_shut_and_never_nan(place: Place, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    gates = torch.tensor([[100, -100, 88, -88, 89, -89, most, -most, 0, -0.0]], dtype=dtype)
    for up in (-3.0, 0.0, 1.0):
        gate_up = torch.cat((gates, torch.full_like(gates, up)), dim=1)
        with place.proved("swiglu"):
            out = swiglu(gate_up.to(place.device))
        near(out, gate_up)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(8), r"gate_up has shape \[8\], expected \[N, 2f\]"),
        (torch.zeros(2, 3, 4), r"gate_up has shape \[2, 3, 4\], expected \[N, 2f\]"),
        (torch.zeros(3, 7), "gate_up has 7 columns, expected an even number"),
        (torch.zeros(3, 8).long(), "gate_up is torch.int64, expected torch.float32 or torch.bfloat16 or"),
        (torch.zeros(8, 4).T, "gate_up has stride 4 in its last dimension, expected 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(gate_up)
