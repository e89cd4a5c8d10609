"""SGLang 0.5.23's rounds, step by step (production-dllm-serving.md 3.2, 3.3; errata 4).

One step by step for each idea: the random scenarios of test_oracles.py, recorded in SGLang, hold the rest.
"""

from dsim.engine.latency import LatencyModel
from dsim.sim.step_model import StepModel

from ..worlds import World
from .hand import asked, check_over

SMALL = ",block_length=4,page_size=4"
FDFO, SYNC = (name + SMALL for name in ("sglang-fdfo", "sglang-sync"))
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


# ---- DiffusionGemma ----------------------------------------------------------------------------------------------


SMALL_WINDOW = {"window": 8, "window_bytes": 1, "kv_bytes": 1}


def test_a_prompt_fits_where_the_pool_of_a_window_holds_it_whole() -> None:
    for prompt, fits in ((12, True), (24, False)):
        w = World(GEMMA + ",swa_full_tokens_ratio=0.2", num_pages=30, windows=SMALL_WINDOW)  # 25 and 5
        assert w.submit(0, prompt, 8) is fits
