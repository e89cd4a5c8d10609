"""What a sparse cache keeps: the engine's rule, the reference and the kernel agree, and pages hold what was chosen."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsim.kernels.pooled_topk_pack import Choice, pooled_topk_pack

from ..checks import cases
from ..reference import pooled_topk as rule
from .places import BF16, FP16, FP32, Place, int32, moved, normal, starts

PAGE = 16
World = tuple[Tensor, Tensor, Tensor, Choice]  # q, k, v


def world(
    sequences: list[tuple[int, int, int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype,
    pool: int = 3, shared: bool = False,
) -> World:  # fmt: skip
    """Sequences as (length, block start, block length, number kept), of integers, so that every score is exact."""
    generator = torch.Generator().manual_seed(0)
    held = [-(-num // PAGE) for *_, num in sequences]
    order = torch.randperm(sum(held) + 2, generator=generator).int()
    page_table = torch.full((len(sequences), max(held, default=0) + 1), -1, dtype=torch.int32)
    for s, first in enumerate(starts(held).tolist()[:-1]):
        page_table[s, : held[s]] = order[first : first + held[s]]
    lengths, blocks = [s[0] for s in sequences], [s[2] for s in sequences]
    q, k = (
        torch.randint(-4, 5, (rows, num, head_dim), generator=generator).to(dtype)
        for rows, num in zip((sum(blocks), sum(lengths)), heads, strict=True)
    )
    numbers = (int32(*(s[i] for s in sequences)) for i in (1, 3))
    choice = Choice(starts(blocks), starts(lengths), *numbers, page_table, pool, shared)
    return q, k, normal(1, *k.shape, dtype=dtype), choice


def check(place: Place, sample: World) -> None:
    """Against the rule applied to scores in fp64, and pages against the rule's choice, bit for bit."""
    q, k, v, choice = sample
    num_kv_heads, num_pages = k.shape[1], max(map(max, choice.page_table.tolist()), default=0) + 2
    pages = torch.full((2, num_pages, PAGE, *k.shape[1:]), torch.nan, dtype=k.dtype)
    at_place, written = moved(sample, place.device), pages.to(place.device, copy=True)
    with place.proved("pooled_topk_pack"):
        found = pooled_topk_pack(*at_place[:3], *written, at_place[3])
    expected = torch.full_like(found, -1, device="cpu")
    for s, num in enumerate(choice.num_kept.tolist()):
        own = slice(*choice.key_start[s : s + 2].tolist())
        queries = q[slice(*choice.query_start[s : s + 2].tolist())].double()
        if num == 0:
            continue
        start = int(choice.block_start[s])
        candidates = np.delete(np.arange(own.stop - own.start), slice(start, start + len(queries)))
        keys = k[own][torch.tensor(candidates)].double().repeat_interleave(queries.shape[1] // num_kv_heads, 1)
        scores = torch.einsum("hd,khd->hk", queries.mean(0), keys).numpy()
        assert (scores == scores.astype(np.float32)).all()
        merged = rule.merged(scores.astype(np.float32), num_kv_heads, choice.shared)
        best = candidates[rule.kept(merged, num, choice.pool)]
        expected[:, s, :num] = torch.tensor(best)
        for h in range(num_kv_heads):
            for i, key in enumerate(best[0 if choice.shared else h].tolist()):
                page = int(choice.page_table[s, i // PAGE])
                pages[:, page, i % PAGE, h] = torch.stack((k[own][key, h], v[own][key, h]))
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(written.cpu(), pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shared", [True, False])
@cases(
    "sequences heads dtype",
    ([(40, 16, 8, 16), (9, 0, 8, 1), (8, 0, 8, 0), (63, 55, 8, 27)], (4, 2), FP32),
    ([(63, 32, 4, 59), (0, 0, 0, 0), (70, 2, 1, 17)], (2, 2), BF16),
    ([(300, 128, 32, 134)], (3, 1), FP16),
    ([], (2, 1), FP32),
)
def test_the_best_keys_and_values_fill_the_pages_in_order(
    place: Place, sequences: list[Any], heads: tuple[int, int], dtype: torch.dtype, shared: bool
) -> None:
    check(place, world(sequences, heads, 24, dtype, shared=shared))


def test_a_thousand_candidates_of_few_scores_are_ranked_by_index(place: Place) -> None:
    sample = world([(1000, 500, 32, 450)], (1, 1), 8, FP32, pool=5)
    sample[1][:, :, 1:] = 0
    check(place, sample)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """One query, whose heads each read one coordinate: so any scores at all are exact."""
    group, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    length = draw(st.integers(1, 90))
    sequence = (length, draw(st.integers(0, length - 1)), 1, draw(st.integers(0, length - 1)))
    pool, shared = draw(st.sampled_from([1, 3, 7])), draw(st.booleans())
    sample = world([sequence], (group * num_kv_heads, num_kv_heads), 8, FP32, pool, shared)
    q, k, *_ = sample
    q.zero_()
    k.zero_()
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    levels = draw(st.sampled_from([2, 5, 10**6]))
    for h in range(group * num_kv_heads):
        q[0, h, h % group] = 1
        scores = generator.integers(-levels, levels, length).astype(np.float32) / np.float32(7)
        k[:, h // group, h % group] = torch.tensor(scores)
    return sample


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sample=worlds())
def test_any_scores_are_chosen_from_as_the_rule_chooses(place: Place, sample: World) -> None:
    check(place, sample)
