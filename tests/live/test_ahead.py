"""The host accounts for the step before while the device works on this one."""

from typing import Any

import numpy as np

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live.loop import serve

POLICY = parse("lmdeploy-bd32,block_length=4,page_size=8,max_batch=6,max_prefill_tokens=16,threshold=0.02,num_loops=2")
LIMITS = Limits(60, 64, 6)


def one_a_step(plan: StepPlan) -> StepOutcome:
    committed = np.zeros_like(plan.window)
    for row, (window, status) in enumerate(zip(plan.window, plan.status, strict=True)):
        masks = np.flatnonzero(window & (status == 0))
        committed[row, masks[:1]] = True
    return StepOutcome(1.0, committed)


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
