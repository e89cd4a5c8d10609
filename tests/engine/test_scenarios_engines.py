"""Production engines step by step (production-dllm-serving.md 2 to 4, errata 4).

One step by step for each idea: the random scenarios of test_oracles.py, recorded in the engines, hold the rest.
"""

from dsim.engine.latency import LatencyModel
from dsim.sim.step_model import StepModel

from ..worlds import World, asked, check_over

SYNC = ",async_scheduling=false"
AR = "vllm-ar,max_num_batched_tokens=8,page_size=4"


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


def test_drafts_end_at_the_context_limit_and_a_token_without_room_for_them_is_not_padded() -> None:
    # With its drafts a token is more than a step's budget: where they have room, vLLM would wait forever.
    spec = "vllm-ar:2,drafter=eagle,num_speculative_tokens=7,page_size=4,max_num_batched_tokens=6"
    w = asked(World(spec + SYNC, context_limit=8), (2, 6))
    assert w.step_tokens() == "prefill 0P2/2"
    w.submit(1, 1, 2)
    assert w.step_tokens({0: [0, 1], 1: [0]}) == "decode 0D5/7 1P1/1"
    assert w.plan.pages == 2 + 2
    assert w.step_tokens() == "decode 0D3/7 1D3/4"


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


LOOK_AHEAD = "lmdeploy-0.18:4,page_size=4"
ALL = range(4)


LANE = LOOK_AHEAD + ",max_prefill_tokens=8,opt_ttft_short_turns=2"


def test_a_long_prompt_takes_turns_with_those_that_decode_a_chunk_at_a_time() -> None:
    w = asked(World(LANE, num_pages=20), (4, 40))
    assert w.step() == "prefill 0:PPPP"
    w.submit(1, 21, 4)  # 24 positions
    assert w.step() == "decode 0D:MMMM"
    assert w.schedule() == "prefill 1:pmmm"
    assert w.features() == (8, 4 * (4 + 8), 8, 0, 0, 1, 8, 1)
    w.commit()
    assert w.step() == "decode 0D:MMMM"
    assert w.schedule() == "prefill 1:pmmm"
    assert w.features() == (8, 4 * (12 + 16), 16, 0, 0, 1, 8, 1)
    w.commit()
    assert w["scheduled"][1] == 2.0
    # The last chunk is not put off, and is a denoising step of its block.
    assert w.schedule() == "prefill 1:PMMM"
    assert w.features() == (8, 4 * (20 + 24), 24, 4, 4, 1, 8, 1)
    w.commit({1: [1, 2, 3]})
    assert (w["num_tokens"][1], w["first_emission"][1]) == (3, 6.0)
    assert w.step() == "decode 0D:MMMM 1F:PPPP"


def test_a_request_fits_with_the_tokens_that_its_pages_are_extended_by() -> None:
    assert World(LOOK_AHEAD, num_pages=4).submit(0, 4, 8)
    assert not World(LOOK_AHEAD, num_pages=3).submit(0, 4, 8)
    # At an interval of one they are extended by none, though a step is decided on ahead.
    w = asked(World(LOOK_AHEAD + ",prefill_interval=1", num_pages=3), (4, 8))
    assert w.step() == "prefill 0:PPPP"
    assert w.plan.pages == 1
    # 64 tokens at blocks of 32 and pages of 64.
    assert World("lmdeploy-0.18", num_pages=2).submit(0, 32, 32)
    assert not World("lmdeploy-0.18", num_pages=2).submit(0, 32, 33)


PAGES = ",block_length=4,page_size=4"
FDFO, IN_STEP = (name + PAGES for name in ("sglang-fdfo", "sglang-sync"))
GEMMA = "sglang-gemma,canvas_length=4,page_size=4"


def test_a_prompt_is_prefilled_a_block_a_round_and_its_tail_heads_the_first_decode_block() -> None:
    w = asked(World(FDFO), (10, 4))
    assert w.step_tokens({}) == "prefill 0P4/4"
    assert w.features() == (4, 16, 4, 4, 0, 1, 4, 1)  # the graph of a decode round, LM head and all
    assert w["num_committed"][0] == 0  # a prefill denoises nothing
    assert w.step_tokens({}) == "prefill 0P4/8"
    assert w.features() == (4, 32, 8, 4, 0, 1, 4, 1)
    assert w.step({0: [2, 3]}) == "decode 0D:PPMM"
    assert w.features() == (4, 4 * 12, 12, 4, 4, 1, 0, 1)
    assert w["num_tokens"][0] == 0
    assert w.step() == "decode 0F:PPPP"  # which stores the final keys and values; tokens leave with it
    assert (w["num_tokens"][0], w["first_emission"][0], w["first_block"][0]) == (2, 4.0, 4.0)
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.schedule() == "decode 0F:PPPP"  # on the last block, too
    assert w.commit() == [0]
    assert (w["num_tokens"][0], w["num_forwards"][0], w["finish"][0]) == (4, 4, 6.0)
    check_over(w)


def test_a_request_of_no_tokens_at_all_decodes_a_block_and_holds_its_pages() -> None:
    for spec in ("sglang-fdfo,block_length=4,page_size=4", "sglang-gemma,canvas_length=4,page_size=4"):
        w = asked(World(spec, num_pages=1), (0, 0), (0, 0))
        assert w.step({0: range(4)}).endswith("0D:MMMM")
        assert w.plan.pages == 1
        assert w.step({1: range(4)} if "gemma" in spec else {}).partition(":")[0] == (
            "decode 1D" if "gemma" in spec else "decode 0F"
        )
    assert not World("sglang-gemma,canvas_length=8,page_size=4", num_pages=1).submit(0, 0, 0)


def test_a_sync_round_lasts_until_all_its_blocks_are_done() -> None:
    latency = LatencyModel(((0.0, 1.0),), 0.0, host_step=0.5)
    model = StepModel(latency, None)
    w = asked(World(IN_STEP), (3, 1), (2, 6))
    costs = []
    w.schedule()
    for commits in ({0: [3], 1: [2]}, {}, {1: [3]}):
        costs.append(model.step(w.plan).latency)
        w.commit(commits)
        if len(costs) == 1:
            w.submit(2, 4, 4)
        text = w.schedule()
    assert text == "decode 0F:CCCC 1F:PPPP"  # the slowest block's three denoising forwards, and one more
    assert w["num_tokens"][:2] == [0, 0]
    assert w.commit() == [0]
    assert (w["num_tokens"][:2], w["first_block"][:2]) == ([1, 2], [4.0, 4.0])
    # The host plans a round once: its other forwards follow on the device.
    assert costs == [1.5, 1.0, 1.0]
    assert w.step_tokens({}) == "prefill 2P4/4"
    assert w.step({1: ALL, 2: ALL}) == "decode 1D:MMMM 2D:MMMM"
    assert w.schedule() == "decode 1F:PPPP 2F:PPPP"
    assert w.commit() == [1, 2]
    check_over(w)


WINDOW_POOL = {"window": 8, "window_bytes": 1, "kv_bytes": 1}


def test_a_prompt_fits_where_the_pool_of_a_window_holds_it_whole() -> None:
    for prompt, fits in ((12, True), (24, False)):
        w = World(GEMMA + ",swa_full_tokens_ratio=0.2", num_pages=30, windows=WINDOW_POOL)  # 25 and 5
        assert w.submit(0, prompt, 8) is fits
