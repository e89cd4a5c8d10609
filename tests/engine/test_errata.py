"""Where the published code does something else than the papers say: the smallest example of each, both ways."""

import numpy as np
import pytest

from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import ProfileError
from dsim.engine.journal import RequestTable
from dsim.engine.latency import LatencyModel
from dsim.engine.part import numbers_of
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import Phase
from dsim.engine.unmasking import unmask
from dsim.sim.step_model import StepModel

from ..worlds import World, asked


def test_a_group_reserves_pages_beyond_the_end_of_the_output() -> None:
    w = asked(World("lmdeploy-bd32,decide_ahead=false"), (60, 100))
    held = []
    for _ in range(60):
        w.schedule()
        if w.plan is None:
            break
        held.append((int(w.plan.block_start[0]), w.plan.pages))
        w.commit_masks(8)
    assert max(pages for start, pages in held if start == 128) == 4


def test_the_sequence_that_was_updated_last_loses_its_pages() -> None:
    w = asked(World("lmdeploy-bd32:4", num_pages=8, max_batch=4), (70, 95), (75, 94))
    lost: list[int] = []
    while not lost:
        w.schedule()
        lost += w.plan.preempted
        w.commit_masks(1)
        if w.now == 1.0:  # its prefill comes between two groups of the others, which are updated after it
            w.submit(2, 116, 39)
    assert lost == [1]


def test_a_prefetch_that_can_let_nobody_in_fetches_nothing() -> None:
    w = asked(World("lmdeploy-bd32:4,num_loops=1", max_batch=2), (8, 6))
    for i in range(1, 8):  # so many wait that a prefill is preferred, and the batch is full
        w.submit(i, 8, 40)
    held = []
    for _ in range(10):
        w.schedule()
        held.append(w.plan.requests.tolist())
        w.commit_masks(2)
    # Request 2 takes the place of request 0; from then on the two groups of one are one, and do not take turns.
    assert held[5:] == [[0, 1], [2], [1, 2], [1, 2], [1, 2]]


def test_a_block_that_its_full_pass_finishes_is_computed_once_more() -> None:
    w = asked(World("fast-dllm,block_length=4,strategy=low_confidence_dynamic"), (6, 8))
    told = []
    while (plan := w.engine.schedule(w.now)) is not None:
        w.plan = plan
        told.append(Phase(plan.phases[0]).name)
        w.commit_masks()
    assert told == ["FULL", "REUSE", "FULL", "REUSE"]
    # A schedule takes as many steps as it has, and none more.
    assert not numbers_of(parse("fast-dllm"))["once_more"]


def test_the_first_step_of_a_block_commits_its_first_token_under_dllm_serve() -> None:
    rule, masked = parse("dllm-serve").unmasking, np.ones((2, 4), np.bool_)
    confidence = np.array([[0.1, 0.2, 0.3, 0.9]] * 2, np.float32)
    steps = np.array([0, 1])
    assert parse("dllm-serve").batching.first_token
    assert unmask(rule, confidence, masked, 4, steps, True).argmax(axis=1).tolist() == [0, 3]
    assert unmask(rule, confidence, masked, 4, steps).argmax(axis=1).tolist() == [3, 3]


# A step takes 1 s up to 10 tokens and 0.1 s for each more; a query-key pair 1 ms, a visible key 1 us, a row of the head
# 10 us. Of four layers the first one is a quarter of it.
FOUR_LAYERS = LatencyModel(((10.0, 1.0),), 0.1, attention=1e-3, kv_read=1e-6, head=1e-5, layers=4)


def test_the_first_layer_of_dllm_cache_costs_a_full_pass() -> None:
    # 17 tokens that see 17 keys; 4 that see 17.
    partial = 0.25 * (1.7 + 0.289 + 17e-6) + 0.75 * (1.0 + 0.068 + 17e-6) + 17e-5
    policy = parse("dllm-cache:50,response_refresh=5,block_length=8")
    limits, whole = Limits(100, 4096, 1), 1.7 + 0.289 + 17e-6 + 17e-5
    table = RequestTable(1)
    engine = Engine(policy, limits, table)
    model = StepModel(FOUR_LAYERS, ScheduledCommits(8, None), policy.cache)
    engine.submit(Request(0, 0.0, 1, 16))
    told: list[tuple[str, int, float]] = []
    now = 0.0
    while (plan := engine.schedule(now)) is not None:
        outcome = model.step(plan)
        told.append((Phase(plan.phases[0]).name, plan.features.tokens, outcome.latency))
        now += outcome.latency
        engine.commit(outcome, now)
    assert told[1] == ("PARTIAL", 4, pytest.approx(partial, rel=1e-12))  # 4 tokens go through all layers
    first = {name: latency for name, _, latency in told}
    assert first["FULL"] == pytest.approx(whole, rel=1e-12)
    # All of the response, one token less than all there is.
    response = 1.6 + 0.272 + 17e-6
    expected = 0.25 * (1.7 + 0.289 + 17e-6) + 0.75 * response
    assert first["REFRESH_RESPONSE"] == pytest.approx(expected + 17e-5, rel=1e-12)


def test_a_first_layer_cannot_be_charged_apart_where_nobody_says_how_many_there_are() -> None:
    one = LatencyModel(((0.0, 1.0),), 0.0)
    with pytest.raises(ProfileError, match="first_layer_whole is true and the latency model has 0 layers"):
        StepModel(one, None, parse("dllm-cache").cache)
    StepModel(one, None, parse("maskkv").cache)
