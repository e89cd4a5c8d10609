"""Block diffusion step by step: LMDeploy and vanilla (block-diffusion.md 1, 2.1), streaming chunks, delayed caches."""

from ..worlds import World, asked, check_over

CHUNK2 = "chunk:2,block_length=4,page_size=4"
OBS = "chunk:4,block_length=4,page_size=4,num_blocks=2"


def test_a_fixed_chunk_streams_through_its_block_and_flushes_at_the_boundary() -> None:
    w = asked(World(CHUNK2), (4, 8))
    assert w.step() == "prefill 0:PPPP"
    assert w.step({0: [0]}) == "decode 0D:MMmm"
    # Two queries see 4 of history and themselves; masks outside are neither computed nor visible.
    assert w.features() == (2, 2 * 6, 6, 2, 2, 1, 0, 1)
    assert w.plan.chunk == 2
    assert w.step({0: [1]}) == "decode 0D:PMmm"
    assert w.step({0: [2]}) == "decode 0D:cPMm"  # refreshed, so skipped: its slot moved right
    assert w.features() == (2, 2 * 7, 7, 2, 2, 1, 0, 1)
    assert w.step({0: [3]}) == "decode 0D:ccPM"
    assert w.features() == (2, 2 * 8, 8, 2, 2, 1, 0, 1)
    assert w["num_tokens"][0] == 4  # handed out before the flush
    assert w.step() == "decode 0F:cccP"
    assert w.features() == (1, 8, 8, 1, 1, 1, 0, 1)
    assert w.step({0: [0, 1]}) == "decode 0D:MMmm"
    assert w.features() == (2, 2 * 10, 10, 2, 2, 1, 0, 1)
    assert w.step() == "decode 0F:PPmm"  # committed tokens alone fill the chunk: no commit is possible
    assert w.features() == (2, 2 * 10, 10, 2, 2, 1, 0, 1)
    w.schedule()
    assert w.features() == (2, 2 * 12, 12, 2, 2, 1, 0, 1)
    assert w.commit({0: [2, 3]}) == [0]  # no flush for the last block, and no group to sit out
    assert w.schedule() == "nothing"
    assert (w["num_computed"][0], w["num_committed"][0], w["num_forwards"][0]) == (15, 8, 8)
    assert (w["first_block"][0], w["finish"][0]) == (5.0, 9.0)


def test_the_window_reaches_into_the_next_block_and_not_beyond_the_last() -> None:
    w = asked(World(OBS), (4, 8))
    assert w.step() == "prefill 0:PPPPmmmm"
    assert w.step({0: [0, 1]}) == "decode 0D:MMMMmmmm"
    assert w.features() == (4, 4 * 8, 8, 4, 4, 1, 0, 1)
    assert w.step({0: [2]}) == "decode 0D:PPMMmmmm"
    assert w.step({0: [3, 4]}) == "decode 0D:ccPMMMmm"
    # Two queries of the block see 4 + 4 keys, two of the next see its two as well.
    assert w.features() == (4, 2 * 8 + 2 * 10, 10, 4, 4, 1, 0, 1)
    assert w["num_tokens"][0] == 4
    # What is left to refresh shares the step with masks of the next block: no bubble.
    assert w.step({0: [5, 6]}) == "decode 0D:cccPPMMm"
    assert w.features() == (4, 1 * 8 + 3 * 11, 11, 4, 4, 1, 0, 1)
    assert w.schedule() == "decode 0D:cPPMmmmm"  # the last block, and nothing after it
    assert w.features() == (3, 3 * 12, 12, 3, 3, 1, 0, 1)
    assert w.commit({0: [3]}) == [0]
    assert (w["num_tokens"][0], w["num_committed"][0], w["num_emissions"][0]) == (8, 8, 2)


def test_a_delayed_cache_drops_a_token_computed_once_as_committed() -> None:
    w = asked(World("delayed-cache:8,page_size=8"), (12, 12))
    assert w.step({0: [5, 6, 7]}) == "prefill 0:PPPPMMMM"
    # FOCUS: the prompt's part of the block stays uncached in prefill. Soft-max runs on all 8 rows.
    assert w.step() == "decode 0D:PPPPMPPP"
    assert w.features() == (8, 8 * 16, 16, 8, 8, 1, 0, 1)
    assert w.step({0: [4]}) == "decode 0D:ccccMccc"
    # Keys end with the last position computed: 8 of history and 5; the cached 5 to 7 are out of sight.
    assert w.features() == (1, 13, 13, 1, 8, 1, 0, 1)
    assert w["num_tokens"][0] == 4
    assert w.step() == "decode 0F:ccccPccc"
    assert w.step() == "decode 0D:MMMMMMMM"


def test_a_neighbour_aware_cache_keeps_a_token_until_its_right_neighbour_is_committed_too() -> None:
    w = asked(World("delayed-cache-plus:8,page_size=8"), (12, 12))
    assert w.step({0: [5, 6, 7]}) == "prefill 0:PPPPMMMM"
    assert w.step() == "decode 0D:PPPPMPPP"  # the spec's 1,1,1,1,0,1,1,1 ...
    assert w.step({0: [4]}) == "decode 0D:cccPMccc"  # ... leaves 3 and 4
    assert w.features() == (2, 2 * 13, 13, 2, 8, 1, 0, 1)
    assert w.step() == "decode 0F:cccPPccc"  # the block's end computes what is uncached
    assert w.features() == (2, 2 * 13, 13, 2, 8, 1, 0, 1)
    assert w.step() == "decode 0D:MMMMMMMM"


# Blocks of 4. Pages of 4 make groups of min(16, 2 * (4 // 4)) = 2 steps, pages of 8 groups of 4.
PAGE4 = "lmdeploy-bd32:4,page_size=4"
PAGE8 = "lmdeploy-bd32:4,page_size=8"
EACH_STEP = "lmdeploy-bd32:4,page_size=4,num_loops=1,decide_ahead=false"


def test_prefill_denoises_the_partial_block_and_a_finished_row_idles_until_its_group_ends() -> None:
    w = asked(World(PAGE4), (6, 5))  # two prompt tokens in the block at 4; the canvas ends at 12
    assert w.step({0: [2]}) == "prefill 0:PPMM"
    # 8 positions, block-causal: 4 queries on 4 keys and 4 on 8; logits of the last block alone.
    assert w.features() == (8, 4 * 4 + 4 * 8, 8, 4, 4, 1, 8, 1)
    assert w.step({0: [3]}) == "decode 0D:PPPM"
    assert w.features() == (4, 4 * 8, 8, 4, 4, 1, 0, 1)
    assert w["num_tokens"][0] == 2  # of the first block, two were prompt
    assert w.step() == "decode 0F:PPPP"  # writes the block's KV
    assert w.schedule() == "decode 0D:MMMM"
    assert w.features() == (4, 4 * 12, 12, 4, 4, 1, 0, 1)
    assert w.commit({0: [0, 1, 2, 3]}) == [0]  # the last block pays no pass over it
    assert w.step() == "decode 0I:pppp"
    assert w.features()[0] == 4  # computed all the same
    assert w["num_tokens"][0] == 5  # 2 + 3: the tail beyond max_new_tokens is trimmed ...
    assert w["num_committed"][0] == 6  # ... though denoised
    assert (w["first_commit"][0], w["first_block"][0], w["first_emission"][0], w["finish"][0]) == (1.0, 2.0, 2.0, 4.0)
    assert (w["num_first"][0], w["num_emissions"][0], w["last_emission"][0]) == (2, 2, 4.0)
    check_over(w)


def test_a_group_is_frozen_and_whoever_waits_is_prefilled_at_its_end() -> None:
    w = asked(World(PAGE8, max_batch=4), (4, 8))
    assert w.step() == "prefill 0:PPPP"
    assert w.step({0: [0]}) == "decode 0D:MMMM"
    w.submit(1, 4, 4)
    assert [w.step() for _ in range(3)] == ["decode 0D:PMMM"] * 3
    assert w.step() == "prefill 1:PPPP"
    # The older sequence decodes as a group of its own while the new one waits ...
    assert [w.step() for _ in range(4)] == ["decode 0D:PMMM"] * 4
    # ... and as 1 left over is not more than max_batch / 4 = 1, nothing was fetched ahead: they merge.
    # The one updated last stands last (erratum 6).
    assert w.step() == "decode 1D:MMMM 0D:PMMM"


def test_a_prompt_longer_than_a_prefill_runs_alone_in_several_forwards() -> None:
    w = asked(World(PAGE4 + ",max_prefill_tokens=16"), (37, 4), (4, 4))
    assert w.step() == "prefill 0:PMMM"
    # Padded to 40, in chunks of 16, 16 and 8: sum over the 10 blocks of 4 x 4k.
    assert w.features() == (40, 16 * 55, 40, 4, 4, 1, 40, 3)
    assert w.step() == "prefill 1:PPPP"


def test_prefill_waits_for_pages_and_the_first_come_is_not_overtaken() -> None:
    w = asked(World(EACH_STEP, num_pages=3), (8, 4))  # 2 pages for the prompt, 3 in all
    w.submit(1, 8, 4)
    w.submit(2, 1, 1)  # 1 page: free, but it came last
    assert w.step() == "prefill 0:PPPP"
    assert (w.plan.pages, w.plan.waiting, w.plan.running) == (2, 2, 1)
    assert w.step({0: [0, 1, 2, 3]}) == "decode 0D:MMMM"
    assert w.plan.pages == 3
    assert w.step() == "prefill 1:PPPP 2:PMMM"
    assert w.plan.pages == 3


def test_the_last_sequence_loses_its_pages_and_recomputes() -> None:
    w = asked(World(EACH_STEP, num_pages=4), (4, 8), (4, 8))
    assert w.step() == "prefill 0:PPPP 1:PPPP"
    assert w.step({0: [0, 1, 2, 3], 1: [0, 1]}) == "decode 0D:MMMM 1D:MMMM"
    assert w.step({1: [2]}) == "decode 0F:PPPP 1D:PPMM"
    assert w.schedule() == "decode 0D:MMMM"  # needs a third page: 5 in all
    assert (w.plan.preempted, w.plan.pages, w.plan.waiting, w.plan.running) == ((1,), 3, 1, 1)
    assert w.commit({0: [0, 1, 2, 3]}) == [0]
    assert w.step({1: [3]}) == "prefill 1:PPPM"  # prompt and block anew, a denoising step with it
    assert w.features() == (8, 16 + 32, 8, 4, 4, 1, 8, 1)
    assert w["num_tokens"][1] == 4
    assert w.step() == "decode 1F:PPPP"
    assert w.step({1: [0, 1, 2, 3]}) == "decode 1D:MMMM"
    assert w.plan.pages == 3
    assert (w["num_preemptions"][:2], w["num_tokens"][:2], w["finish"][:2]) == ([0, 1], [8, 8], [4.0, 7.0])
    assert w["num_committed"][:2] == [8, 8]
    assert w["scheduled"][1] == 0.0  # its first prefill
    assert (w.engine.pages_held, w.engine.expected_tokens, w.engine.totals.preemptions) == (0, 0, 1)
