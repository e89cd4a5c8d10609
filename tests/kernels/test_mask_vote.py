"""MaskKV's votes against the whole attention matrix in fp64, and their sums."""

from typing import Any

import pytest
import torch

from dsim.kernels.mask_vote import mask_vote

from .places import EVERYWHERE, Place


def world(
    sequences: list[tuple[int, int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Sequences as (length, prompt, number masked); masked ones lie anywhere after the prompt."""
    generator = torch.Generator().manual_seed(len(sequences))
    num_keys = sum(s[0] for s in sequences)
    masked, row = [], 0
    for length, prompt, num_masked in sequences:
        masked += (
            row + prompt + torch.randperm(length - prompt, generator=generator)[:num_masked].sort().values
        ).tolist()
        row += length
    return {
        "q": torch.randn(num_keys, heads[0], head_dim, generator=generator).to(dtype),
        "k": torch.randn(num_keys, heads[1], head_dim, generator=generator).to(dtype),
        "masked": torch.tensor(masked, dtype=torch.int64),
        "masked_start": torch.tensor([0, *(s[2] for s in sequences)]).cumsum(0).int(),
        "key_start": torch.tensor([0, *(s[0] for s in sequences)]).cumsum(0).int(),
        "num_prompt": torch.tensor([s[1] for s in sequences], dtype=torch.int32),
    }


def by_definition(
    q: torch.Tensor, k: torch.Tensor, masked: torch.Tensor, masked_start: torch.Tensor, key_start: torch.Tensor,
    num_prompt: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    num_kv_heads = k.shape[1]
    votes = torch.zeros(num_kv_heads, len(k), dtype=torch.float64)
    to_prompt, to_masked = torch.zeros(2, len(num_prompt), num_kv_heads, dtype=torch.float64)
    for s, prompt in enumerate(num_prompt.tolist()):
        first, last = key_start[s : s + 2].tolist()
        rows = masked[masked_start[s] : masked_start[s + 1]]
        for h in range(q.shape[1]):
            to = h // (q.shape[1] // num_kv_heads)
            weights = (q[rows, h].double() @ k[first:last, to].double().T * q.shape[2] ** -0.5).softmax(1)
            votes[to, first:last] += weights.sum(0)
            to_prompt[s, to] += weights[:, :prompt].sum()
            to_masked[s, to] += weights[:, rows - first].sum()
    return votes, to_prompt, to_masked


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("sequences", "heads", "head_dim", "dtype"),
    [
        ([(63, 40, 20), (1, 0, 1), (0, 0, 0), (9, 4, 0), (130, 1, 33)], (4, 2), 64, torch.float32),
        ([(63, 30, 33), (65, 0, 32)], (2, 2), 128, torch.bfloat16),
        ([(200, 137, 63)], (3, 1), 24, torch.float16),
        ([], (2, 1), 16, torch.float32),
    ],
)
def test_votes_are_the_column_sums_of_the_attention_of_masked_queries(
    place: Place, sequences: list[Any], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    given = world(sequences, heads, head_dim, dtype)
    with place.proved("mask_vote"):
        found = mask_vote(**{name: tensor.to(place.device) for name, tensor in given.items()})
    for own, expected in zip(found, by_definition(**given), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.cpu().double(), expected, rtol=2e-5, atol=1e-7)
    for s, (length, _, num_masked) in enumerate(sequences):
        own = found[0][:, sum(q[0] for q in sequences[:s]) :][:, :length]
        assert float(own.sum()) == pytest.approx(heads[0] * num_masked, rel=1e-5)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_the_same_call_gives_the_same_bits(place: Place) -> None:
    given = {n: t.to(place.device) for n, t in world([(100, 50, 40)], (4, 2), 64, torch.float32).items()}
    with place.proved("mask_vote"):
        first, again = mask_vote(**given), mask_vote(**given)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(8, 2, 16)}, r"k has shape \[8, 2, 16\], expected \[9, Hkv, 16\]"),
        ({"masked": torch.tensor([9])}, "masked holds 9, expected 0 to 8"),
        ({"num_prompt": torch.tensor([10], dtype=torch.int32)}, r"num_prompt\[0\] is 10, expected 0 to 9"),
        ({"key_start": torch.tensor([1, 9], dtype=torch.int32)}, r"key_start is \[1, 9\], expected to rise from 0 to"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    given = world([(9, 4, 1)], (4, 2), 16, torch.float32)
    with pytest.raises(ValueError, match=message):
        mask_vote(**{**given, **changes})
