"""vLLM v1's token budget, step by step (production-dllm-serving.md 2.2, 2.3): what rows compute, over which keys."""

import pytest

from dsim.engine.errors import PolicyError, TraceError
from dsim.engine.policy import parse

from ..worlds import World

SYNC = ",async_scheduling=false"
AR = "vllm-ar,max_num_batched_tokens=8,page_size=4"
ALL = range(4)  # of a canvas


# ---- chunks and the budget ---------------------------------------------------------------------------------------


def test_a_prompt_takes_what_the_budget_has_left_and_goes_on_beside_decoding() -> None:
    w = World(AR + SYNC)
    w.submit(0, 5, 3)
    w.submit(1, 10, 2)
    assert w.step_tokens() == "prefill 0P5/5 1P3/3"
    assert w.features() == (8, 15 + 6, 8, 1, 1, 2, 8, 1)  # the second prompt's chunk is not sampled
    w.submit(2, 2, 1)
    # Whoever runs comes first, in order of admission: the newcomer finds no budget.
    assert w.step_tokens() == "decode 0D1/6 1P7/10"
    assert w.features() == (8, 6 + (7 * 3 + 28), 16, 2, 2, 2, 7, 1)
    assert w.step_tokens() == "decode 0D1/7 1D1/11 2P2/2"
    assert w.schedule() == "nothing"
    assert w["num_tokens"][:3] == [3, 2, 1]
    assert w["first_emission"][:3] == [1.0, 2.0, 3.0]
    assert w["finish"][:3] == [3.0, 3.0, 3.0]
    assert w["num_forwards"][:3] == [2, 1, 0]
    totals = w.engine.totals
    assert (totals.prefill_tokens, totals.tokens) == (8 + 7 + 2, 1 + 2)
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_of_a_prompt_that_spans_three_steps_only_the_last_is_sampled() -> None:
    w = World(AR + SYNC)
    w.submit(0, 20, 1)
    assert [w.step_tokens() for _ in range(3)] == ["prefill 0P8/8", "prefill 0P8/16", "prefill 0P4/20"]
    assert w.features() == (4, 4 * 16 + 10, 20, 1, 1, 1, 4, 1)
    assert (w["finish"][0], w["num_tokens"][0], w["scheduled"][0]) == (3.0, 1, 0.0)
    assert w.schedule() == "nothing"


def test_a_prompt_s_outstanding_tokens_leave_with_its_last_chunk() -> None:
    w = World(AR + SYNC)
    w.submit(0, 12, 2)
    w.step_tokens()
    assert w.engine.outstanding_tokens == 14
    w.step_tokens()
    assert w.engine.outstanding_tokens == 1


def test_no_more_requests_run_than_max_num_seqs() -> None:
    w = World(AR + SYNC, max_batch=1)
    w.submit(0, 2, 2)
    w.submit(1, 2, 1)
    assert [w.step_tokens() for _ in range(4)] == ["prefill 0P2/2", "decode 0D1/3", "prefill 1P2/2", "nothing"]


def test_the_long_prefill_threshold_holds_beside_others_and_not_alone() -> None:
    w = World("vllm-ar,max_num_batched_tokens=8,long_prefill_token_threshold=3,page_size=4" + SYNC)
    w.submit(0, 7, 1)
    assert w.step_tokens() == "prefill 0P7/7"
    w.submit(1, 7, 1)
    w.submit(2, 5, 1)
    assert w.step_tokens() == "prefill 1P3/3 2P3/3"
    assert w.step_tokens() == "prefill 1P3/6 2P2/5"
    assert w.step_tokens() == "prefill 1P1/7"
    assert w["finish"][:3] == [1.0, 4.0, 3.0]


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    w = World(AR + ",enable_chunked_prefill=false" + SYNC)
    w.submit(0, 5, 2)
    w.submit(1, 5, 1)
    w.submit(2, 2, 1)
    assert w.step_tokens() == "prefill 0P5/5"  # the third would fit, and stands behind the second
    assert w.step_tokens() == "decode 0D1/6 1P5/5 2P2/2"
    assert not w.submit(3, 9, 1)  # no step could take it


def test_without_chunks_a_request_is_rejected_that_could_not_be_prefilled_again_at_its_end() -> None:
    w = World(AR + ",enable_chunked_prefill=false")
    assert w.submit(0, 5, 3)
    assert not w.submit(1, 5, 4)


def test_prompts_have_an_interval_while_others_decode() -> None:
    w = World(AR + ",prefill_schedule_interval=3" + SYNC)
    w.submit(0, 12, 20)
    assert [w.step_tokens() for _ in range(2)] == ["prefill 0P8/8", "prefill 0P4/12"]  # alone it waits for none
    w.submit(1, 10, 1)
    assert [w.step_tokens() for _ in range(3)] == ["decode 0D1/13", "decode 0D1/14", "decode 0D1/15 1P7/7"]
    assert [w.step_tokens() for _ in range(3)] == ["decode 0D1/16", "decode 0D1/17", "decode 0D1/18 1P3/10"]
    # A step that is free to take prompts and leaves requests waiting lifts the interval.
    w.submit(2, 10, 1)
    w.submit(3, 2, 1)
    assert [w.step_tokens() for _ in range(2)] == ["decode 0D1/19", "decode 0D1/20"]
    assert [w.step_tokens() for _ in range(2)] == ["decode 0D1/21 2P7/7", "decode 0D1/22 2P3/10 3P2/2"]


# ---- head of line ------------------------------------------------------------------------------------------------


def test_the_head_of_the_line_waits_for_pages_for_all_of_its_prompt_and_blocks_the_others() -> None:
    spec = "vllm-ar,max_num_batched_tokens=5,page_size=4"
    for reserve in (True, False):
        w = World(spec + SYNC + ("" if reserve else ",scheduler_reserve_full_isl=false"), num_pages=4)
        w.submit(0, 8, 1)
        w.submit(1, 12, 1)  # 3 pages; 2 are free
        w.submit(2, 1, 1)
        assert w.step_tokens() == "prefill 0P5/5"
        assert w.step_tokens() == ("prefill 0P3/8" if reserve else "prefill 0P3/8 1P2/2")
        assert w.step_tokens() == ("prefill 1P5/5" if reserve else "prefill 1P5/7")


# ---- preemption --------------------------------------------------------------------------------------------------


def test_who_joins_others_leaves_the_watermark_free() -> None:
    # vLLM counts six pages where five can be held.
    for watermark, steps in ((0.34, ["prefill 0P8/8", "decode 0D1/9"]), (0.33, ["prefill 0P8/8 1P8/8"])):
        w = World(f"vllm-ar,page_size=4,watermark={watermark}" + SYNC, num_pages=5)
        w.submit(0, 8, 3)
        w.submit(1, 8, 3)
        assert [w.step_tokens() for _ in steps] == steps


def test_the_youngest_loses_its_pages_queues_before_all_others_and_computes_again_what_it_knew() -> None:
    w = World("vllm-ar,page_size=2" + SYNC, num_pages=4, max_batch=2)
    w.submit(0, 2, 4)
    w.submit(1, 2, 4)
    w.submit(2, 2, 1)
    assert w.step_tokens() == "prefill 0P2/2 1P2/2"
    assert w.step_tokens() == "decode 0D1/3 1D1/3"
    assert w.step_tokens() == "decode 0D1/4 1D1/4"
    # The fifth token of 0 wants a page; nobody is let in by a step that preempts.
    assert w.plan_tokens() == "decode 0D1/5"
    assert (w.plan.preempted, w.plan.pages, w.engine.num_waiting) == ((1,), 3, 2)
    assert w.commit({0: [0]}) == [0]
    assert w.step_tokens() == "prefill 1P5/5 2P2/2"  # it comes before 2
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:3], w["finish"][:3]) == ([4, 4, 1], [4.0, 5.0, 5.0])
    assert (w["first_emission"][1], w["num_preemptions"][:3]) == (1.0, [0, 1, 0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_of_two_that_are_preempted_the_older_queues_first() -> None:
    w = World(SPEC + SYNC, num_pages=7)
    for i in range(3):
        w.submit(i, 1, 3)
    assert w.step_tokens() == "prefill 0P1/1 1P1/1 2P1/1"
    # 0 takes three of the four free pages; 1 wants three, and finds two with what 2 held: it goes itself.
    assert w.plan_tokens() == "decode 0D3/4"
    assert w.plan.preempted == (2, 1)
    assert w.commit({0: [0, 1]}) == [0]
    assert w.plan_tokens() == "prefill 1P2/2 2P2/2"


def test_what_is_preempted_in_mid_prompt_begins_again() -> None:
    w = World("vllm-ar,max_num_batched_tokens=4,page_size=2,scheduler_reserve_full_isl=false" + SYNC, num_pages=5)
    w.submit(0, 3, 4)
    w.submit(1, 8, 1)
    assert w.step_tokens() == "prefill 0P3/3 1P1/1"
    assert w.step_tokens() == "decode 0D1/4 1P3/4"
    assert w.plan_tokens() == "decode 0D1/5"  # 1 has two pages, wants two more, and is the youngest
    assert w.plan.preempted == (1,)
    w.commit({0: [0]})
    assert w.engine.outstanding_tokens == 1 + 8 + 1
    # A step on, it takes the two pages again with its next chunk.
    assert w.step_tokens() == "decode 0D1/6 1P3/3"
    assert w["num_tokens"][:2] == [4, 0]
    assert w.step_tokens() == "prefill 1P4/7"
    assert w.step_tokens() == "prefill 1P1/8"
    assert (w["finish"][1], w["num_tokens"][1], w["scheduled"][1]) == (6.0, 1, 0.0)
    assert w.engine.outstanding_tokens == 0


# ---- one step ahead ----------------------------------------------------------------------------------------------


def test_a_step_ahead_who_arrives_during_a_step_is_in_the_second_after_it() -> None:
    w = World(AR)
    w.submit(0, 3, 4)
    assert w.step_tokens() == "prefill 0P3/3"
    w.submit(1, 3, 1)  # the second step is decided already
    assert w.step_tokens() == "decode 0D1/4"
    assert w.step_tokens() == "decode 0D1/5 1P3/3"


def test_a_request_that_ends_at_its_limit_is_asked_no_more() -> None:
    w = World(AR)
    w.submit(0, 3, 2)
    assert [w.step_tokens() for _ in range(3)] == ["prefill 0P3/3", "decode 0D1/4", "nothing"]
    assert w["finish"][0] == 2.0


def test_a_request_that_ends_at_an_eos_is_computed_once_too_often() -> None:
    w = World(AR, eos=True)
    w.submit(0, 3, 2)
    assert w.step_tokens() == "prefill 0P3/3"
    w.submit(1, 2, 1)
    assert w.step_tokens() == "decode 0D1/4"
    assert w["finish"][0] == 2.0
    assert w.step_tokens() == "decode 0I1/5 1P2/2"
    assert w.features()[0] == 3
    assert w.step_tokens() == "decode 1I1/3"
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:2], w["finish"][:2], w["num_committed"][:2]) == ([2, 1], [2.0, 3.0], [2, 1])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_without_looking_ahead_an_eos_wastes_nothing() -> None:
    w = World(AR + SYNC, eos=True)
    w.submit(0, 3, 2)
    assert [w.step_tokens() for _ in range(3)] == ["prefill 0P3/3", "decode 0D1/4", "nothing"]


def test_a_request_preempted_while_its_last_step_is_in_flight_ends_with_that_step() -> None:
    w = World("vllm-ar,page_size=2", num_pages=4)
    w.submit(0, 2, 4)
    w.submit(1, 2, 3)
    assert w.step_tokens() == "prefill 0P2/2 1P2/2"
    assert w.step_tokens() == "decode 0D1/3 1D1/3"
    # As this step begins the next is decided: 0 wants a third page there, and takes 1's.
    assert w.plan_tokens() == "decode 0D1/4 1D1/4"
    assert (w.plan.preempted, w.plan.freed) == ((1,), ())  # they come free when it is over
    assert (w.engine.num_waiting, w.engine.num_running) == (1, 1)
    assert w.commit({0: [0], 1: [0]}) == [1]
    assert (w.engine.num_waiting, w.engine.num_running) == (0, 1)
    assert w.step_tokens() == "decode 0D1/5"
    assert w.plan.freed == (1,)
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:2], w["finish"][:2], w["num_preemptions"][:2]) == ([4, 3], [4.0, 3.0], [0, 1])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_the_token_of_a_step_in_flight_is_kept_by_whom_it_finds_preempted() -> None:
    w = World("vllm-ar,page_size=2", num_pages=4)
    w.submit(0, 2, 4)
    w.submit(1, 2, 4)
    for _ in range(3):
        w.step_tokens()
    assert w["num_tokens"][:2] == [3, 3]
    assert w.step_tokens() == "decode 0D1/5"
    assert w.plan.freed == (1,)
    assert w.step_tokens() == "prefill 1P5/5"
    assert (w["num_tokens"][:2], w["finish"][:2]) == ([4, 4], [4.0, 5.0])


SPEC = "vllm-ar-spec:2,page_size=1,drafter=ngram"


# ---- drafts ------------------------------------------------------------------------------------------------------


def test_accepted_drafts_are_tokens_and_rejected_ones_are_computed_again() -> None:
    w = World("vllm-ar-spec:2,page_size=4" + SYNC)
    w.submit(0, 4, 5)
    assert w.step_tokens() == "prefill 0P4/4"
    assert w.plan_tokens() == "decode 0D3/7"
    assert w.features() == (3, 3 * 4 + 6, 7, 3, 3, 1, 0, 1)
    w.commit({0: [0, 1]})
    assert w["num_tokens"][0] == 3
    assert w.plan_tokens() == "decode 0D3/9"  # six were computed for good
    # All three accepted, of which two are within the output.
    assert w.commit({0: [0, 1, 2]}) == [0]
    assert (w["num_tokens"][0], w["num_emissions"][0], w["finish"][0]) == (5, 3, 3.0)
    assert w.schedule() == "nothing"


def test_with_drafts_in_flight_pages_are_held_as_if_all_were_accepted() -> None:
    w = World(SPEC)
    w.submit(0, 4, 9)
    assert w.plan_tokens() == "prefill 0P4/4"
    assert w.plan.pages == 4 + 3  # behind a prompt no drafts are in flight
    w.commit({0: [0]})
    assert w.plan_tokens() == "decode 0D3/7"
    assert w.plan.pages == 4 + 3 + 3  # ... and the step behind computes as many again
    w.commit({0: [0, 1, 2]})
    assert w.plan_tokens() == "decode 0D3/10"
    assert w.plan.pages >= 10


@pytest.mark.parametrize(("drafter", "behind"), [("ngram", 0), ("eagle", 2), ("draft_model", 2)])
def test_a_drafter_with_keys_and_values_of_its_own_holds_room_behind_every_row(drafter: str, behind: int) -> None:
    w = World(f"vllm-ar-spec:2,page_size=1,drafter={drafter}" + SYNC)
    w.submit(0, 4, 9)
    assert w.plan_tokens() == "prefill 0P4/4"
    assert w.plan.pages == 4 + behind
    w.commit({0: [0]})
    assert w.plan_tokens() == "decode 0D3/7"
    assert w.plan.pages == 7 + behind


def test_a_draft_model_takes_a_token_of_the_budget_for_every_row() -> None:
    w = World("vllm-ar-spec:2,page_size=1,drafter=draft_model,max_num_batched_tokens=8" + SYNC)
    w.submit(0, 4, 9)
    w.submit(1, 4, 9)
    assert w.step_tokens() == "prefill 0P4/4 1P2/2"


def test_a_request_that_lacks_one_token_as_it_is_let_in_is_padded_to_the_width_of_the_others() -> None:
    w = World(SPEC + SYNC)
    w.submit(0, 4, 9)
    assert w.step_tokens() == "prefill 0P4/4"
    w.submit(1, 1, 4)
    assert w.plan_tokens() == "decode 0D3/7 1P3/3"
    assert w.plan.window.sum(axis=1).tolist() == [3, 1]  # of the padding nothing is sampled
    w.commit({0: [0], 1: [0]})
    assert w["num_tokens"][:2] == [2, 1]
    w.submit(2, 4, 9)
    assert w.step_tokens() == "decode 0D3/8 1D3/4 2P4/4"


def test_a_resumed_row_with_one_token_left_has_no_drafts() -> None:
    w = World(SPEC + SYNC + ",max_num_batched_tokens=4,scheduler_reserve_full_isl=false", num_pages=14)
    w.submit(0, 2, 7)
    w.submit(1, 1, 9)
    steps = [w.step_tokens() for _ in range(6)]
    assert (steps[0], steps[4:]) == ("prefill 0P2/2 1P1/1", ["decode 0D3/8 1D1/5", "decode 0D3/9"])
    assert w["num_preemptions"][:2] == [0, 1]
    assert [w.step_tokens() for _ in range(3)] == ["decode 0D3/10 1P1/1", "prefill 1P4/5", "prefill 1P1/6"]
    assert w.step_tokens() == "decode 1D3/9"


def test_a_request_fits_only_with_its_last_drafts() -> None:
    assert World(SPEC + SYNC, num_pages=11).submit(0, 4, 5)
    assert not World(SPEC + SYNC, num_pages=10).submit(0, 4, 5)


# ---- canvases ----------------------------------------------------------------------------------------------------

DIFFUSION = "vllm-diffusion,canvas_length=4,page_size=4,max_num_batched_tokens=8,max_num_seqs=2"


def test_a_canvas_is_denoised_then_committed_by_a_causal_pass_with_which_its_tokens_leave() -> None:
    w = World(DIFFUSION + SYNC)
    w.submit(0, 3, 6)
    assert w.step_tokens({}) == "prefill 0P3/3"
    assert w.features() == (3, 6, 3, 0, 0, 1, 3, 1)
    assert w.schedule() == "decode 0D:MMMM"
    assert w.features() == (4, 4 * 3 + 16, 7, 4, 4, 1, 0, 1)
    w.commit()
    assert w.step_tokens({0: ALL}) == "decode 0D4/7"
    assert w["num_tokens"][0] == 0
    assert w.schedule() == "decode 0F:PPPP"
    assert w.features() == (4, 4 * 3 + 10, 7, 4, 0, 1, 0, 1)  # its logits are computed, and dropped
    w.commit()
    assert (w["num_tokens"][0], w["first_emission"][0], w["first_block"][0]) == (4, 4.0, 4.0)  # 1 + (2 + 1) forwards
    assert w.step_tokens({0: ALL}) == "decode 0D4/11"
    assert w.plan_tokens() == "decode 0F4/11"  # the last canvas pays its commit as well
    assert w.commit() == [0]
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][0], w["num_emissions"][0], w["num_forwards"][0]) == (6, 2, 5)
    assert w["num_committed"][0] == 8  # two positions are wasted
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_a_prompt_s_chunk_is_mixed_with_others_canvases_and_the_budget_cuts_a_canvas() -> None:
    w = World("vllm-diffusion,canvas_length=4,page_size=4,max_num_batched_tokens=10" + SYNC)
    w.submit(0, 2, 8)
    w.submit(1, 2, 8)
    assert w.step_tokens({}) == "prefill 0P2/2 1P2/2"
    w.submit(2, 5, 4)
    assert w.step_tokens({}) == "decode 0D4/6 1D4/6 2P2/2"
    assert w.features() == (10, 2 * (4 * 2 + 16) + 3, 14, 8, 8, 3, 2, 1)
    assert w.step_tokens({}) == "decode 0D4/6 1D4/6 2P2/4"
    assert w.step_tokens({}) == "decode 0D4/6 1D4/6 2P1/5"
    # Its canvas finds two of ten tokens left: it is denoised in these, and its pass commits these alone.
    assert w.step_tokens({2: range(2)}) == "decode 0D4/6 1D4/6 2D2/7"
    assert w.plan_tokens() == "decode 0D4/6 1D4/6 2F2/7"
    w.commit()
    assert w["num_tokens"][2] == 2
    assert w.step_tokens({}) == "decode 0D4/6 1D4/6 2D2/9"


@pytest.mark.parametrize("eos", [False, True])
def test_looking_ahead_a_canvas_is_computed_for_nothing_behind_the_last_one(eos: bool) -> None:
    w = World(DIFFUSION, eos=eos)
    w.submit(0, 3, 3)
    assert w.step_tokens({}) == "prefill 0P3/3"
    assert w.step_tokens({0: ALL}) == "decode 0D4/7"
    w.submit(1, 1, 3)
    assert w.step_tokens({}) == "decode 0F4/7"
    assert (w["finish"][0], w["num_tokens"][0]) == (3.0, 3)
    assert w.step_tokens({}) == "decode 0I4/11 1P1/1"
    assert w.features() == (5, 4 * 7 + 16 + 1, 12, 4, 4, 2, 1, 1)


def test_looking_ahead_a_request_that_lacks_two_tokens_is_computed_in_every_other_step() -> None:
    w = World(DIFFUSION)
    w.submit(0, 3, 2)
    w.submit(1, 3, 3)
    assert w.step_tokens({}) == "prefill 0P3/3 1P3/3"
    steps = [w.step_tokens({}) for _ in range(3)]
    assert steps == ["decode 0D4/7 1D4/7", "decode 1D4/7", "decode 0D4/7 1D4/7"]


def test_pages_of_an_ended_request_are_free_while_its_last_row_is_in_flight() -> None:
    w = World(DIFFUSION, num_pages=3)
    w.submit(0, 4, 4)
    assert w.step_tokens({}) == "prefill 0P4/4"
    assert w.step_tokens({0: ALL}) == "decode 0D4/8"
    w.submit(1, 4, 4)
    assert w.step_tokens({}) == "decode 0F4/8"
    assert w.plan_tokens() == "decode 0I4/12"
    assert w.plan.pages == 1  # of the second request, which the step behind lets in
    w.commit()
    assert w.step_tokens({}) == "prefill 1P4/4"


def test_a_request_that_ends_at_its_limit_is_asked_no_more_where_others_end_at_an_eos() -> None:
    w = World(AR, eos=True)
    w.submit(0, 3, 2, max_tokens=2)
    w.submit(1, 3, 2, max_tokens=9)
    assert w.step_tokens() == "prefill 0P3/3 1P3/3"
    assert w.step_tokens() == "decode 0D1/4 1D1/4"
    assert w.step_tokens() == "decode 1I1/5"


def test_looking_ahead_a_canvas_in_flight_has_room_for_another_behind_it() -> None:
    w = World(DIFFUSION)
    w.submit(0, 4, 8)
    w.step_tokens({})
    w.plan_tokens()
    assert w.plan.pages == 3  # 4 + 2 * 4 tokens
    assert World(DIFFUSION, num_pages=4).submit(0, 4, 8)
    assert not World(DIFFUSION, num_pages=3).submit(0, 4, 8)
    assert World(DIFFUSION + SYNC, num_pages=3).submit(0, 4, 8)
    assert not World(DIFFUSION + SYNC, num_pages=3).submit(0, 5, 5)  # canvases begin behind the prompt: 5 + 8


# Tokens in the layers with a window take ten times what they take in the others, as DiffusionGemma's do.
WINDOWS = {"window": 8, "window_bytes": 204_800, "kv_bytes": 20_480}


def test_layers_with_a_window_hold_pages_for_what_is_in_sight_and_short_rows_for_their_length() -> None:
    w = World(DIFFUSION + SYNC, windows=WINDOWS)
    w.submit(0, 10, 8)
    held = []
    for step, commits in (
        ("prefill 0P8/8", {}), ("prefill 0P2/10", {}), ("decode 0D4/14", {0: ALL}), ("decode 0F4/14", {}),
        ("decode 0D4/18", {0: ALL}), ("decode 0F4/18", {}),
    ):  # fmt: skip
        assert w.plan_tokens() == step
        held.append(w.plan.pages)
        w.commit(commits)
    # 2, 3, 4 and 5 pages of all tokens; in sight of position 14, the second canvas's first, are 7 tokens before it.
    assert held == [2 + 20, 3 + 30, 4 + 40, 4 + 40, 5 + 40, 5 + 40]
    assert w.engine.pages_held == 0
    w.submit(1, 2, 2)
    w.step_tokens({})
    w.plan_tokens()
    assert w.plan.pages == 2 + 20  # a prompt of 2 and a canvas, though the window has 8


def test_a_row_in_need_of_a_window_s_pages_preempts_the_youngest_of_its_own() -> None:
    w = World(DIFFUSION + SYNC, num_pages=66, windows=WINDOWS)
    w.submit(0, 10, 8)
    w.submit(1, 2, 4)
    assert w.step_tokens({}) == "prefill 0P8/8"
    assert w.step_tokens({}) == "prefill 0P2/10 1P2/2"  # 33 and 11 pages
    assert w.step_tokens({0: ALL}) == "decode 0D4/14 1D4/6"  # 44 and 22: all there are
    assert w.step_tokens({}) == "decode 0F4/14 1D4/6"
    assert w.plan_tokens() == "decode 0D4/18"  # 45: the other's are taken, of both kinds
    assert (w.plan.preempted, w.plan.pages) == ((1,), 45)
    w.commit({0: ALL})
    assert w.step_tokens({}) == "decode 0F4/18 1P2/2"
    assert w.engine.pages_held == 11
    assert not World(DIFFUSION + SYNC, num_pages=54, windows=WINDOWS).submit(0, 10, 8)  # of 7 + 8 tokens at once
    assert World(DIFFUSION + SYNC, num_pages=55, windows=WINDOWS).submit(0, 10, 8)


def test_preemption_loses_a_canvas_and_keeps_the_tokens_that_are_committed() -> None:
    w = World(DIFFUSION + SYNC, num_pages=6)
    w.submit(0, 4, 12)
    w.submit(1, 4, 8)
    assert w.step_tokens({}) == "prefill 0P4/4 1P4/4"
    assert w.step_tokens({}) == "decode 0D4/8 1D4/8"
    assert w.step_tokens({1: ALL}) == "decode 0D4/8 1D4/8"
    assert w.step_tokens({0: ALL}) == "decode 0D4/8 1F4/8"
    assert w.step_tokens({}) == "decode 0F4/8 1D4/12"
    assert w.step_tokens({}) == "decode 0D4/12 1D4/12"
    assert w.step_tokens({0: ALL}) == "decode 0D4/12 1D4/12"
    assert w.step_tokens({}) == "decode 0F4/12 1D4/12"
    assert w["num_tokens"][:2] == [8, 4]
    # The third canvas of 0 wants a page: 1 loses its own, four steps in.
    assert w.plan_tokens() == "decode 0D4/16"
    assert w.plan.preempted == (1,)
    w.commit({0: ALL})
    assert w.plan_tokens() == "decode 0F4/16 1P4/4"
    assert w.commit() == [0]
    assert w.step_tokens({}) == "prefill 1P4/8"
    assert w.plan_tokens() == "decode 1D4/12"
    assert w.plan.status.tolist() == [[0, 0, 0, 0]]
    assert w.plan.evaluations.tolist() == [[0, 0, 0, 0]]  # from its first step on
    w.commit({1: ALL})
    assert w.plan_tokens() == "decode 1F4/12"
    assert w.commit() == [1]
    assert (w["num_tokens"][:2], w["num_emissions"][:2], w["first_emission"][:2]) == ([12, 8], [3, 2], [5.0, 4.0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_a_canvas_decoded_but_not_committed_is_lost_to_preemption_too() -> None:
    w = World(DIFFUSION + SYNC, num_pages=4)
    w.submit(0, 4, 8)
    w.submit(1, 4, 4)
    w.step_tokens({})
    assert w.step_tokens({0: ALL}) == "decode 0D4/8 1D4/8"
    assert w.step_tokens({1: ALL}) == "decode 0F4/8 1D4/8"
    assert w.step_tokens({0: ALL}) == "decode 0D4/12"  # 1 is decoded, and out
    assert w.step_tokens({}) == "decode 0F4/12 1P4/4"
    assert w.schedule() == "decode 1D:MMMM"


def test_the_pass_in_flight_of_a_preempted_canvas_commits_it() -> None:
    w = World(DIFFUSION, num_pages=6)
    w.submit(0, 4, 8)
    w.submit(1, 4, 4)
    assert w.step_tokens({}) == "prefill 0P4/4 1P4/4"
    assert w.step_tokens({0: ALL}) == "decode 0D4/8 1D4/8"
    assert w.step_tokens({1: ALL}) == "decode 0F4/8 1D4/8"
    assert w.plan_tokens() == "decode 0D4/12 1F4/8"
    assert w["num_preemptions"][:2] == [0, 1]
    assert w.commit() == [1]
    assert w.step_tokens({0: ALL}) == "decode 0D4/12"
    assert w.step_tokens({}) == "decode 0F4/12"
    assert w.step_tokens({}) == "decode 0I4/16"
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:2], w["finish"][:2]) == ([8, 4], [6.0, 4.0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_a_request_may_ask_for_narrower_canvases_and_computes_no_more_than_those() -> None:
    w = World(DIFFUSION + SYNC)
    w.submit(0, 3, 4, canvas_length=3)
    w.submit(1, 3, 4, canvas_length=9)  # as wide as the policy's
    assert w.step_tokens({}) == "prefill 0P3/3 1P3/3"
    assert w.schedule() == "decode 0D:MMMm 1D:MMMM"
    assert w.features() == (7, 3 * 3 + 9 + 4 * 3 + 16, 6 + 7, 7, 7, 2, 0, 1)
    w.commit({0: range(3), 1: ALL})
    assert w.step_tokens({}) == "decode 0F3/6 1F4/7"
    assert w["num_tokens"][:2] == [3, 4]
    assert w.step_tokens({0: range(3)}) == "decode 0D3/9"
    assert w.plan_tokens() == "decode 0F3/9"
    assert w.commit() == [0]
    assert (w["num_tokens"][0], w["num_committed"][0], w["num_computed"][0]) == (4, 6, 12)
    assert w.schedule() == "nothing"
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


@pytest.mark.parametrize("spec", [DIFFUSION + SYNC, DIFFUSION])
def test_a_read_only_request_takes_one_step_and_no_commit(spec: str) -> None:
    w = World(spec)
    w.submit(0, 3, 2, canvas_length=3, read_only=True)
    w.submit(1, 3, 4)
    assert w.step_tokens({}) == "prefill 0P3/3 1P3/3"
    assert w.schedule() == "decode 0D:MMMm 1D:MMMM"
    assert w.commit({0: range(3)}) == [0]
    assert (w["num_tokens"][0], w["num_forwards"][0], w["finish"][0]) == (2, 1, 2.0)
    assert w.step_tokens({1: ALL}) == "decode 1D4/7"  # and nothing is computed for nothing behind it
    assert w.step_tokens({}) == "decode 1F4/7"
    with pytest.raises(TraceError, match="request 2 is read-only and may return 5 tokens, expected at most the 4"):
        w.submit(2, 3, 5, read_only=True)


def test_a_narrower_canvas_needs_room_for_itself_alone_and_preemption_loses_no_more() -> None:
    # In canvases of three 4 tokens take 6, in one of four they take 4.
    assert World(DIFFUSION + SYNC, num_pages=2).submit(0, 4, 4)
    assert not World(DIFFUSION + SYNC, num_pages=2).submit(0, 4, 4, canvas_length=3)
    # Looking ahead there is room for another of its own width, 4 + 2 * 2 tokens.
    assert World(DIFFUSION, num_pages=2).submit(0, 4, 2, canvas_length=2)
    w = World(DIFFUSION + SYNC, num_pages=4)
    w.submit(0, 4, 8)
    w.submit(1, 4, 3, canvas_length=3)
    w.step_tokens({})
    assert w.step_tokens({0: ALL}) == "decode 0D4/8 1D3/7"
    assert w.step_tokens({}) == "decode 0F4/8 1D3/7"
    assert w.step_tokens({0: ALL}) == "decode 0D4/12"  # 1 is out
    assert w.step_tokens({}) == "decode 0F4/12 1P4/4"
    assert w.schedule() == "decode 1D:MMMm"
    w.commit({1: range(3)})
    assert w.plan_tokens() == "decode 1F3/7"
    assert w.commit() == [1]
    assert w["num_tokens"][:2] == [8, 3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vllm-diffusion,max_num_batched_tokens=255",
         "max_num_batched_tokens is 255, expected at least the canvas length 256"),
        ("vllm-diffusion,long_prefill_token_threshold=100",
         "long_prefill_token_threshold is 100, expected 0 or at least the canvas length 256"),
        ("vllm-ar,enable_chunked_prefill=false,long_prefill_token_threshold=5",
         "long_prefill_token_threshold is 5 and enable_chunked_prefill is false: expected 0"),
        ("vllm-ar,max_num_seqs=9000", "max_num_seqs is 9000, expected at most max_num_batched_tokens, 8192"),
        ("vllm-diffusion,threshold=0.8,strategy=low_confidence_dynamic",
         "strategy is low_confidence_dynamic, and a canvas commits by law"),
    ],
)  # fmt: skip
def test_what_no_step_could_compute_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse(spec)
    assert str(error.value) == f"policy {spec!r}: {message}"
