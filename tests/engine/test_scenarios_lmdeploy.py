"""LMDeploy's scheduler and vanilla block diffusion, step by step (block-diffusion.md 1 and 2.1)."""

import math
from dataclasses import replace

import pytest

from dsim.engine.policy import parse

from ..worlds import TOY_MODEL, Driver, World, toy_trace
from .hand import asked, check_over

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


def test_a_prompt_of_whole_blocks_yields_no_token_at_prefill() -> None:
    w = asked(World(PAGE8), (8, 4))
    assert w.step() == "prefill 0:PPPP"
    assert w.features() == (8, 48, 8, 4, 4, 1, 8, 1)
    assert math.isnan(w["first_commit"][0])
    assert w.step({0: [0, 1]}) == "decode 0D:MMMM"
    assert w.features() == (4, 4 * 12, 12, 4, 4, 1, 0, 1)
    w.schedule()
    assert w.commit({0: [2, 3]}) == [0]
    assert [w.step(), w.step(), w.schedule()] == ["decode 0I:pppp", "decode 0I:pppp", "nothing"]
    assert (w["num_tokens"][0], w["finish"][0]) == (4, 3.0)


def test_a_prefill_may_complete_its_block_and_the_request() -> None:
    w = asked(World(PAGE4), (3, 1), (3, 5))
    w.schedule()
    assert w.commit({0: [3], 1: [3]}) == [0]
    assert w["num_tokens"][:2] == [1, 1]
    assert w.step() == "decode 1F:PPPP"
    assert w.step() == "decode 1D:MMMM"


def test_a_request_for_no_tokens_ends_with_its_prefill() -> None:
    w = asked(World(PAGE4), (5, 0), (4, 0))
    assert w.schedule() == "prefill 0:PMMM 1:PPPP"
    assert w.commit({0: [1]}) == [0, 1]
    assert w["num_tokens"][:2] == [0, 0]
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


def test_a_leftover_of_more_than_a_quarter_of_the_batch_alternates() -> None:
    w = World(PAGE8, max_batch=3)  # 3 // 4 = 0
    w.submit(0, 4, 8)
    w.step()
    assert w.step() == "decode 0D:MMMM"
    w.submit(1, 4, 4)
    assert [w.step() for _ in range(3)] == ["decode 0D:MMMM"] * 3
    assert w.step() == "prefill 1:PPPP"
    for turn in (0, 1, 0, 1):
        assert [w.step() for _ in range(4)] == [f"decode {turn}D:MMMM"] * 4


def test_a_request_that_comes_during_a_group_s_last_step_is_too_late_for_what_was_decided_ahead() -> None:
    w = asked(World(PAGE4, max_batch=2), (4, 8))
    w.step()
    w.step()
    w.schedule()  # the group's last step, and the next batch with it
    w.submit(1, 4, 4)
    w.commit()
    # Decided now, with 1 ready of 2 (not fewer than half) and 1 waiting (not four): decode.
    assert w.step() == "decode 0D:MMMM"
    assert w.step() == "decode 0D:MMMM"  # here the in-flight sequence is out of sight, and 1 is admitted
    assert w.step() == "prefill 1:PPPP"


def test_without_deciding_ahead_whoever_waits_when_a_group_ends_is_prefilled_and_merges() -> None:
    w = asked(World(PAGE4 + ",decide_ahead=false", max_batch=2), (4, 4))
    w.step()
    assert w.step() == "decode 0D:MMMM"
    w.schedule()  # the group's last step: not too late
    w.submit(1, 4, 4)
    w.submit(2, 4, 4)
    w.commit()
    assert w.step() == "prefill 1:PPPP"  # the one free place, to the first come
    # All places are taken: it falls back to decode, and the old one and the new one go together.
    assert [w.step(), w.step({0: [0, 1, 2, 3]})] == ["decode 0D:MMMM 1D:MMMM"] * 2
    assert w.step() == "prefill 2:PPPP"


def test_deciding_ahead_four_waiting_come_before_half_a_batch_that_is_ready() -> None:
    w = World(PAGE4, max_batch=4)
    for i in (0, 1):
        w.submit(i, 4, 4)
    w.step()
    w.step()
    w.schedule()  # the next batch is sought here: nobody waits, and nobody is left over
    for i in (2, 3, 4):
        w.submit(i, 4, 4)
    w.commit()
    # 2 ready of 4 are not fewer than half, and 3 waiting not four.
    assert w.schedule() == "decode 0D:MMMM 1D:MMMM"
    w.commit()
    w.step()
    # Decided during that last step, with all in flight.
    assert w.step() == "prefill 2:PPPP 3:PPPP"

    w = World(PAGE4, max_batch=4)
    for i in (0, 1):
        w.submit(i, 4, 4)
    w.step()
    w.step()
    w.schedule()
    for i in (2, 3, 4, 5):
        w.submit(i, 4, 4)
    w.commit()
    assert w.step() == "prefill 2:PPPP 3:PPPP"


def test_prefill_takes_the_first_come_within_its_token_budget() -> None:
    w = asked(World(PAGE4 + ",max_prefill_tokens=16"), (8, 4))  # padded 8
    w.submit(1, 9, 4)  # 12: too much beside 8
    w.submit(2, 4, 4)  # would fit beside 8, and does not overtake
    w.submit(3, 1, 4)  # 4: too much beside 12 + 4
    assert w.step() == "prefill 0:PPPP"
    assert w.step() == "prefill 1:PMMM 2:PPPP"
    assert w.features() == (16, (16 + 32 + 48) + 16, 16, 8, 8, 2, 16, 1)
    assert (w.plan.num_tokens.tolist(), w.plan.num_keys.tolist()) == ([12, 4], [12, 4])
    assert w.step() == "prefill 3:PMMM"


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
    assert (w.engine.pages_held, w.engine.outstanding_tokens, w.engine.totals.preemptions) == (0, 0, 1)


def test_the_prefill_of_a_sequence_preempted_with_a_complete_block_is_its_pass() -> None:
    w = asked(World(EACH_STEP, num_pages=4), (4, 8), (4, 8))
    w.step()
    w.step({0: [0, 1, 2, 3], 1: [0, 1]})
    assert w.step({1: [2, 3]}) == "decode 0F:PPPP 1D:PPMM"
    assert w["num_tokens"][1] == 4
    w.step({0: [0, 1, 2, 3]})
    assert w.step() == "prefill 1:PPPP"
    assert w["num_tokens"][1] == 4  # not handed out twice
    assert w.step() == "decode 1D:MMMM"


def test_a_preempted_sequence_queues_behind_those_that_wait() -> None:
    w = asked(World(EACH_STEP, num_pages=4, max_batch=2), (4, 8), (4, 8))
    w.step()
    w.step({0: [0, 1, 2, 3]})
    w.step()
    w.submit(2, 4, 4)
    assert w.schedule() == "decode 0D:MMMM"
    w.commit({0: [0, 1, 2, 3]})
    assert w.step() == "prefill 2:PPPP 1:MMMM"


def test_a_request_that_could_never_fit_is_rejected() -> None:
    w = World(PAGE4 + ",reserve_past_end=false", num_pages=3, context_limit=12)
    assert not w.submit(0, 9, 4)  # 13 tokens: 4 pages
    assert not w.submit(1, 12, 1)
    assert w.submit(2, 6, 6)
    assert w["status"][:3] == [1, 1, 2]
    assert World(PAGE4, context_limit=11).submit(0, 6, 6) is False
    assert w.engine.outstanding_tokens == 12
    assert w.engine.num_waiting == 1


def test_totals_count_decode_steps_alone() -> None:
    w = asked(World(PAGE4), (6, 5))
    w.step({0: [2]})
    w.step({0: [3]})
    w.step()
    w.step({0: [0, 1, 2, 3]})
    w.step()
    t = w.engine.totals
    assert (t.num_prefill_steps, t.num_decode_steps, t.prefill_tokens, t.tokens, t.committed) == (1, 4, 8, 16, 5)
    assert (t.prefill_time, t.decode_time) == (1.0, 4.0)
    assert t.itl.count == 1
    assert t.itl.sum == 2.0  # blocks at 2 s and 4 s


def test_tokens_can_be_emitted_as_a_prefix_grows() -> None:
    w = asked(World(PAGE4, emit="step"), (4, 8))
    w.step()
    w.step({0: [1]})
    assert w["num_tokens"][0] == 0  # the first is still masked
    w.step({0: [0]})
    assert w["num_tokens"][0] == 2
    w.step({0: [3]})
    assert w["num_tokens"][0] == 2
    w.step({0: [2]})
    assert w["num_tokens"][0] == 4
    assert (w["first_emission"][0], w["first_block"][0], w["num_emissions"][0]) == (3.0, 5.0, 2)


def test_tokens_can_be_emitted_at_the_end() -> None:
    w = asked(World(PAGE4, emit="end"), (4, 5))
    w.step()
    w.step({0: [0, 1, 2, 3]})
    w.step()
    assert (w["first_block"][0], w["num_tokens"][0], w.engine.outstanding_tokens) == (2.0, 0, 5)
    w.step({0: [0, 1, 2, 3]})
    assert (w["num_tokens"][0], w["num_emissions"][0], w["first_emission"][0]) == (5, 1, 4.0)
    assert w.engine.outstanding_tokens == 0


@pytest.mark.parametrize("num_loops", [2, 3, 6, 16])
def test_a_group_of_any_length_has_the_pages_of_every_block_it_enters(num_loops: int) -> None:
    # Whole blocks commit at once, so that a group of n steps enters n / 2 blocks. The driver checks every plan's pages.
    sure = replace(TOY_MODEL, pass_probability=(1.0,) * 4)
    policy = parse(f"lmdeploy-bd32:4,page_size=4,num_loops={num_loops}")
    Driver(policy, toy_trace([0], [4], [60]), num_pages=100, max_batch=4, model=sure).run()
