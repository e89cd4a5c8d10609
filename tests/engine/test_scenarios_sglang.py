"""SGLang's sync mode: a round is a whole block, as slow as its slowest (block-diffusion.md 2.3)."""

from ..worlds import World
from .hand import asked, check_over

SYNC = "sglang-bd32:4,page_size=4"


def test_a_round_takes_its_slowest_block_s_denoise_steps_and_one_forward_more() -> None:
    w = asked(World(SYNC), (5, 3), (4, 8))
    assert w.step({0: [1]}) == "prefill 0:PMMM 1:PPPP"
    assert w.features() == (12, (16 + 32) + 16, 12, 8, 8, 2, 12, 1)
    assert w.step({0: [2, 3], 1: [0]}) == "decode 0D:PPMM 1D:MMMM"
    w.submit(2, 4, 4)
    assert w.step({1: [1, 2]}) == "decode 0F:PPPP 1D:PMMM"
    assert w.features() == (8, 4 * 8 + 4 * 8, 16, 8, 8, 2, 0, 1)
    # A complete block is computed until the round ends.
    assert w.schedule().split()[2] == "1D:PPPM"
    assert w.features() == (8, 64, 16, 8, 8, 2, 0, 1)
    w.commit({1: [3]})
    assert w["num_tokens"][:2] == [0, 0]  # the round is not over
    assert w.schedule().split()[2] == "1F:PPPP"
    assert w.commit() == [0]
    # 3 denoise steps of the slowest and 1: 4 forwards, of which the first began at 1 s.
    assert (w["num_tokens"][:2], w["finish"][0], w["first_block"][:2]) == ([3, 4], 5.0, [5.0, 5.0])
    # Now, between blocks, the batch changes.
    assert w.step() == "prefill 2:PPPP"
    assert w.step({1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}) == "decode 1D:MMMM 2D:MMMM"
    assert w.schedule() == "decode 1F:PPPP 2F:PPPP"
    assert w.commit() == [1, 2]
    check_over(w)
    assert w["num_committed"][:3] == [3, 8, 4]


def test_prefill_comes_first_however_many_are_ready() -> None:
    w = asked(World(SYNC, max_batch=2), (4, 8))
    w.step()
    w.submit(1, 4, 4)
    assert w.step() == "prefill 1:PPPP"  # one ready of two: a continuous batch would decode
    assert w.step() == "decode 0D:MMMM 1D:MMMM"


def test_a_block_completed_by_its_prefill_is_handed_out_at_once() -> None:
    w = asked(World(SYNC), (3, 1), (3, 2))
    w.schedule()
    assert w.commit({0: [3], 1: [3]}) == [0]
    assert w["num_tokens"][:2] == [1, 1]
    assert w.step() == "decode 1F:PPPP"  # a round of 0 denoise steps and 1
    assert w.step({1: [0, 1, 2, 3]}) == "decode 1D:MMMM"


def test_a_sequence_without_pages_for_its_next_block_is_preempted_between_rounds() -> None:
    w = asked(World(SYNC, num_pages=4), (4, 8), (4, 8))
    w.step()
    w.step({0: [0, 1, 2, 3], 1: [0, 1, 2, 3]})
    assert w.step() == "decode 0F:PPPP 1F:PPPP"
    assert w.schedule() == "decode 0D:MMMM"
    assert w.plan.preempted == (1,)
    w.commit({0: [0, 1, 2, 3]})
    w.step()
    assert w.step() == "prefill 1:MMMM"
    assert w.features()[:2] == (12, 16 * 6)
