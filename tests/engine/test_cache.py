"""What each step of a full-sequence model computes and sees (full-sequence-diffusion.md 1.3, 2.1, 3.1, 4.3)."""

from collections import Counter

import numpy as np
import pytest

from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import NoCache
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.policy import parse
from dsim.engine.rows.passes import RowPosition
from dsim.engine.step import Phase

from ..reference.pooled_topk import num_kept


def every_step(prompt: int, output: int, block: int = 32, steps: int | None = None) -> RowPosition:
    """Every step of one request, one entry a step, with `steps` a block."""
    each = steps or block
    step = np.arange(output // block * each)
    same = np.ones_like(step)
    return RowPosition(
        prompt * same, (prompt + output) * same, prompt + step // each * block, step, step % each, block
    )  # fmt: skip


def passes(cache: NoCache, at: RowPosition) -> dict[Phase, int]:
    return {Phase(p): n for p, n in sorted(Counter(cache.work(at).phases.tolist()).items())}


def numbers(cache: NoCache, at: RowPosition, *steps: int) -> list[tuple[int, int, int]]:
    """Tokens, keys and rows of the LM head of these steps."""
    does = cache.work(at)
    rows = cache.head_rows(at, does.tokens)
    return [(int(does.tokens[i]), int(does.keys[i]), int(rows[i])) for i in steps]


def test_without_a_cache_every_step_computes_the_whole_sequence() -> None:
    at = every_step(100, 256)
    assert passes(NoCache(), at) == {Phase.FULL: 256}
    assert numbers(NoCache(), at, 0, 1, 255) == [(356, 356, 356)] * 3
    assert numbers(NoCache(logits="block"), at, 0, 255) == [(356, 356, 32)] * 2


def test_fast_dllm_s_dual_cache_computes_the_block_against_all_keys() -> None:
    at = every_step(100, 256)
    assert passes(FastCache(), at) == {Phase.FULL: 8, Phase.REUSE: 248}
    assert numbers(FastCache(), at, 0, 1, 31, 32, 255) == [
        (356, 356, 356), (32, 356, 32), (32, 356, 32), (356, 356, 356), (32, 356, 32)
    ]  # fmt: skip


def test_fast_dllm_s_prefix_cache_computes_the_block_and_all_after_it() -> None:
    at = every_step(100, 256)
    cache = FastCache(reuse="prefix")
    assert passes(cache, at) == {Phase.FULL: 8, Phase.REUSE: 248}
    # L - s_b, for blocks that begin at 100, 132 and 324.
    assert numbers(cache, at, 0, 1, 33, 64, 255) == [
        (356, 356, 356), (256, 356, 256), (224, 356, 224), (356, 356, 356), (32, 356, 32)
    ]  # fmt: skip
    assert numbers(FastCache(logits="block", reuse="prefix"), at, 0, 1) == [(356, 356, 32), (256, 356, 32)]


def test_sparse_dllm_takes_two_full_passes_a_block() -> None:
    at = every_step(100, 256)
    assert passes(SparseCache(), at) == {Phase.FULL: 8, Phase.PACK: 8, Phase.REUSE: 240}
    assert SparseCache().work(at).phases[[0, 1, 2, 31, 32, 33, 34]].tolist() == [4, 5, 6, 6, 4, 5, 6]
    # floor(0.5 * (356 - 32)) + 32 keys.
    assert numbers(SparseCache(), at, 0, 1, 2, 255) == [(356, 356, 356), (356, 356, 356), (32, 194, 32), (32, 194, 32)]
    assert numbers(SparseCache(logits="block"), at, 0, 1, 2) == [(356, 356, 32), (356, 356, 32), (32, 194, 32)]


@pytest.mark.parametrize(
    ("steps", "full", "pack", "reuse"), [(32, 8, 8, 240), (16, 8, 8, 112), (2, 8, 8, 0), (1, 8, 0, 0)]
)
def test_a_block_s_first_pass_is_full_and_its_second_packs(steps: int, full: int, pack: int, reuse: int) -> None:
    counts = passes(SparseCache(), every_step(100, 256, steps=steps))
    assert [counts.get(p, 0) for p in (Phase.FULL, Phase.PACK, Phase.REUSE)] == [full, pack, reuse]


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


@pytest.mark.parametrize(
    ("steps", "prompt", "response", "both", "gen", "only_prompt", "partial"),
    [
        (256, 50, 7, 1, 36, 5, 214),
        (256, 100, 7, 1, 36, 2, 217),
        (512, 50, 5, 11, 92, 0, 409),
        (128, 50, 5, 3, 23, 0, 102),
        (64, 50, 5, 2, 11, 0, 51),
        (32, 50, 5, 1, 6, 0, 25),
    ],
)
def test_dllm_cache_refreshes_as_the_published_histograms_have_it(
    steps: int, prompt: int, response: int, both: int, gen: int, only_prompt: int, partial: int
) -> None:
    counts = passes(PeriodicCache(prompt_refresh=prompt, response_refresh=response), every_step(100, steps))
    of = (Phase.FULL, Phase.REFRESH_RESPONSE, Phase.REFRESH_PROMPT, Phase.PARTIAL)
    assert [counts.get(p, 0) for p in of] == [both, gen, only_prompt, partial]


def test_dllm_cache_computes_the_part_that_is_refreshed_and_a_share_of_the_response() -> None:
    at = every_step(100, 256)
    # Steps 0 (both), 7 (response), 50 (prompt and 64 of 256), 1 (64); the code projects all of L every step.
    assert numbers(PeriodicCache(), at, 0, 7, 50, 1) == [
        (356, 356, 356), (256, 356, 356), (164, 356, 356), (64, 356, 356)
    ]  # fmt: skip
    assert numbers(PeriodicCache(transfer=0.0), at, 1, 50) == [(0, 356, 356), (100, 356, 356)]
    assert numbers(PeriodicCache(transfer=0.3), at, 1) == [(76, 356, 356)]
    assert numbers(PeriodicCache(transfer=1.0), at, 1, 50) == [(256, 356, 356), (356, 356, 356)]


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
