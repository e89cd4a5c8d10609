"""Streaming chunks, in and out of the block (elastic-chunking.md 6.2), and delayed caches (focus.md 3.6)."""

from ..worlds import World
from .hand import asked

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
