"""LMDeploy 0.18, step by step: prefill or decode, decided one forward ahead (production-dllm-serving.md 4).

One step by step for each idea: the random scenarios of test_oracles.py, recorded in LMDeploy, hold the rest.
"""

from ..worlds import World
from .hand import asked

SMALL = "lmdeploy-0.18:4,page_size=4"
ALL = range(4)


# ---- when to prefill ---------------------------------------------------------------------------------------------


LANE = SMALL + ",max_prefill_tokens=8,opt_ttft_short_turns=2"


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


# ---- pages -------------------------------------------------------------------------------------------------------


def test_a_request_fits_with_the_tokens_that_its_pages_are_extended_by() -> None:
    assert World(SMALL, num_pages=4).submit(0, 4, 8)
    assert not World(SMALL, num_pages=3).submit(0, 4, 8)
    # At an interval of one they are extended by none, though a step is decided on ahead.
    w = asked(World(SMALL + ",prefill_interval=1", num_pages=3), (4, 8))
    assert w.step() == "prefill 0:PPPP"
    assert w.plan.pages == 1
    # 64 tokens at blocks of 32 and pages of 64.
    assert World("lmdeploy-0.18", num_pages=2).submit(0, 32, 32)
    assert not World("lmdeploy-0.18", num_pages=2).submit(0, 32, 33)
