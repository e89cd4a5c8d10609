"""The keys that sparse caches keep: the engine's rule, and votes against the whole attention matrix in fp64."""

import numpy as np
import pytest
import torch

from dsim.engine import pooled_topk as rule
from dsim.live.selection import kept_by_score, votes_of

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("length", "start", "block", "num", "heads", "pool"),
    [(40, 16, 8, 16, (4, 2), 3), (9, 0, 8, 1, (4, 2), 3), (300, 128, 32, 134, (3, 1), 5), (63, 32, 4, 59, (2, 2), 1)],
)
def test_the_kept_keys_are_those_of_the_engines_rule(
    length: int, start: int, block: int, num: int, heads: tuple[int, int], pool: int, shared: bool
) -> None:
    chance = torch.Generator().manual_seed(length)
    # Of integers, so that every score is exact, and of few, so that many tie.
    q, k = (
        torch.randint(-2, 3, (rows, own, 8), generator=chance).float()
        for rows, own in zip((block, length), heads, strict=True)
    )
    candidates = np.delete(np.arange(length), slice(start, start + block))
    keys = k[torch.from_numpy(candidates)].double().repeat_interleave(heads[0] // heads[1], 1)
    scores = torch.einsum("hd,khd->hk", q.double().mean(0), keys).numpy().astype(np.float32)
    expected = candidates[rule.kept(rule.merged(scores, heads[1], shared), num, pool)]
    found = kept_by_score(q, k, start, num, pool, shared)
    assert found.shape == (num, heads[1])
    assert found.T.tolist() == np.broadcast_to(expected, (heads[1], num)).tolist()


@pytest.mark.parametrize(("length", "prompt", "heads", "dtype"), [(63, 40, (4, 2), FP32), (200, 137, (3, 1), BF16)])
def test_votes_are_the_column_sums_of_the_attention_of_masked_queries(
    length: int, prompt: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    chance = torch.Generator().manual_seed(length)
    q, k = (torch.randn(length, num, 16, generator=chance).to(dtype) for num in heads)
    expected = torch.zeros(heads[1], length, dtype=torch.float64)
    for head in range(heads[0]):
        to = head // (heads[0] // heads[1])
        expected[to] += (q[prompt:, head].double() @ k[:, to].double().T / 4).softmax(1).sum(0)
    found = votes_of(q, k, prompt)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-7)
    assert float(found.sum()) == pytest.approx(heads[0] * (length - prompt), rel=1e-5)
