"""Caches of full-sequence models (full-sequence-diffusion.md 1.3 to 4.3).

What each step computes and sees, what phases cost beyond their features, how many keys of a prompt MaskKV's layers and
heads keep, and which tokens a sparse cache keeps.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine import cache_overhead
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.engine.part import ExactCache
from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import NoCache
from dsim.engine.policies.maskkv import MaskKV, divided, head_budgets, layer_budgets
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.rows.passes import RowPosition
from dsim.engine.spec import parse
from dsim.engine.step import Phase

from ..checks import cases
from ..reference.pooled_topk import kept, merged, num_kept


def every_step(prompt: int, output: int, block: int = 32, steps: int | None = None) -> RowPosition:
    """Every step of one request, one entry a step, with `steps` a block."""
    each = steps or block
    step = np.arange(output // block * each)
    same = np.ones_like(step)
    return RowPosition(
        prompt * same, (prompt + output) * same, prompt + step // each * block, step, step % each, block
    )  # fmt: skip


def passes(cache: NoCache, at: RowPosition) -> dict[Phase, int]:
    return {Phase(p): n for p, n in Counter(cache.work(at).phases.tolist()).items()}


def numbers(cache: NoCache, at: RowPosition, *steps: int) -> list[tuple[int, int, int]]:
    """Tokens, keys and rows of the LM head of these steps."""
    does = cache.work(at)
    rows = cache.head_rows(at, does.tokens)
    return [(int(does.tokens[i]), int(does.keys[i]), int(rows[i])) for i in steps]


WHOLE, BLOCK, SPARSE = (356, 356, 356), (32, 356, 32), (32, 194, 32)  # sparse: floor(0.5 * (356 - 32)) + 32 keys


@cases(
    "cache expected",
    (NoCache(), {0: WHOLE, 1: WHOLE, 255: WHOLE}),
    (NoCache(logits="block"), {0: (356, 356, 32), 255: (356, 356, 32)}),
    (FastCache(), {0: WHOLE, 1: BLOCK, 31: BLOCK, 32: WHOLE, 255: BLOCK}),
    # The block and all after it: L - s_b, for blocks that begin at 100, 132 and 324.
    (FastCache(reuse="prefix"), {0: WHOLE, 1: (256, 356, 256), 33: (224, 356, 224), 64: WHOLE, 255: BLOCK}),
    (FastCache(logits="block", reuse="prefix"), {0: (356, 356, 32), 1: (256, 356, 32)}),
    (SparseCache(), {0: WHOLE, 1: WHOLE, 2: SPARSE, 255: SPARSE}),
    (SparseCache(logits="block"), {0: (356, 356, 32), 1: (356, 356, 32), 2: SPARSE}),
    # Steps 0 (both), 7 (response), 50 (prompt and 64 of 256), 1 (64); the code projects all of L every step.
    (PeriodicCache(), {0: WHOLE, 7: (256, 356, 356), 50: (164, 356, 356), 1: (64, 356, 356)}),
    (PeriodicCache(transfer=0.0), {1: (0, 356, 356), 50: (100, 356, 356)}),
    (PeriodicCache(transfer=0.3), {1: (76, 356, 356)}),
    (PeriodicCache(transfer=1.0), {1: (256, 356, 356), 50: WHOLE}),
)
def test_a_step_computes_and_sees_what_its_cache_leaves_it(cache: NoCache, expected: dict[int, Any]) -> None:
    assert numbers(cache, every_step(100, 256), *expected) == [*expected.values()]


@cases(
    "cache steps counts",
    (NoCache(), 32, {Phase.FULL: 256}),
    (FastCache(), 32, {Phase.FULL: 8, Phase.REUSE: 248}),
    (FastCache(reuse="prefix"), 32, {Phase.FULL: 8, Phase.REUSE: 248}),
    (SparseCache(), 32, {Phase.FULL: 8, Phase.PACK: 8, Phase.REUSE: 240}),
    (SparseCache(), 16, {Phase.FULL: 8, Phase.PACK: 8, Phase.REUSE: 112}),
    (SparseCache(), 2, {Phase.FULL: 8, Phase.PACK: 8}),
    (SparseCache(), 1, {Phase.FULL: 8}),
)
def test_a_block_s_first_pass_is_full_and_a_sparse_second_packs(cache: NoCache, steps: int, counts: Any) -> None:
    assert passes(cache, every_step(100, 256, steps=steps)) == counts


def test_sparse_dllm_takes_two_full_passes_a_block() -> None:
    phases = SparseCache().work(every_step(100, 256)).phases
    assert phases[[0, 1, 2, 31, 32, 33, 34]].tolist() == [4, 5, 6, 6, 4, 5, 6]


@pytest.mark.parametrize("retention", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("head_centric", [False, True])
def test_the_cache_keeps_as_many_keys_as_the_selection_does(retention: float, head_centric: bool) -> None:
    length = np.arange(32, 2100)
    same = np.ones_like(length)
    at = RowPosition(length - 32, length, length - 32, 2 * same, 2 * same, 32)
    cache = SparseCache(retention=retention, head_centric=head_centric)
    expected = [num_kept(int(n) - 32, retention, int(head_centric)) for n in length]
    assert (cache.work(at).keys - 32).tolist() == expected


def test_dllm_serve_never_keeps_nothing_where_there_is_something() -> None:
    for prompt, sparse, serve in ((0, 0, 0), (1, 0, 1), (9, 0, 1), (20, 2, 2)):
        at = every_step(prompt, 32)
        assert SparseCache(retention=0.1).work(at).keys[2] == sparse + 32
        assert SparseCache(retention=0.1, head_centric=True).work(at).keys[2] == serve + 32
    assert parse("dllm-serve").cache == SparseCache(logits="block", head_centric=True)


@cases(
    "steps prompt response both gen only_prompt partial",
    (256, 50, 7, 1, 36, 5, 214),
    (256, 100, 7, 1, 36, 2, 217),
    (512, 50, 5, 11, 92, 0, 409),
    (128, 50, 5, 3, 23, 0, 102),
    (64, 50, 5, 2, 11, 0, 51),
    (32, 50, 5, 1, 6, 0, 25),
)
def test_dllm_cache_refreshes_as_the_published_histograms_have_it(
    steps: int, prompt: int, response: int, both: int, gen: int, only_prompt: int, partial: int
) -> None:
    counts = passes(PeriodicCache(prompt_refresh=prompt, response_refresh=response), every_step(100, steps))
    of = (Phase.FULL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT, Phase.PARTIAL)
    assert [counts.get(p, 0) for p in of] == [both, gen, only_prompt, partial]


def test_maskkv_sees_its_budget_of_the_prompt_and_all_of_the_response() -> None:
    at = every_step(1000, 64, block=8)
    assert numbers(MaskKV(logits="block"), at, 0, 5, 50, 1) == [
        # The LM head takes what may still be masked: from the current block on.
        (1064, 1064, 64), (64, 256 + 64, 64), (1064, 1064, 64 - 48), (16, 256 + 64, 64)
    ]  # fmt: skip
    assert numbers(MaskKV(prompt_refresh=7, budget=32), at, 7, 1) == [(1016, 1064, 1064), (16, 32 + 64, 1064)]
    assert numbers(MaskKV(budget=2000), at, 1) == [(16, 1064, 1064)]  # no more than there are
    assert (parse("maskkv").cache, parse("maskkv:32").cache) == (MaskKV(logits="block"), MaskKV("block", budget=32))


def test_what_is_held_follows_the_published_memory_of_each() -> None:
    prompt, length = np.array([1, 100, 1000]), np.array([33, 356, 1256])
    assert NoCache().held(prompt, length).tolist() == [0, 0, 0]
    assert FastCache().held(prompt, length).tolist() == [33, 356, 1256]
    assert SparseCache().held(prompt, length).tolist() == [17, 178, 628]
    assert SparseCache(retention=0.0).held(prompt, length).tolist() == [1, 1, 1]
    # Keys, values, and the outputs of attention and feed-forward: twice as much, and each in whole runs of 16.
    assert PeriodicCache().held(prompt, length).tolist() == [16 + 32 + 48, 112 + 256 + 368, 1008 + 256 + 1264]
    # Of the prompt the budget, and as much as heads may leave empty in their last runs.
    assert MaskKV(budget=256).held(prompt, length).tolist() == [16 + 64, 112 + 512, 256 + 15 + 512]
    # Dream-7B's hidden states are as wide as 7 of its tokens' keys.
    assert PeriodicCache().held(prompt, length, 7).tolist() == [48 + 240, 368 + 2496, 1264 + 8800]
    assert MaskKV(budget=256).held(prompt, length, 7).tolist() == [16 + 256, 112 + 2048, 271 + 2048]


LATENCY = LatencyModel(
    ((0.0, 1.0),), 0.0,
    cache_overhead=(
        CacheOverhead("SparseCache", "pack", 0.5, 0.25), CacheOverhead("SparseCache", "reuse", 2.0, 0.0),
        CacheOverhead("MaskKV", "full", 7.0, 1.0),
    ),
)  # fmt: skip


def test_a_cache_has_the_overhead_of_its_own_kind_and_phases() -> None:
    table = cache_overhead.table_of(LATENCY, SparseCache(head_centric=True))
    assert {Phase(i).name: tuple(row) for i, row in enumerate(table.tolist()) if any(row)} == {
        "PACK": (0.5, 0.25), "REUSE": (2.0, 0.0)
    }  # fmt: skip
    assert cache_overhead.table_of(LATENCY, MaskKV(logits="block"))[Phase.FULL].tolist() == [7.0, 1.0]
    # MaskKV is a PeriodicCache, and that is not MaskKV.
    for cache in (PeriodicCache(), ExactCache(), None):
        assert not cache_overhead.table_of(LATENCY, cache).any()


SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40)


@given(SHARES, st.integers(0, 400), st.data())
def test_parts_add_up_and_none_is_above_the_limit(shares: list[float], most: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(0, most * len(shares)))
    parts = divided(total, np.array(shares), most)
    assert parts.sum() == total
    assert ((parts >= 0) & (parts <= most)).all()
    # A larger share never gets less, and of equal ones the first no less.
    order = np.lexsort((-np.arange(len(shares)), shares))
    assert (np.diff(parts[order]) >= 0).all()


def test_what_a_limit_cuts_off_goes_to_the_others_in_proportion() -> None:
    assert divided(100, np.array([0.7, 0.2, 0.1]), 1000).tolist() == [70, 20, 10]
    assert divided(100, np.array([0.7, 0.2, 0.1]), 40).tolist() == [40, 40, 20]
    assert divided(100, np.array([0.7, 0.2, 0.1]), 45).tolist() == [45, 37, 18]
    # Just at the limit: it is full.
    assert divided(8, np.array([0.5, 0.3125, 0.1875]), 4).tolist() == [4, 3, 1]
    assert divided(10, np.array([1.0, 0.0, 0.0]), 4).tolist() == [4, 3, 3]
    assert divided(5, np.zeros(3), 4).tolist() == [2, 2, 1]


def test_layers_share_by_the_importance_of_their_group() -> None:
    rule = MaskKV(budget=100)
    # 400 keys: 160 alike; of 240 the boundary has 6 / 8 and the middle 2 / 8, in equal parts.
    assert layer_budgets(rule, np.array([5.0, 1.5, 0.5, 1.0]), 1000).tolist() == [130, 70, 70, 130]
    assert layer_budgets(rule, np.array([5.0, 1.5, 0.5, 1.0]), 120).tolist() == [120, 80, 80, 120]  # all there are
    assert layer_budgets(rule, np.zeros(4), 1000).tolist() == [100] * 4
    assert layer_budgets(rule, np.array([3.0, 1.0]), 1000).tolist() == [100] * 2  # no layer between the boundaries


def test_heads_share_by_their_preference_for_the_prompt() -> None:
    rule = MaskKV()
    # 400 keys: 10 each; of 360 in proportion to .9, .6, .3 and 0.
    assert head_budgets(rule, np.array([0.9, 0.6, 0.3, 0.0]), 100, 1000).tolist() == [190, 130, 70, 10]
    assert head_budgets(rule, np.array([0.9, 0.6, 0.3, 0.0]), 100, 160).tolist() == [160, 149, 80, 11]
    assert head_budgets(rule, np.zeros(4), 100, 1000).tolist() == [100] * 4


@pytest.mark.parametrize(
    ("num_candidates", "retention", "at_least", "expected"),
    [(992, 0.5, 0, 496), (1, 0.5, 0, 0), (1, 0.5, 1, 1), (0, 0.5, 1, 0), (7, 0.3, 0, 2), (5, 1.0, 0, 5)],
)
def test_the_number_kept_is_rounded_down(num_candidates: int, retention: float, at_least: int, expected: int) -> None:
    assert num_kept(num_candidates, retention, at_least) == expected


def test_heads_are_added_in_their_order_when_they_share_a_choice() -> None:
    scores = np.array([[1e8, 1.0], [1.0, 2.0], [-1e8, 4.0]], np.float32)
    assert merged(scores, 1, shared=True).tolist() == [[0.0, 7.0]]  # 1e8 + 1 is 1e8 in fp32


def test_the_highest_of_a_group_counts_when_each_head_chooses() -> None:
    scores = np.array([[1, 5], [3, 2], [0, -1], [-4, -2]], np.float32)
    assert merged(scores, 2, shared=False).tolist() == [[3, 5], [0, -1]]


def test_the_best_come_first_and_ties_go_to_the_lower_index() -> None:
    scores = np.array([[1, 3, 2, 3, 0]], np.float32)
    assert kept(scores, 3, pool=1).tolist() == [[1, 3, 2]]
    assert kept(scores, 0, pool=1).shape == (1, 0)


def test_of_no_candidates_none_is_kept() -> None:
    assert kept(np.zeros((2, 0), np.float32), 0, 3).shape == (2, 0)


def test_a_token_counts_with_the_highest_score_around_it() -> None:
    scores = np.array([[0, 0, 0, 9, 0, 0, -5], [7, 0, 0, 0, 0, 0, 8]], np.float32)
    assert kept(scores, 4, pool=3).tolist() == [[2, 3, 4, 0], [5, 6, 0, 1]]
    assert kept(scores, 2, pool=5).tolist() == [[1, 2], [4, 5]]
