"""Rows through their experts, against fp64, a pair at a time."""

import pytest
import torch
from torch import Tensor

from dsim.kernels.grouped_experts import grouped_experts
from dsim.kernels.grouped_experts import grouped_experts_kernel as kernel

from ..checks import cases
from .places import BF16, EVERYWHERE, FP16, FP32, KERNEL, Place, normal

C = (2 / torch.pi) ** 0.5  # of the approximation of gelu with tanh
OPENED = {"silu": lambda z: z * z.sigmoid(), "gelu": lambda z: z / 2 * (1 + (C * (z + 0.044715 * z**3)).tanh())}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def world(num_rows: int, num: int, top_k: int, width: int, ffn: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows, each's experts (all different) and their weights, and the matrices of `num` experts."""
    chance = torch.Generator().manual_seed(num_rows + num)
    experts = torch.rand(num_rows, num, generator=chance).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(num_rows, top_k, generator=chance)
    gate_up, down = normal(1, num, 2 * ffn, width) * width**-0.5, normal(2, num, width, ffn) * max(1, ffn) ** -0.5
    return [normal(3, num_rows, width, dtype=dtype), experts, weights, gate_up.to(dtype), down.to(dtype)]


def check(place: Place, given: list[Tensor], activation: str = "silu", read: int | None = None) -> None:
    """Against fp64; of the experts only the first `read` are."""
    expected = sum_of_experts(given, activation)
    if read is not None:
        given[3][read:], given[4][read:] = torch.nan, torch.nan
    near(place.call(grouped_experts, *given, activation), expected, given[0])


def sum_of_experts(given: list[Tensor], activation: str) -> Tensor:
    """In fp64, a pair at a time."""
    x, experts, weights, gate_up, down = given
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            expected[row] += weight * (down[expert].double() @ (OPENED[activation](gate) * up))
    return expected


def near(out: Tensor, expected: Tensor, x: Tensor) -> None:
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    # Weights add up to at most top_k, and each of three products is rounded once: by 2^-8 in bf16, 2^-11 in fp16.
    limit = {FP32: 1e-5, BF16: 8 * 2**-8, FP16: 8 * 2**-11}[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", EVERYWHERE)
@cases(
    "num_rows num_experts top_k width ffn dtype activation",
        (1, 1, 1, 8, 2, FP32, "gelu"), (63, 5, 2, 48, 66, FP32, "silu"), (20, 33, 8, 70, 30, FP32, "silu"),
        (40, 3, 3, 130, 5, FP32, "gelu"), (37, 9, 4, 48, 66, BF16, "gelu"), (37, 9, 4, 48, 66, FP16, "silu"),
        (0, 4, 2, 16, 8, FP32, "gelu"),
)  # fmt: skip
def test_a_row_gets_the_weighted_sum_of_its_experts(
    place: Place, num_rows: int, num_experts: int, top_k: int, width: int, ffn: int, dtype: torch.dtype,
    activation: str,
) -> None:  # fmt: skip
    check(place, world(num_rows, num_experts, top_k, width, ffn, dtype), activation)


def test_all_rows_may_have_the_same_experts_and_no_other_is_read(place: Place) -> None:
    few, one = world(30, 6, 2, 32, 24, FP32), world(50, 4, 1, 32, 24, FP32)
    few[1] %= 3
    check(place, few, read=3)
    one[1][:] = 2
    check(place, one, read=3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize("rows", [*kernel.TILES, 0])
def test_tiles_of_any_size_give_the_same(place: Place, rows: int) -> None:
    # More tiles than a group, part-filled ones, one expert of many rows and one of none; no size fits a tile.
    given = world(80, 5, 2, 72, 84, BF16)
    given[1][:70, 0], given[1][given[1] == 4] = 1, 0
    given[1][:70, 1] = torch.arange(70) % 3 + 1
    expected = sum_of_experts(given, "silu")
    on_device = [x.to(place.device) for x in given]
    tile = kernel.TILES.get(rows, kernel.WIDE_TILE)  # benchmarks/kernel_ceilings.py --tune checks others
    near(kernel.grouped_experts(*on_device, "silu", tile).cpu(), expected, given[0])


def test_the_tile_holds_the_rows_of_most_experts() -> None:
    # A row has 8 of 128 experts: 32 rows give an expert 2, and so on.
    mean_of = {rows: rows * 8 // 128 for rows in (32, 128, 256, 512, 1024, 2048, 8192)}
    found = {rows: kernel.rows_of_a_tile(rows * 8, 128) for rows in mean_of}
    assert found == {32: 16, 128: 16, 256: 32, 512: 64, 1024: 128, 2048: 128, 8192: 128}
