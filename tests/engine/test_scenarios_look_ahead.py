"""LMDeploy 0.18, step by step: prefill or decode, decided one forward ahead (production-dllm-serving.md 4)."""

from ..worlds import World

SMALL = "lmdeploy-0.18:4,page_size=4"
ALL = range(4)


def kinds(w: World, num: int) -> list[str]:
    """The kinds of the next steps, none of which commits anything."""
    return [w.step().partition(" ")[0] for _ in range(num)]


# ---- when to prefill ---------------------------------------------------------------------------------------------


def test_requests_are_let_in_at_once_while_less_than_half_a_batch_runs() -> None:
    w = World(SMALL, max_batch=4)
    w.submit(0, 4, 40)
    w.schedule()
    w.submit(1, 4, 40)  # the step in flight is a prefill; the one behind it is decided: decode
    w.commit()
    assert w.step() == "decode 0D:MMMM"  # as it begins one of four runs
    w.submit(2, 4, 40)
    assert w.step() == "prefill 1:PPPP"
    # Two of four run: no longer less than half.
    assert kinds(w, 5) == ["decode"] * 5


def test_a_streak_of_decode_forwards_with_requests_waiting_ends_with_a_prefill() -> None:
    w = World(SMALL + ",prefill_interval=3", max_batch=4)
    w.submit(0, 4, 40)
    w.submit(1, 4, 40)
    w.schedule()
    w.submit(2, 4, 40)
    w.commit()
    assert kinds(w, 5) == ["decode", "decode", "decode", "decode", "prefill"]
    assert w.engine.num_waiting == 0
    # The prefill has reset it, and so does a step that finds nobody waiting.
    assert kinds(w, 4) == ["decode"] * 4
    w.submit(3, 4, 40)
    assert kinds(w, 5) == ["decode", "decode", "decode", "decode", "prefill"]


def test_as_many_waiting_tokens_as_a_prefill_takes_are_prefilled() -> None:
    w = World(SMALL + ",max_prefill_tokens=8", max_batch=8)
    for i in range(4):
        w.submit(i, 4, 40)
    assert [w.step().count(":") for _ in range(3)] == [2, 2, 4]  # two of eight run, then four
    w.submit(4, 3, 40)  # four positions
    assert kinds(w, 3) == ["decode"] * 3
    w.submit(5, 1, 40)  # and four more
    assert kinds(w, 1) == ["decode"]
    assert w.step() == "prefill 4:PPPM 5:PMMM"


def test_without_the_lane_the_first_prompt_of_a_prefill_may_be_longer_than_it_and_runs_alone() -> None:
    w = World(SMALL + ",max_prefill_tokens=8,opt_ttft_short_turns=none")
    w.submit(0, 20, 4)
    w.submit(1, 4, 4)
    w.schedule()
    assert w.features() == (20, 4 * (4 + 8 + 12 + 16 + 20), 20, 4, 4, 1, 20, 3)
    w.commit()
    assert w.step() == "prefill 1:PPPP"


LANE = SMALL + ",max_prefill_tokens=8,opt_ttft_short_turns=2"


def test_a_long_prompt_takes_turns_with_those_that_decode_a_chunk_at_a_time() -> None:
    w = World(LANE, num_pages=20)
    w.submit(0, 4, 40)
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


def test_where_nobody_decodes_behind_a_chunk_the_next_one_comes_at_once() -> None:
    w = World(LANE)
    w.submit(0, 20, 4)
    assert [w.step() for _ in range(3)] == ["prefill 0:pppp", "prefill 0:pppp", "prefill 0:PPPP"]
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.step() == "decode 0I:pppp"
    assert w.schedule() == "nothing"
    assert (w.engine.pages_held, w.engine.outstanding_tokens, w["num_tokens"][0]) == (0, 0, 4)


def test_short_prompts_go_first_the_shortest_of_them_until_the_next_chunk_is_due() -> None:
    w = World(LANE, max_batch=16)
    w.submit(0, 20, 4)
    for i, prompt in enumerate((8, 4, 8, 8), start=1):
        w.submit(i, prompt, 40)
    # Two prefills of short prompts are let by, the shortest first; then the long one is due.
    assert w.step() == "prefill 2:PPPP"
    assert w.step() == "prefill 1:PPPP"
    assert w.step() == "prefill 0:pppp"
    assert w.step() == "decode 2D:MMMM 1D:MMMM"
    assert w.step() == "prefill 3:PPPP"
    assert w.step() == "prefill 4:PPPP"
    assert w.step() == "prefill 0:pppp"
    assert w.step() == "prefill 0:PPPP"
    assert w.step() == "decode 2D:MMMM 1D:MMMM 3D:MMMM 4D:MMMM 0D:MMMM"


def test_a_chunk_without_room_lets_others_decode_until_there_is_some() -> None:
    w = World(LANE, num_pages=8)
    w.submit(0, 8, 8)
    assert w.step() == "prefill 0:PPPP"
    w.submit(1, 20, 4)
    assert w.step() == "decode 0D:MMMM"
    assert w.step() == "prefill 1:pppp"
    assert w.step() == "decode 0D:MMMM"
    assert w.step() == "prefill 1:pppp"
    assert w.plan.pages == 8
    # Its last chunk, a page more, would be due.
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.step() == "decode 0F:PPPP"
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.step() == "prefill 1:PPPP"


def test_one_long_prompt_is_computed_after_another_and_a_cancelled_one_not_at_all() -> None:
    w = World(LANE)
    w.submit(0, 20, 4)
    w.submit(1, 12, 4)
    assert w.step() == "prefill 0:pppp"
    assert w.step() == "prefill 0:pppp"
    assert w.engine.cancel(0, w.now)
    assert w.step() == "prefill 1:pppp"
    assert w.step() == "prefill 1:PPPP"


def test_a_prefill_that_can_let_nobody_in_is_a_decode_step() -> None:
    w = World(SMALL, num_pages=4, max_batch=4)
    w.submit(0, 8, 4)
    assert w.step() == "prefill 0:PPPP"
    w.submit(1, 8, 4)
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.step() == "decode 0I:pppp"
    assert w.step() == "prefill 1:PPPP"


def test_the_streak_is_16_the_prefill_8192_tokens_and_the_page_64() -> None:
    w = World("lmdeploy-0.18")
    batching, memory = w.engine.policy.batching, w.engine.policy.memory
    assert (batching.max_prefill_tokens, memory.page_size) == (8192, 64)
    assert batching.prefill_interval == 16  # type: ignore[attr-defined]


# ---- what is decided ahead ---------------------------------------------------------------------------------------


def test_a_prefill_is_the_first_denoising_step_of_its_last_block() -> None:
    w = World(SMALL)
    w.submit(0, 6, 6)
    assert w.step({0: [2]}) == "prefill 0:PPMM"
    assert w.step({0: [3]}) == "decode 0D:PPPM"
    assert w["num_tokens"][0] == 2  # as soon as the block has no mask left
    assert w.step() == "decode 0F:PPPP"
    assert w.step() == "decode 0D:MMMM"


def test_every_request_ends_with_one_row_step_too_many() -> None:
    w = World(SMALL)
    w.submit(0, 4, 4)
    w.submit(1, 4, 8)
    assert w.step() == "prefill 0:PPPP 1:PPPP"
    assert w.step({0: ALL}) == "decode 0D:MMMM 1D:MMMM"
    assert w["finish"][0] == 2.0  # its last block needs no cache forward
    assert w.step({1: ALL}) == "decode 0I:pppp 1D:MMMM"
    assert w.engine.pages_held == 3
    assert w.step() == "decode 1F:PPPP"
    assert w.step({1: ALL}) == "decode 1D:MMMM"
    assert w.step() == "decode 1I:pppp"
    assert w.schedule() == "nothing"
    assert (w["num_forwards"][:2], w["finish"][:2]) == ([2, 5], [2.0, 5.0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_who_comes_during_a_step_is_in_the_second_after_it() -> None:
    w = World(SMALL)
    w.submit(0, 4, 40)
    w.schedule()
    w.submit(1, 4, 40)
    w.commit()
    assert w.step() == "decode 0D:MMMM"
    assert w.step() == "prefill 1:PPPP"


# ---- pages -------------------------------------------------------------------------------------------------------


def test_the_last_let_in_loses_its_pages_and_computes_again_what_it_had() -> None:
    w = World(SMALL, num_pages=6)
    w.submit(0, 4, 8)
    w.submit(1, 4, 8)
    assert w.step() == "prefill 0:PPPP 1:PPPP"
    assert w.step({0: ALL, 1: [0, 1]}) == "decode 0D:MMMM 1D:MMMM"
    assert w.step() == "decode 0F:PPPP 1D:PPMM"
    # A block more each, for whoever turns out to have entered it.
    assert (w.plan.preempted, w.plan.pages) == ((), 6)
    assert w.schedule() == "decode 0D:MMMM 1D:PPMM"
    assert (w.plan.preempted, w.plan.freed, w.plan.pages) == ((1,), (), 4)
    w.commit({0: ALL, 1: [2]})
    assert w.schedule() == "decode 0I:pppp"
    assert w.plan.freed == (1,)
    w.commit()
    assert w.schedule() == "prefill 1:PPPM"  # with what the step in flight had committed
    assert w.features()[0] == 8
    w.commit({1: [3]})
    assert w.step() == "decode 1F:PPPP"
    assert w.step({1: ALL}) == "decode 1D:MMMM"
    assert w.step() == "decode 1I:pppp"
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:2], w["num_preemptions"][:2]) == ([8, 8], [0, 1])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)


def test_a_request_fits_with_the_tokens_that_its_pages_are_extended_by() -> None:
    assert World(SMALL, num_pages=4).submit(0, 4, 8)
    assert not World(SMALL, num_pages=3).submit(0, 4, 8)
    # 64 tokens at blocks of 32 and pages of 64.
    assert World("lmdeploy-0.18", num_pages=2).submit(0, 32, 32)
    assert not World("lmdeploy-0.18", num_pages=2).submit(0, 32, 33)


def test_a_request_preempted_while_its_last_step_is_in_flight_ends_with_that_step() -> None:
    w = World(SMALL, num_pages=6)
    w.submit(0, 4, 8)
    w.submit(1, 4, 4)
    assert w.step() == "prefill 0:PPPP 1:PPPP"
    assert w.step({0: ALL}) == "decode 0D:MMMM 1D:MMMM"
    assert w.step() == "decode 0F:PPPP 1D:MMMM"
    # 0 is in its last block now: as this step begins it takes 1's pages for the next.
    assert w.schedule() == "decode 0D:MMMM 1D:MMMM"
    assert w["num_preemptions"][:2] == [0, 1]
    assert w.commit({1: ALL}) == [1]
    assert w.step({0: ALL}) == "decode 0D:MMMM"
    assert w.step() == "decode 0I:pppp"
    assert w.schedule() == "nothing"
    assert (w["num_tokens"][:2], w["finish"][:2]) == ([8, 4], [5.0, 4.0])
    assert (w.engine.pages_held, w.engine.outstanding_tokens) == (0, 0)
