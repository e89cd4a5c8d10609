"""vLLM v1's token budget, step by step (production-dllm-serving.md 2.2, 2.3): what rows compute, over which keys.

One step by step for each idea: the random scenarios of test_oracles.py, recorded in vLLM, hold the rest.
"""

import pytest

from dsim.engine.errors import TraceError

from ..worlds import World
from .hand import asked, check_over

SYNC = ",async_scheduling=false"
AR = "vllm-ar,max_num_batched_tokens=8,page_size=4"
ALL = range(4)  # of a canvas


# ---- chunks and the budget ---------------------------------------------------------------------------------------


def test_a_prompt_takes_what_the_budget_has_left_and_goes_on_beside_decoding() -> None:
    w = asked(World(AR + SYNC), (5, 3), (10, 2))
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


def test_without_chunks_a_request_is_rejected_that_could_not_be_prefilled_again_at_its_end() -> None:
    w = World(AR + ",enable_chunked_prefill=false")
    assert w.submit(0, 5, 3)
    assert not w.submit(1, 5, 4)


def test_prompts_have_an_interval_while_others_decode() -> None:
    w = asked(World(AR + ",prefill_schedule_interval=3" + SYNC), (12, 20))
    assert [w.step_tokens() for _ in range(2)] == ["prefill 0P8/8", "prefill 0P4/12"]  # alone it waits for none
    w.submit(1, 10, 1)
    assert [w.step_tokens() for _ in range(3)] == ["decode 0D1/13", "decode 0D1/14", "decode 0D1/15 1P7/7"]
    assert [w.step_tokens() for _ in range(3)] == ["decode 0D1/16", "decode 0D1/17", "decode 0D1/18 1P3/10"]


# ---- preemption --------------------------------------------------------------------------------------------------


def test_the_youngest_loses_its_pages_queues_before_all_others_and_computes_again_what_it_knew() -> None:
    w = asked(World("vllm-ar,page_size=2" + SYNC, num_pages=4, max_batch=2), (2, 4), (2, 4), (2, 1))
    assert w.step_tokens() == "prefill 0P2/2 1P2/2"
    assert w.step_tokens() == "decode 0D1/3 1D1/3"
    assert w.step_tokens() == "decode 0D1/4 1D1/4"
    # The fifth token of 0 wants a page; nobody is let in by a step that preempts.
    assert w.plan_tokens() == "decode 0D1/5"
    assert (w.plan.preempted, w.plan.pages, w.engine.num_waiting) == ((1,), 3, 2)
    assert w.commit({0: [0]}) == [0]
    assert w.step_tokens() == "prefill 1P5/5 2P2/2"  # it comes before 2
    assert (w["num_tokens"][:3], w["finish"][:3]) == ([4, 4, 1], [4.0, 5.0, 5.0])
    assert (w["first_emission"][1], w["num_preemptions"][:3]) == (1.0, [0, 1, 0])
    check_over(w)


# ---- one step ahead ----------------------------------------------------------------------------------------------


def test_a_request_that_ends_at_an_eos_is_computed_once_too_often() -> None:
    w = asked(World(AR, eos=True), (3, 2))
    assert w.step_tokens() == "prefill 0P3/3"
    w.submit(1, 2, 1)
    assert w.step_tokens() == "decode 0D1/4"
    assert w["finish"][0] == 2.0
    assert w.step_tokens() == "decode 0I1/5 1P2/2"
    assert w.features()[0] == 3
    assert w.step_tokens() == "decode 1I1/3"
    assert (w["num_tokens"][:2], w["finish"][:2], w["num_committed"][:2]) == ([2, 1], [2.0, 3.0], [2, 1])
    check_over(w)


def test_a_request_preempted_while_its_last_step_is_in_flight_ends_with_that_step() -> None:
    w = asked(World("vllm-ar,page_size=2", num_pages=4), (2, 4), (2, 3))
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
    assert (w["num_tokens"][:2], w["finish"][:2], w["num_preemptions"][:2]) == ([4, 3], [4.0, 3.0], [0, 1])
    check_over(w)


SPEC = "vllm-ar-spec:2,page_size=1,drafter=ngram"


# ---- drafts ------------------------------------------------------------------------------------------------------


def test_accepted_drafts_are_tokens_and_rejected_ones_are_computed_again() -> None:
    w = asked(World("vllm-ar-spec:2,page_size=4" + SYNC), (4, 5))
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


def test_a_request_fits_only_with_its_last_drafts() -> None:
    assert World(SPEC + SYNC, num_pages=11).submit(0, 4, 5)
    assert not World(SPEC + SYNC, num_pages=10).submit(0, 4, 5)


def test_drafts_end_at_the_context_limit_and_a_token_without_room_for_them_is_not_padded() -> None:
    # With its drafts a token is more than a step's budget: where they have room, vLLM would wait forever.
    w = asked(
        World("vllm-ar-spec:7,page_size=4,max_num_batched_tokens=6,max_num_seqs=2" + SYNC, context_limit=8), (2, 6)
    )
    assert w.step_tokens() == "prefill 0P2/2"
    w.submit(1, 1, 2)
    assert w.step_tokens({0: [0, 1], 1: [0]}) == "decode 0D5/7 1P1/1"
    assert w.plan.pages == 2 + 2
    assert w.step_tokens() == "decode 0D3/7 1D3/4"


# ---- canvases ----------------------------------------------------------------------------------------------------

DIFFUSION = "vllm-diffusion,canvas_length=4,page_size=4,max_num_batched_tokens=8,max_num_seqs=2"


def test_a_canvas_ends_at_the_context_limit() -> None:
    w = asked(World(DIFFUSION + SYNC, context_limit=10), (3, 7))
    steps = [w.step_tokens(commits) for commits in ({}, {0: ALL}, {}, {0: range(3)})]
    assert steps == ["prefill 0P3/3", "decode 0D4/7", "decode 0F4/7", "decode 0D3/10"]
    assert w.plan_tokens() == "decode 0F3/10"
    assert w.commit() == [0]


def test_a_canvas_is_denoised_then_committed_by_a_causal_pass_with_which_its_tokens_leave() -> None:
    w = asked(World(DIFFUSION + SYNC), (3, 6))
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
    assert (w["num_tokens"][0], w["num_emissions"][0], w["num_forwards"][0]) == (6, 2, 5)
    assert w["num_committed"][0] == 8  # two positions are wasted
    check_over(w)


def test_looking_ahead_a_canvas_in_flight_has_room_for_another_behind_it() -> None:
    w = asked(World(DIFFUSION), (4, 8))
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
    w = asked(World(DIFFUSION + SYNC, windows=WINDOWS), (10, 8))
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
    check_over(w)


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


def test_a_narrower_canvas_needs_room_for_itself_alone() -> None:
    # In canvases of three 4 tokens take 6, in one of four they take 4.
    assert World(DIFFUSION + SYNC, num_pages=2).submit(0, 4, 4)
    assert not World(DIFFUSION + SYNC, num_pages=2).submit(0, 4, 4, canvas_length=3)
    # Looking ahead there is room for another of its own width, 4 + 2 * 2 tokens.
    assert World(DIFFUSION, num_pages=2).submit(0, 4, 2, canvas_length=2)
