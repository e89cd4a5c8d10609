"""MaskKV's votes against the whole attention matrix in fp64, and their sums."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsim.kernels.mask_vote import mask_vote

from .places import BF16, FP16, FP32, Place, int32, normal, starts


def world(
    sequences: list[tuple[int, int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Sequences as (length, prompt, number masked); masked ones lie anywhere after the prompt."""
    generator = torch.Generator().manual_seed(len(sequences))
    lengths = [s[0] for s in sequences]
    masked = torch.zeros(0, dtype=torch.int64)
    for row, (length, prompt, num) in zip(starts(lengths).tolist(), sequences, strict=False):
        own = torch.randperm(length - prompt, generator=generator)[:num].sort().values
        masked = torch.cat([masked, row + prompt + own])
    q, k = (normal(i, sum(lengths), num, head_dim, dtype=dtype) for i, num in enumerate(heads))
    return [q, k, masked, starts([s[2] for s in sequences]), starts(lengths), int32(*(s[1] for s in sequences))]


def by_definition(
    q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor, key_start: Tensor, num_prompt: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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


@pytest.mark.parametrize(
    ("sequences", "heads", "head_dim", "dtype"),
    [
        ([(63, 40, 20), (1, 0, 1), (0, 0, 0), (9, 4, 0), (130, 1, 33)], (4, 2), 64, FP32),
        ([(63, 30, 33), (65, 0, 32)], (2, 2), 128, BF16),
        ([(200, 137, 63)], (3, 1), 24, FP16),
        ([], (2, 1), 16, FP32),
    ],
)
def test_votes_are_the_column_sums_of_the_attention_of_masked_queries(
    place: Place, sequences: list[Any], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    given = world(sequences, heads, head_dim, dtype)
    found, again = (place.call(mask_vote, *given) for _ in range(2))
    for own, twice, expected in zip(found, again, by_definition(*given), strict=True):
        assert own.dtype == FP32
        assert torch.equal(own, twice)
        torch.testing.assert_close(own.double(), expected, rtol=2e-5, atol=1e-7)
    for first, (length, _, num_masked) in zip(given[4].tolist(), sequences, strict=False):
        assert float(found[0][:, first:][:, :length].sum()) == pytest.approx(heads[0] * num_masked, rel=1e-5)
