"""The host works on the step before and on the one to come while the device works on this one."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import Policy, parse
from dsim.engine.request import Request
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live import session
from dsim.live.executor import ModelExecutor
from dsim.live.loop import serve
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model

from .dense import SMALL

DECODER = random_model(SMALL, "cpu", torch.float32)
# Prompts of a step or two each, so that the next prefill is decided on while one runs.
POLICY = parse("lmdeploy-bd32,block_length=4,page_size=8,max_batch=6,max_prefill_tokens=16,threshold=0.02,num_loops=2")
LOOK_AHEAD = parse("lmdeploy-0.18,block_length=4,page_size=8,max_batch=6,max_prefill_tokens=16")
LIMITS = Limits(60, 64, 6)
REQUESTS = [Request(i, 0.0, 5 + i, 9) for i in range(9)]


def world(engine: Engine) -> list[bytes]:
    """All that an engine remembers."""
    at, own = engine._arrays, engine._own
    arrays = at.counters, at.lists, at.sequences, at.window, at.status, at.queue, at.requests, own.columns, own.record
    return [array.tobytes() for array in arrays]


def one_a_step(plan: StepPlan) -> StepOutcome:
    committed = np.zeros_like(plan.window)
    for row, (window, status) in enumerate(zip(plan.window, plan.status, strict=True)):
        masks = np.flatnonzero(window & (status == 0))
        committed[row, masks[:1]] = True
    return StepOutcome(1.0, committed)


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [(POLICY, {"prefill": 3, "decode": 1, "goes on": 3}), (LOOK_AHEAD, {"prefill": 2, "goes on": 10})],
    ids=["groups", "look ahead"],
)
def test_a_step_decided_on_ahead_is_what_it_turns_out_to_be_and_asking_for_it_changes_nothing(
    policy: Policy, kinds: dict[str, int]
) -> None:
    engine = Engine(policy, LIMITS, RequestTable(len(REQUESTS)))
    for request in REQUESTS:
        engine.submit(request)
    assert engine.ahead() is None  # nothing runs
    seen: Counter[str] = Counter()
    now, entered = 0.0, 0
    coming, in_flight = None, np.zeros(0, np.int32)
    where = ("requests", "slots", "block_start")
    while (plan := engine.schedule(now)) is not None:
        if coming is not None:
            goes_on = np.isin(coming.requests, in_flight).any()
            seen["goes on" if goes_on else "prefill" if plan.prefill else "decode"] += 1
            assert coming.prefill == plan.prefill
            for name in where if goes_on else (*where, "phases", "window", "status", "num_tokens", "features"):
                assert np.array_equal(getattr(coming, name), getattr(plan, name)), name
            rows = plan.phases != Phase.IDLE
            assert np.array_equal(coming.window[rows], plan.window[rows])
            entered += goes_on and (plan.status == 0).all(axis=1).any()
        before = world(engine)
        coming, in_flight = engine.ahead(), plan.requests
        assert world(engine) == before
        now += 1.0
        engine.commit(one_a_step(plan), now)
    assert seen.keys() == kinds.keys()
    assert all(seen[kind] >= least for kind, least in kinds.items()), seen
    assert entered >= 3  # a block behind one that was complete


def ran(
    policy: Policy, meanwhile: bool, monkeypatch: pytest.MonkeyPatch, graphs: session.Kept | None = None
) -> tuple[dict[str, Any], Counter[str]]:
    """The journal of a run, with work done meanwhile or without, and what was prepared and made."""
    counted: Counter[str] = Counter()
    steps: list[Any] = []
    lists: list[Any] = []

    def append(columns: Any, of_steps: Any) -> None:
        steps.append(columns)
        lists.append({name: values for name, (values, _) in of_steps.items()})

    with monkeypatch.context() as patch:
        for kind, name in (
            (ModelExecutor, "prepare"),
            (ModelExecutor, "_make"),
        ):
            whole = getattr(kind, name)
            patch.setattr(kind, name, lambda self, given, w=whole, n=name: (counted.update([n]), w(self, given))[1])
        patch.setattr(session.Serving, "warm_up", lambda *_: None)  # its steps would be counted
        if not meanwhile:
            patch.setattr(session, "serve", lambda *a, meanwhile=None, prepare=None, **k: serve(*a, **k))
        serving = session.Serving(DECODER, policy, LIMITS, random_prompts(SMALL, 0), graphs=graphs)
        done = session.run(serving, REQUESTS, append=append)
    assert done.failure is None
    assert (done.table["status"] == 0).all()
    named = {name: np.concatenate([part[name] for part in steps]) for name in steps[0]}
    return named | {name: np.concatenate([part[name] for part in lists]) for name in lists[0]}, counted


def test_a_run_that_prepares_ahead_does_the_steps_of_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, counted = ran(POLICY, True, monkeypatch)
    plain, none = ran(POLICY, False, monkeypatch)
    assert counted["prepare"] > none["prepare"] == 0
    assert counted["_make"] == none["_make"]  # nothing is made twice
    clocks = ("start", "latency", "device")
    assert found.keys() == plain.keys()
    captured, _ = ran(POLICY, True, monkeypatch, session.Kept())
    for name in found.keys() - set(clocks):
        assert found[name].tobytes() == plain[name].tobytes() == captured[name].tobytes(), name


def test_the_account_of_a_step_is_taken_while_the_next_one_runs_and_of_the_last_in_the_end() -> None:
    engine = Engine(POLICY, LIMITS, RequestTable(2))
    told: list[str] = []
    meanwhile: list[Any] = []

    class Device:
        def step(self, plan: StepPlan) -> StepOutcome:
            told.append("launched")
            for work in meanwhile:
                work()
            told.append("over")
            return one_a_step(plan)

    serve(
        engine, Device(), [Request(0, 0.0, 5, 2), Request(1, 0.0, 5, 1)], meanwhile=meanwhile,
        progress=lambda done, now: told.append("account"),
    )  # fmt: skip
    steps = engine.totals.num_decode_steps + engine.totals.num_prefill_steps
    assert steps > 2
    assert told == ["launched", "over", *["launched", "account", "over"] * (steps - 1), "account"]
    assert meanwhile == []
