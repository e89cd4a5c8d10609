"""SGLang 0.5.23's rounds, step by step (production-dllm-serving.md 3.2, 3.3; errata 4).

One step by step for each idea: the random scenarios of test_oracles.py, recorded in SGLang, hold the rest.
"""

from dsim.engine.latency import LatencyModel
from dsim.sim.step_model import StepModel

from ..worlds import World
from .hand import asked, check_over

SMALL = ",block_length=4,page_size=4"
FDFO, SYNC, JOINT = (name + SMALL for name in ("sglang-fdfo", "sglang-sync", "sglang-joint"))
GEMMA = "sglang-gemma,canvas_length=4,page_size=4"
ALL = range(4)  # of a block


# ---- masked models -----------------------------------------------------------------------------------------------


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


def test_a_prompt_shorter_than_a_block_has_no_prefill() -> None:
    w = asked(World(FDFO), (3, 1), (4, 1))
    assert w.step_tokens({}) == "prefill 1P4/4"
    # Rows that were let in come before those that are.
    assert w.step({0: [3], 1: ALL}) == "decode 1D:MMMM 0D:PPPM"
    assert w.schedule() == "decode 0F:PPPP 1F:PPPP"
    assert w.commit() == [0, 1]
    assert (w["num_tokens"][:2], w["scheduled"][:2]) == ([1, 1], [1.0, 0.0])


def test_blocks_of_a_prompt_that_are_prefilled_in_one_round() -> None:
    w = asked(World(FDFO + ",prefill_blocks_per_round=2"), (14, 4), (9, 4))
    assert w.step_tokens({}) == "prefill 0P8/8 1P8/8"
    assert w.features() == (16, 2 * (4 * 4 + 4 * 8), 16, 16, 0, 2, 16, 1)
    assert w.step_tokens({}) == "prefill 0P4/12"
    assert w.step_tokens({}) == "decode 0D4/16 1D4/12"


def test_a_request_of_no_tokens_at_all_decodes_a_block_and_holds_its_pages() -> None:
    for spec in ("sglang-fdfo,block_length=4,page_size=4", "sglang-gemma,canvas_length=4,page_size=4"):
        w = asked(World(spec, num_pages=1), (0, 0), (0, 0))
        assert w.step({0: range(4)}).endswith("0D:MMMM")
        assert w.plan.pages == 1
        assert w.step({1: range(4)} if "gemma" in spec else {}).partition(":")[0] == (
            "decode 1D" if "gemma" in spec else "decode 0F"
        )
    assert not World("sglang-gemma,canvas_length=8,page_size=4", num_pages=1).submit(0, 0, 0)


# ---- sync --------------------------------------------------------------------------------------------------------


def test_a_sync_round_lasts_until_all_its_blocks_are_done() -> None:
    latency = LatencyModel(((0.0, 1.0),), 0.0, host_step=0.5)
    model = StepModel(latency, None)
    w = asked(World(SYNC), (3, 1), (2, 6))
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


# ---- blocks that are edited --------------------------------------------------------------------------------------


def test_an_edited_block_is_final_with_the_forward_that_ends_it() -> None:
    w = asked(World(JOINT), (6, 6))
    assert w.step_tokens({}) == "prefill 0P4/4"
    assert w.step() == "decode 0D:PPMM"
    assert w.step({0: [2, 3]}) == "decode 0D:PPMM"
    assert (w["num_tokens"][0], w["first_emission"][0]) == (2, 3.0)
    assert w.schedule() == "decode 0D:MMMM"  # no pass in between
    assert w.commit({0: ALL}) == [0]
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][0], w["num_forwards"][0], w["num_committed"][0]) == (6, 3, 6)


# ---- DiffusionGemma ----------------------------------------------------------------------------------------------


def test_a_decoded_canvas_is_prefilled_in_a_round_that_all_others_wait_for_but_not_the_last() -> None:
    w = asked(World(GEMMA), (5, 7), (6, 4))
    assert w.step_tokens({}) == "prefill 0P5/5 1P6/6"  # whole prompts, causal
    assert w.features() == (11, 15 + 21, 11, 0, 0, 2, 11, 1)
    assert w.step_tokens({}) == "decode 0D4/9 1D4/10"
    assert w.features() == (8, 4 * 9 + 4 * 10, 19, 8, 8, 2, 0, 1)
    assert w.step_tokens({0: ALL}) == "decode 0D4/9 1D4/10"
    assert (w["num_tokens"][0], w["first_emission"][0]) == (4, 3.0)  # tokens leave before it
    assert w.step_tokens({}) == "prefill 0F4/9"
    assert w.features() == (4, 4 * 5 + 10, 9, 0, 0, 1, 4, 1)
    assert w.step_tokens({1: ALL}) == "decode 0D4/13 1D4/10"
    assert w["finish"][1] == 5.0
    assert w.step_tokens({0: ALL}) == "decode 0D4/13"
    assert (w["num_tokens"][:2], w["finish"][0], w["num_emissions"][:2]) == ([7, 4], 6.0, [2, 1])
    check_over(w)


def test_a_canvas_decoded_within_a_round_waits_for_its_end() -> None:
    w = asked(World(f"{GEMMA},dllm_fdfo=false"), (4, 8), (4, 8))
    w.step_tokens({})
    assert w.step_tokens({0: ALL}) == "decode 0D4/8 1D4/8"
    # It is computed, for nothing: its keys are those of a causal pass alone.
    assert w.step_tokens({}) == "decode 0I4/8 1D4/8"
    assert w.step_tokens({1: ALL}) == "decode 0I4/8 1D4/8"
    assert w["num_tokens"][:2] == [4, 4]
    assert w.step_tokens({}) == "prefill 0F4/8 1F4/8"
    assert w.step_tokens({}) == "decode 0D4/12 1D4/12"


def test_a_row_holds_a_window_s_pages_by_its_length() -> None:
    windows = {"window": 8, "window_bytes": 204_800, "kv_bytes": 20_480}
    w = asked(World(GEMMA, num_pages=99, windows=windows), (10, 8))
    held = []
    for step, commits in (
        ("prefill 0P10/10", {}), ("decode 0D4/14", {0: ALL}), ("prefill 0F4/14", {}), ("decode 0D4/18", {0: ALL}),
    ):  # fmt: skip
        assert w.plan_tokens() == step
        held.append(w.plan.pages)
        w.commit(commits)
    assert held == [3 + 30, 4 + 40, 4 + 40, 5 + 40]


SMALL_WINDOW = {"window": 8, "window_bytes": 1, "kv_bytes": 1}


def test_a_prompt_fits_where_the_pool_of_a_window_holds_it_whole() -> None:
    for prompt, fits in ((12, True), (24, False)):
        w = World(GEMMA + ",swa_full_tokens_ratio=0.2", num_pages=30, windows=SMALL_WINDOW)  # 25 and 5
        assert w.submit(0, prompt, 8) is fits


def test_a_request_fits_with_the_canvases_behind_its_prompt() -> None:
    assert World(GEMMA, num_pages=4).submit(0, 5, 5)  # 5 + 8 tokens
    assert not World(GEMMA, num_pages=3).submit(0, 5, 5)
