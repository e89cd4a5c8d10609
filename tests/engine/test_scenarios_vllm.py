"""vLLM v1's token budget, step by step (production-dllm-serving.md 2.2, 2.3): what rows compute, over which keys.

One step by step for each idea: the random scenarios of test_oracles.py, recorded in vLLM, hold the rest.
"""

from ..worlds import World
from .hand import asked

SYNC = ",async_scheduling=false"
AR = "vllm-ar,max_num_batched_tokens=8,page_size=4"


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
    assert (w.engine.pages_held, w.engine.expected_tokens) == (0, 0)


def test_without_chunks_a_request_is_rejected_that_could_not_be_prefilled_again_at_its_end() -> None:
    w = World(AR + ",enable_chunked_prefill=false")
    assert w.submit(0, 5, 3)
    assert not w.submit(1, 5, 4)


# ---- drafts ------------------------------------------------------------------------------------------------------


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


def test_looking_ahead_a_canvas_in_flight_has_room_for_another_behind_it() -> None:
    w = asked(World(DIFFUSION), (4, 8))
    w.step_tokens({})
    w.plan_tokens()
    assert w.plan.pages == 3  # 4 + 2 * 4 tokens
    assert World(DIFFUSION, num_pages=4).submit(0, 4, 8)
    assert not World(DIFFUSION, num_pages=3).submit(0, 4, 8)
    assert World(DIFFUSION + SYNC, num_pages=3).submit(0, 4, 8)
    assert not World(DIFFUSION + SYNC, num_pages=3).submit(0, 5, 5)  # canvases begin behind the prompt: 5 + 8
