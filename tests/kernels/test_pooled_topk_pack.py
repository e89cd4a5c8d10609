"""What a sparse cache keeps: the engine's rule, the reference and the kernel agree, and pages hold what was chosen."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine import pooled_topk as rule
from dsim.kernels.pooled_topk_pack import pooled_topk_pack

from .places import EVERYWHERE, Place

PAGE = 16


def world(
    sequences: list[tuple[int, int, int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Sequences as (length, block start, block length, number kept), of integers, so that every score is exact."""
    generator = torch.Generator().manual_seed(seed)

    def integers(rows: int, num_heads: int) -> torch.Tensor:
        return torch.randint(-4, 5, (rows, num_heads, head_dim), generator=generator).to(dtype)

    held = [-(-kept // PAGE) for *_, kept in sequences]
    order = torch.randperm(sum(held) + 2, generator=generator).tolist()
    page_table = torch.full((len(sequences), max(held, default=0) + 1), -1, dtype=torch.int32)
    for s, num in enumerate(held):
        page_table[s, :num] = torch.tensor(order[:num])
        order = order[num:]
    num_keys, num_queries = sum(s[0] for s in sequences), sum(s[2] for s in sequences)
    return {
        "q": integers(num_queries, heads[0]),
        "k": integers(num_keys, heads[1]),
        "v": torch.randn(num_keys, heads[1], head_dim, generator=generator).to(dtype),
        "query_start": torch.tensor([0, *(s[2] for s in sequences)]).cumsum(0).int(),
        "key_start": torch.tensor([0, *(s[0] for s in sequences)]).cumsum(0).int(),
        "block_start": torch.tensor([s[1] for s in sequences], dtype=torch.int32),
        "num_kept": torch.tensor([s[3] for s in sequences], dtype=torch.int32),
        "k_pages": torch.full((sum(held) + 2, PAGE, heads[1], head_dim), torch.nan, dtype=dtype),
        "v_pages": torch.full((sum(held) + 2, PAGE, heads[1], head_dim), torch.nan, dtype=dtype),
        "page_table": page_table,
    }


def check(place: Place, sample: dict[str, torch.Tensor], pool: int, shared: bool) -> None:
    """Against the rule applied to scores in fp64, and pages against the rule's choice, bit for bit."""
    at_place = {name: tensor.to(place.device, copy=True) for name, tensor in sample.items()}
    with place.proved("pooled_topk_pack"):
        kept = pooled_topk_pack(**at_place, pool=pool, shared=shared)
    num_kv_heads = sample["k"].shape[1]
    k_pages, v_pages = sample["k_pages"].clone(), sample["v_pages"].clone()
    expected = torch.full_like(kept, -1, device="cpu")
    for s, num in enumerate(sample["num_kept"].tolist()):
        own = slice(*sample["key_start"][s : s + 2].tolist())
        queries = sample["q"][slice(*sample["query_start"][s : s + 2].tolist())].double()
        if num == 0:
            continue
        start = int(sample["block_start"][s])
        candidates = np.delete(np.arange(own.stop - own.start), slice(start, start + len(queries)))
        k = sample["k"][own][torch.tensor(candidates)].double().repeat_interleave(queries.shape[1] // num_kv_heads, 1)
        scores = torch.einsum("hd,khd->hk", queries.mean(0), k).numpy()
        assert (scores == scores.astype(np.float32)).all()
        merged = rule.merged(scores.astype(np.float32), num_kv_heads, shared)
        best = candidates[rule.kept(merged, num, pool)]
        expected[:, s, :num] = torch.tensor(best)
        for h in range(num_kv_heads):
            for i, key in enumerate(best[0 if shared else h].tolist()):
                page = int(sample["page_table"][s, i // PAGE])
                k_pages[page, i % PAGE, h] = sample["k"][own][key, h]
                v_pages[page, i % PAGE, h] = sample["v"][own][key, h]
    assert kept.tolist() == expected.tolist()
    torch.testing.assert_close(at_place["k_pages"].cpu(), k_pages, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(at_place["v_pages"].cpu(), v_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("sequences", "heads", "dtype"),
    [
        ([(40, 16, 8, 16), (9, 0, 8, 1), (8, 0, 8, 0), (63, 55, 8, 27)], (4, 2), torch.float32),
        ([(63, 32, 4, 59), (0, 0, 0, 0), (70, 2, 1, 17)], (2, 2), torch.bfloat16),
        ([(300, 128, 32, 134)], (3, 1), torch.float16),
        ([], (2, 1), torch.float32),
    ],
)
def test_the_best_keys_and_values_fill_the_pages_in_order(
    place: Place, sequences: list[Any], heads: tuple[int, int], dtype: torch.dtype, shared: bool
) -> None:
    check(place, world(sequences, heads, 24, dtype), 3, shared)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_thousand_candidates_of_few_scores_are_ranked_by_index(place: Place) -> None:
    sample = world([(1000, 500, 32, 450)], (1, 1), 8, torch.float32)
    sample["k"][:, :, 1:] = 0
    check(place, sample, 5, shared=False)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """One query, whose heads each read one coordinate: so any scores at all are exact."""
    group, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    length = draw(st.integers(1, 90))
    num_kept = draw(st.integers(0, length - 1))
    sample = world([(length, draw(st.integers(0, length - 1)), 1, num_kept)], (group * num_kv_heads, num_kv_heads), 8,
                  torch.float32)  # fmt: skip
    sample["q"].zero_()
    sample["k"].zero_()
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    levels = draw(st.sampled_from([2, 5, 10**6]))
    for h in range(group * num_kv_heads):
        sample["q"][0, h, h % group] = 1
        scores = generator.integers(-levels, levels, length).astype(np.float32) / np.float32(7)
        sample["k"][:, h // group, h % group] = torch.tensor(scores)
    return sample


@pytest.mark.parametrize("place", EVERYWHERE)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(sample=worlds(), pool=st.sampled_from([1, 3, 7]), shared=st.booleans())
def test_any_scores_are_chosen_from_as_the_rule_chooses(
    place: Place, sample: dict[str, torch.Tensor], pool: int, shared: bool
) -> None:
    check(place, sample, pool, shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.zeros(39, 2, 24)}, r"v has shape \[39, 2, 24\], expected \[40, 2, 24\]"),
        ({"pool": 4}, "pool is 4, expected an odd number of at least 1"),
        ({"num_kept": torch.tensor([33], dtype=torch.int32)}, r"num_kept\[0\] is 33, expected 0 to 32"),
        ({"block_start": torch.tensor([33], dtype=torch.int32)}, r"block_start\[0\] is 33, expected 0 to 32"),
        ({"page_table": torch.tensor([[3, 0, 0]], dtype=torch.int32)}, r"page_table\[0, 0\] is 3, expected 0 to 2"),
        (
            {"key_start": torch.tensor([0, 39], dtype=torch.int32)},
            r"key_start is \[0, 39\], expected to rise from 0 to",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    sample = world([(40, 16, 8, 16)], (4, 2), 24, torch.float32)
    with pytest.raises(ValueError, match=message):
        pooled_topk_pack(**{**sample, **changes})
