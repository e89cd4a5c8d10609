"""FOCUS's importance against its formula in fp64, and its sum."""

from typing import Any

import pytest
import torch

from dsim.kernels.focus_importance import focus_importance

from .places import EVERYWHERE, Place


def world(
    num_masked: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """Sequences with that many masked tokens among as many others and one more, as arguments."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = [2 * m + 1 for m in num_masked]
    q = torch.randn(sum(num_rows), heads[0], head_dim, generator=generator).to(dtype)
    k = torch.randn(sum(num_rows), heads[1], head_dim, generator=generator).to(dtype)
    masked = torch.zeros(0, dtype=torch.int64)
    for s, m in enumerate(num_masked):
        own = torch.randperm(num_rows[s], generator=generator)[:m].sort().values
        masked = torch.cat([masked, sum(num_rows[:s]) + own])
    return [q, k, masked, torch.tensor([0, *num_masked]).cumsum(0).int()]


def by_definition(
    q: torch.Tensor, k: torch.Tensor, masked: torch.Tensor, masked_start: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """focus.md 3.3, a key and its neighbours at a time."""
    found = torch.zeros(len(masked), dtype=torch.float64)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for s in range(len(masked_start) - 1):
        rows = masked[masked_start[s] : masked_start[s + 1]]
        own = slice(int(masked_start[s]), int(masked_start[s + 1]))
        for h in range(q.shape[1]):
            scores = scale * q[rows, h].double() @ k[rows, h // (q.shape[1] // k.shape[1])].double().T
            pooled = [scores[:, max(0, j - 1) : j + 2].max(1).values for j in range(len(rows))]
            if pooled:
                found[own] += torch.stack(pooled, 1).softmax(1).sum(0)
    return found


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_masked", "heads", "head_dim", "dtype"),
    [
        ([0, 1, 2, 0, 31], (4, 2), 64, torch.float32),
        ([63], (3, 1), 24, torch.float32),
        ([32, 7], (4, 4), 128, torch.bfloat16),
        ([5, 33], (2, 1), 64, torch.float16),
        ([100], (2, 2), 16, torch.float32),
        ([], (2, 2), 16, torch.float32),
    ],
)
def test_importance_is_the_attention_that_a_masked_token_draws(
    place: Place, num_masked: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    arguments = world(num_masked, heads, head_dim, dtype)
    with place.proved("focus_importance"):
        found = focus_importance(*(t.to(place.device) for t in arguments))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), by_definition(*arguments), rtol=2e-5, atol=0)
    for s, m in enumerate(num_masked):
        assert float(found[sum(num_masked[:s]) :][:m].sum()) == pytest.approx(heads[0] * m, rel=1e-5)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_large_scores_stay_finite_and_the_same_call_gives_the_same_bits(place: Place) -> None:
    arguments = [t.to(place.device) for t in world([33, 3], (4, 2), 64, torch.float32)]
    with place.proved("focus_importance"):
        found, again = focus_importance(*arguments, scale=20.0), focus_importance(*arguments, scale=20.0)
    assert torch.equal(found, again)
    expected = by_definition(*(t.cpu() for t in arguments), scale=20.0)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: torch.zeros(6, 2, 8)}, r"k has shape \[6, 2, 8\], expected \[7, Hkv, 8\]"),
        ({1: torch.zeros(7, 3, 8)}, "q has 4 heads, expected a multiple of the 3 of k"),
        ({2: torch.tensor([1, 2, 7])}, "masked holds 7, expected 0 to 6"),
        ({2: torch.tensor([1, 2])}, r"masked_start is \[0, 3\], expected to rise from 0 to the 2 rows of masked"),
        ({3: torch.tensor([0, 3])}, r"masked_start is torch\.int64, expected torch\.int32"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[int, Any], message: str) -> None:
    arguments = dict(enumerate(world([3], (4, 2), 8, torch.float32)))
    with pytest.raises(ValueError, match=message):
        focus_importance(*{**arguments, **changes}.values())
