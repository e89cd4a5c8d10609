"""FOCUS's importance against its formula in fp64, and its sum."""

import pytest
import torch
from torch import Tensor

from dsim.kernels.focus_importance import focus_importance

from ..checks import cases
from .places import BF16, FP16, FP32, Place, normal, starts


def world(num_masked: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Sequences with that many masked tokens among as many others and one more, as arguments."""
    generator = torch.Generator().manual_seed(0)
    num_rows = [2 * m + 1 for m in num_masked]
    masked = torch.zeros(0, dtype=torch.int64)
    for s, m in enumerate(num_masked):
        own = torch.randperm(num_rows[s], generator=generator)[:m].sort().values
        masked = torch.cat([masked, sum(num_rows[:s]) + own])
    q, k = (normal(i, sum(num_rows), num, head_dim, dtype=dtype) for i, num in enumerate(heads))
    return [q, k, masked, starts(num_masked)]


def by_definition(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor) -> Tensor:
    """focus.md 3.3, a key and its neighbours at a time."""
    found = torch.zeros(len(masked), dtype=torch.float64)
    for s in range(len(masked_start) - 1):
        own = slice(int(masked_start[s]), int(masked_start[s + 1]))
        rows = masked[own]
        for h in range(q.shape[1]):
            scores = q.shape[2] ** -0.5 * q[rows, h].double() @ k[rows, h // (q.shape[1] // k.shape[1])].double().T
            pooled = [scores[:, max(0, j - 1) : j + 2].max(1).values for j in range(len(rows))]
            if pooled:
                found[own] += torch.stack(pooled, 1).softmax(1).sum(0)
    return found


@cases(
    "num_masked heads head_dim dtype",
        ([0, 1, 2, 0, 31], (4, 2), 64, FP32), ([63], (3, 1), 24, FP32), ([32, 7], (4, 4), 128, BF16),
        ([5, 33], (2, 1), 64, FP16), ([100], (2, 2), 16, FP32), ([], (2, 2), 16, FP32),
)  # fmt: skip
def test_importance_is_the_attention_that_a_masked_token_draws(
    place: Place, num_masked: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    arguments = world(num_masked, heads, head_dim, dtype)
    found = place.call(focus_importance, *arguments)
    assert found.dtype == FP32
    torch.testing.assert_close(found.double(), by_definition(*arguments), rtol=2e-5, atol=0)
    for s, m in enumerate(num_masked):
        assert float(found[sum(num_masked[:s]) :][:m].sum()) == pytest.approx(heads[0] * m, rel=1e-5)


def test_large_scores_stay_finite_and_the_same_call_gives_the_same_bits(place: Place) -> None:
    q, *keys = world([33, 3], (4, 2), 64, FP32)
    arguments = [160 * q, *keys]
    found, again = (place.call(focus_importance, *arguments) for _ in range(2))
    assert torch.equal(found, again)
    torch.testing.assert_close(found.double(), by_definition(*arguments), rtol=1e-3, atol=1e-3)
