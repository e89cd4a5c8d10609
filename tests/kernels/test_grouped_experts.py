"""Rows through their experts, against fp64, a pair at a time."""

import pytest
import torch

from dsim.kernels.grouped_experts import grouped_experts

from .places import EVERYWHERE, Place

C = (2 / torch.pi) ** 0.5  # of the approximation of gelu with tanh

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def world(
    num_rows: int, num_experts: int, top_k: int, width: int, ffn: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, each's experts (all different) and their weights, and the experts' matrices."""
    chance = torch.Generator().manual_seed(num_rows + num_experts)
    x = torch.randn(num_rows, width, generator=chance)
    experts = torch.rand(num_rows, num_experts, generator=chance).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(num_rows, top_k, generator=chance)
    gate_up = torch.randn(num_experts, 2 * ffn, width, generator=chance) * width**-0.5
    down = torch.randn(num_experts, width, ffn, generator=chance) * max(1, ffn) ** -0.5
    return x.to(dtype), experts, weights, gate_up.to(dtype), down.to(dtype)


def plain(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:  # fmt: skip
    opened = {"silu": lambda z: z * z.sigmoid(), "gelu": lambda z: z / 2 * (1 + (C * (z + 0.044715 * z**3)).tanh())}
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            out[row] += weight * (down[expert].double() @ (opened[activation](gate) * up))
    return out


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "width", "ffn", "dtype", "activation"),
    [
        (1, 1, 1, 8, 2, torch.float32, "gelu"),
        (63, 5, 2, 48, 66, torch.float32, "silu"),
        (20, 33, 8, 70, 30, torch.float32, "silu"),
        (40, 3, 3, 130, 5, torch.float32, "gelu"),
        (37, 9, 4, 48, 66, torch.bfloat16, "gelu"),
        (37, 9, 4, 48, 66, torch.float16, "silu"),
        (0, 4, 2, 16, 8, torch.float32, "gelu"),
    ],
)
def test_a_row_gets_the_weighted_sum_of_its_experts(
    place: Place, num_rows: int, num_experts: int, top_k: int, width: int, ffn: int, dtype: torch.dtype,
    activation: str,
) -> None:  # fmt: skip
    given = world(num_rows, num_experts, top_k, width, ffn, dtype)
    with place.proved("grouped_experts"):
        out = grouped_experts(*(tensor.to(place.device) for tensor in given), activation)
    assert (out.dtype, out.shape) == (dtype, given[0].shape)
    # Weights add up to at most top_k, and each of three products is rounded once: by 2^-8 in bf16, 2^-11 in fp16.
    near = {torch.float32: 1e-5, torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-11}[dtype]
    torch.testing.assert_close(out.cpu().double(), plain(*given, activation), rtol=near, atol=near)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_an_expert_that_no_row_has_is_never_read(place: Place) -> None:
    x, experts, weights, gate_up, down = world(30, 6, 2, 32, 24, torch.float32)
    experts = experts % 3
    expected = plain(x, experts, weights, gate_up, down)
    gate_up[3:], down[3:] = torch.nan, torch.nan
    with place.proved("grouped_experts"):
        out = grouped_experts(*(tensor.to(place.device) for tensor in (x, experts, weights, gate_up, down)))
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_all_rows_may_have_the_same_expert(place: Place) -> None:
    x, experts, weights, gate_up, down = world(50, 4, 1, 32, 24, torch.float32)
    experts = torch.full_like(experts, 2)
    with place.proved("grouped_experts"):
        out = grouped_experts(*(tensor.to(place.device) for tensor in (x, experts, weights, gate_up, down)))
    torch.testing.assert_close(out.cpu().double(), plain(x, experts, weights, gate_up, down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(8)}, r"x has shape \[8\], expected \[N, h\]"),
        ({1: torch.zeros(3, 2).long()}, r"experts has shape \[3, 2\], expected \[4, k\]"),
        ({1: torch.zeros(4, 2).int()}, "experts is torch.int32, expected torch.int64"),
        ({2: torch.zeros(4, 3)}, r"weights has shape \[4, 3\], expected \[4, 2\]"),
        ({2: torch.zeros(4, 2).half()}, "weights is torch.float16, expected torch.float32"),
        ({3: torch.zeros(5, 6, 9)}, r"gate_up has shape \[5, 6, 9\], expected \[E, 2f, 8\]"),
        ({3: torch.zeros(5, 7, 8)}, "gate_up has 7 rows an expert, expected an even number"),
        ({4: torch.zeros(5, 8, 4)}, r"down has shape \[5, 8, 4\], expected \[5, 8, 3\]"),
        ({4: torch.zeros(5, 8, 3).half()}, "down is torch.float16, expected torch.float32"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(change: dict[int, torch.Tensor], message: str) -> None:
    given = list(world(4, 5, 2, 8, 3, torch.float32))
    for i, tensor in change.items():
        given[i] = tensor
    with pytest.raises(ValueError, match=message):
        grouped_experts(*given)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'relu', expected silu or gelu"):
        grouped_experts(*world(4, 5, 2, 8, 3, torch.float32), "relu")
