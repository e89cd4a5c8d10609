"""A request that is cancelled leaves its row and its pages, keeps the tokens it was handed, and the journal replays."""

from typing import Any

import numpy as np
import pytest

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.replay import replay
from dsim.engine.spec import parse
from dsim.engine.state import CANCELLED, COMPLETED, FREE, REJECTED, UNFINISHED

from ..serving import Loop
from ..worlds import SECOND, Collector, Driver, PlainLoop, World, asked, table_bytes, toy_trace

SMALL = ",page_size=8,max_batch=4,num_pages=30"
SPECS = [
    "lmdeploy-bd32" + SMALL + ",max_prefill_tokens=64,block_length=4",  # frozen groups, a step decided on ahead
    "lmdeploy-0.18" + SMALL + ",max_prefill_tokens=64,block_length=4",
    "vllm-ar:4,page_size=8,num_pages=30,max_num_batched_tokens=24",
    "vllm-diffusion:4,page_size=8,num_pages=30,canvas_length=4,max_num_batched_tokens=24",
    "sglang-fdfo:4,page_size=8,num_pages=30,block_length=4",
    "vanilla:3,block_length=4,page_size=8,num_pages=30",  # a static batch, padded
    "dllm-serve,max_batch=3,block_length=4,page_size=8,num_pages=40",
]


def loop_of(spec: str) -> PlainLoop:
    policy, rng, n = parse(spec), np.random.default_rng(1), 24
    arrival = np.cumsum(rng.integers(0, 4, n)) * 1.0
    trace = toy_trace(arrival - arrival[0], rng.integers(1, 40, n), rng.integers(1, 30, n))
    limits = Limits(policy.memory.num_pages or 30, 4096, policy.batching.max_batch or 4, 64)
    if policy.family == "full-sequence":
        return Loop(policy, trace, limits)
    return Driver(policy, trace, num_pages=limits.num_pages, max_batch=limits.max_batch, seed=1)


@pytest.mark.parametrize("spec", SPECS)
def test_requests_that_are_cancelled_leave_nothing_and_the_journal_replays(spec: str) -> None:
    loop, rng = loop_of(spec), np.random.default_rng(0)
    engine, trace, journal = loop.engine, loop.trace, Collector()
    recorder = StepRecorder(journal, engine.policy.width, 64)
    now, taken, kept = 0.0, 0, {}
    while True:
        while taken < len(trace) and trace.arrival[taken] <= now:
            engine.submit(trace.request(taken))
            taken += 1
        status = loop.table["status"]
        going = np.flatnonzero((status == UNFINISHED)[:taken])
        if len(going) and len(kept) < 9 and rng.random() < 0.3:
            gone = int(rng.choice(going))
            assert engine.cancel(gone, now)
            assert not engine.cancel(gone, now)
            kept[gone] = int(loop.table["num_tokens"][gone])
            loop.ended.append(gone)
        counts = [int((status[:taken] == s).sum()) for s in (COMPLETED, REJECTED, CANCELLED)]
        assert taken == sum(counts) + engine.num_waiting + engine.num_running
        plan = engine.schedule(now)
        if plan is None:
            if taken == len(trace):
                break
            now = float(trace.arrival[taken])
            continue
        # Whom a step decided on ahead still computes, it computes for nothing.
        assert (plan.phases[np.isin(plan.requests, list(kept))] == 3).all()
        outcome = loop.step_model.step(plan)
        now = plan.now + outcome.latency
        done = engine.commit(outcome, now)
        recorder.record(0, plan, outcome, done)
    recorder.flush()
    assert engine.idle
    assert (engine.pages_held, engine.expected_tokens, engine.num_waiting, engine.num_running) == (0, 0, 0, 0)
    free = engine._arrays.lists[FREE, : int(engine._counters["num_free"])]
    assert sorted(free) == list(range(len(engine._arrays.sequences)))
    assert len(kept) > 5
    assert (loop.table["status"] == COMPLETED).sum() > 5
    assert {request: loop.table["num_tokens"][request] for request in kept} == kept
    table = RequestTable(len(trace))
    fresh = Engine(engine.policy, engine.limits, table, latency=SECOND)
    assert list(replay(fresh, 0, loop.table.columns, journal.steps, journal.lists)) == []
    assert table_bytes(table) == table_bytes(loop.table)
    # One that was served to its end, told as cancelled, is found out.
    wrong = {name: column.copy() for name, column in loop.table.columns.items()}
    wrong["status"][np.flatnonzero(wrong["status"] == COMPLETED)[0]] = CANCELLED
    fresh = Engine(engine.policy, engine.limits, RequestTable(len(trace)), latency=SECOND)
    assert list(replay(fresh, 0, wrong, journal.steps, journal.lists))


def test_a_cancelled_requests_row_and_pages_are_free_for_the_next_step() -> None:
    world = asked(World("vllm-ar,page_size=4,num_pages=8,async_scheduling=false", max_batch=1), (8, 20), (8, 20))
    world.step_tokens()
    world.step_tokens()
    held: Any = world.engine.pages_held
    assert (held, world.engine.num_waiting) == (3, 1)
    assert world.engine.cancel(0, world.now)
    assert (world.engine.pages_held, world["status"][0], world["num_tokens"][0]) == (0, CANCELLED, 2)
    assert world["finish"][0] == 2.0
    assert world.step_tokens() == "prefill 1P8/8"


def test_what_is_over_or_not_there_is_not_cancelled() -> None:
    world = World("vllm-ar,page_size=4,num_pages=8,async_scheduling=false", max_batch=1)
    assert not world.engine.cancel(0, 0.0)
    world.submit(0, 4, 1)
    world.step_tokens()
    assert not world.engine.cancel(0, world.now)
    assert world["status"][0] == COMPLETED
