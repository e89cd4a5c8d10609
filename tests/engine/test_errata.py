"""Where the published code does something else than the papers say: the smallest example of each, both ways."""

import numpy as np
import pytest

from dsim.engine.part import numbers_of
from dsim.engine.policy import parse
from dsim.engine.step import Phase, StepOutcome
from dsim.engine.unmasking import unmask

from ..worlds import World

BEFORE = ",fetch_nothing=false,reserve_at_prefill=true,reserve_past_end=false,preempts=admitted"


@pytest.mark.parametrize(("fields", "pages"), [("", 1), (BEFORE, 2)])
def test_a_prefill_takes_the_pages_of_its_prompt_alone(fields: str, pages: int) -> None:
    w = World("lmdeploy-bd32,decide_ahead=false" + fields)
    w.submit(0, 60, 100)
    w.schedule()
    assert w.plan is not None
    assert w.plan.pages == pages


@pytest.mark.parametrize(("fields", "most"), [("", 4), (BEFORE, 3)])
def test_a_group_reserves_pages_beyond_the_end_of_the_output(fields: str, most: int) -> None:
    w = World("lmdeploy-bd32,decide_ahead=false" + fields)
    w.submit(0, 60, 100)
    held = []
    for _ in range(60):
        w.schedule()
        if w.plan is None:
            break
        held.append((int(w.plan.block_start[0]), w.plan.pages))
        masked = np.flatnonzero(w.plan.window[0] & (w.plan.status[0] == 0))
        w.commit({0: masked[:8].tolist()})
    assert max(pages for start, pages in held if start == 128) == most


@pytest.mark.parametrize(("fields", "loser"), [("", 1), (",preempts=admitted", 2)])
def test_the_sequence_that_was_updated_last_loses_its_pages(fields: str, loser: int) -> None:
    w = World("lmdeploy-bd32:4" + fields, num_pages=8, max_batch=4)
    w.submit(0, 70, 95)
    w.submit(1, 75, 94)
    lost: list[int] = []
    while not lost:
        w.schedule()
        assert w.plan is not None
        lost += w.plan.preempted
        masked = w.plan.window & (w.plan.status == 0)
        w.commit({int(r): np.flatnonzero(masked[i])[:1].tolist() for i, r in enumerate(w.plan.requests)})
        if w.now == 1.0:  # its prefill comes between two groups of the others, which are updated after it
            w.submit(2, 116, 39)
    assert lost == [loser]


def test_a_sequence_that_a_step_left_out_stands_before_those_it_updated_though_one_of_them_ended() -> None:
    w = World("lmdeploy-bd32:4,page_size=4,num_loops=1")
    w.submit(0, 4, 4)
    w.submit(1, 4, 8)
    w.step()
    w.submit(2, 4, 8)
    assert w.step() == "prefill 2:PPPP"
    assert w.schedule() == "decode 0D:MMMM 1D:MMMM"
    assert w.commit({0: [0, 1, 2, 3]}) == [0]  # two rows, and two sequences go on: not the same two
    assert w.step() == "decode 2D:MMMM 1D:MMMM"


@pytest.mark.parametrize(("fields", "rows"), [("", [[1, 2]] * 3), (",fetch_nothing=false", [[1], [2], [1]])])
def test_a_prefetch_that_can_let_nobody_in_fetches_nothing(fields: str, rows: list[list[int]]) -> None:
    w = World("lmdeploy-bd32:4,num_loops=1" + fields, max_batch=2)
    w.submit(0, 8, 6)
    for i in range(1, 8):  # so many wait that a prefill is preferred, and the batch is full
        w.submit(i, 8, 40)
    held = []
    for _ in range(10):
        w.schedule()
        assert w.plan is not None
        held.append(w.plan.requests.tolist())
        masked = w.plan.window & (w.plan.status == 0)
        w.commit({int(r): np.flatnonzero(masked[i])[:2].tolist() for i, r in enumerate(w.plan.requests)})
    # Request 2 takes the place of request 0; from then on the two groups of one are one, or take turns.
    assert held[5:7] == [[0, 1], [2]]
    assert held[7:] == rows


@pytest.mark.parametrize(("extra", "phases"), [("true", "FULL REUSE FULL REUSE"), ("false", "FULL FULL")])
def test_a_block_that_its_full_pass_finishes_is_computed_once_more(extra: str, phases: str) -> None:
    w = World(f"fast-dllm,block_length=4,strategy=low_confidence_dynamic,extra_pass={extra}")
    w.submit(0, 6, 8)
    told = []
    while (plan := w.engine.schedule(w.now)) is not None:
        told.append(Phase(plan.phases[0]).name)
        w.now += 1.0
        w.engine.commit(StepOutcome(1.0, plan.window & (plan.status == 0)), w.now)
    assert " ".join(told) == phases
    # A schedule takes as many steps as it has, and none more.
    assert not numbers_of(parse("fast-dllm"))["once_more"]


def test_the_first_step_of_a_block_commits_its_first_token_under_dllm_serve() -> None:
    rule, masked = parse("dllm-serve").unmasking, np.ones((2, 4), np.bool_)
    confidence = np.array([[0.1, 0.2, 0.3, 0.9]] * 2, np.float32)
    steps = np.array([0, 1])
    assert parse("dllm-serve").batching.first_token
    assert unmask(rule, confidence, masked, 4, steps, True).argmax(axis=1).tolist() == [0, 3]
    assert unmask(rule, confidence, masked, 4, steps).argmax(axis=1).tolist() == [3, 3]
