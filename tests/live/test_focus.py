"""FOCUS on the device: what is evicted, what commits and what is seen, held against a plain executor of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.engine import Limits
from dsim.engine.journal import pack
from dsim.engine.latency import LatencyModel
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.executor import ModelExecutor
from dsim.live.forward import Forward
from dsim.live.graphs import GraphForward
from dsim.live.model import Decoder
from dsim.live.weights import random_model
from dsim.sim.step_model import StepModel

from ..worlds import TOY_DELTAS
from .plain_focus import PlainFocus, Step
from .watched import PROMPTS, Run, serve_all

LATENCY = LatencyModel(((0.0, 0.01), (16.0, 0.02)), 0.001)
DEEP = ModelConfig("deep", 4, 48, 4, 2, 16, 80, 97, 256, 12, 96, rope_theta=1e4)
BLOCK = DEEP.block_length
LENGTHS = [(1, 30), (5, 3), (12, 26), (15, 1), (40, 22), (30, 5)]
THRESHOLD = 0.6


def focus(extra: str = "") -> Policy:
    return parse(
        f"focus,max_batch=4,page_size=12,max_prefill_tokens=48,block_length={BLOCK},threshold={THRESHOLD}{extra}"
    )


def decoder() -> Decoder:
    """Random weights whose masks differ much in importance and confidence."""
    model = random_model(DEEP, "cpu", torch.float32, seed=1)
    with torch.no_grad():
        model.head.weight.mul_(20.0)
        model.head.weight[DEEP.mask_token] = 0.0  # no mask stays one (errata 8 has tests of its own)
        for layer in model.layers:
            layer.q_norm.weight.mul_(4.0)  # sharp attention
            layer.output.weight.mul_(10.0)  # that says much, to masks which are all embedded alike
    return model


@dataclass
class Told:
    """An executor that keeps what every step of each request did."""

    executor: ModelExecutor
    steps: dict[int, list[Step]] = field(default_factory=dict)
    plans: list[tuple[StepPlan, StepOutcome]] = field(default_factory=list)
    done: Run = field(init=False)

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.step(plan)
        self.plans.append((plan, outcome))
        retained = plan.window if outcome.retained is None else outcome.retained
        for i, request in enumerate(plan.requests.tolist()):
            start = int(plan.block_start[i])
            text = self.executor.text(request, int(plan.slots[i]), start + BLOCK)
            computed, left, new = (start + np.flatnonzero(m[i]) for m in (plan.window, retained, outcome.committed))
            tokens = dict(zip(new.tolist(), text[new].tolist(), strict=True))
            self.steps.setdefault(request, []).append(
                Step(frozenset(computed.tolist()), frozenset(left.tolist()), tokens)
            )
        return outcome

    @property
    def num_evicted(self) -> int:
        return sum(int((p.window & ~o.retained).sum()) for p, o in self.plans if o.retained is not None)


def pages() -> PagedCache:
    return PagedCache(DEEP, 200, 12, "cpu", torch.float32)


def run(policy: Policy, draws: CommitDraws | None, forward: Forward | None = None) -> Told:
    forward = forward or Forward(decoder(), pages())
    told = Told(ModelExecutor(forward, policy, PROMPTS, draws, policy.batching.max_prefill_tokens))
    requests = [Request(i, 0.0, p, o) for i, (p, o) in enumerate(LENGTHS)]
    told.done = serve_all(told, policy, Limits(200, 256, 4), requests, latency=LATENCY)
    assert (told.done.table["status"] == 0).all()
    return told


@cache
def plainly(extra: str) -> dict[int, list[Step]]:
    rule: Any = focus(extra).eviction
    return {
        i: PlainFocus(decoder(), rule, BLOCK, THRESHOLD).serve(PROMPTS(i, p).tolist(), o)
        for i, (p, o) in enumerate(LENGTHS)
    }


@cache
def served(extra: str = "", drawn: bool = False) -> Told:
    """A run that evicts, in which no key is seen that was not computed in its layer."""
    with what_no_layer_wrote_is_nan():
        ran = run(focus(extra), draws_of() if drawn else None)
    assert ran.num_evicted > 50
    return ran


def draws_of() -> CommitDraws:
    chance = tuple(0.7 * 0.8**d for d in range(BLOCK))
    model = CommitModel("toy", BLOCK, THRESHOLD, None, chance, request_spread=0.3)
    prompts, outputs = (np.array(side) for side in zip(*LENGTHS, strict=True))
    return CommitDraws(model, 3, prompts, outputs, BLOCK, deltas=TOY_DELTAS)


@pytest.mark.parametrize("extra", ["", ",alpha=1", ",alpha=2.5"])
def test_whole_requests_are_what_a_plain_executor_makes_of_them(extra: str) -> None:
    plain = plainly(extra)
    assert served(extra).steps == plain
    # Something was evicted, something else was not, and steps that commit several tokens taught the budget.
    decoded = [s for steps in plain.values() for s in steps[1:]]
    assert sum(len(s.committed) > 1 for s in decoded) > 4
    assert any(len(s.retained) < len(s.computed) // 2 for s in decoded)


@pytest.mark.parametrize("drawn", [False, True])
def test_steps_that_evict_are_two_graphs_round_one_wait_and_do_the_same(drawn: bool) -> None:
    forward = GraphForward(decoder(), pages())
    forward.prepare(focus(), 4)
    captured = forward.graphs.num_captures
    ran = run(focus(), draws_of() if drawn else None, forward)
    assert ran.steps == served("", drawn).steps
    assert forward.graphs.num_captures == captured  # all that was needed was there


@contextmanager
def what_no_layer_wrote_is_nan() -> Iterator[None]:
    """Inside, a layer's keys and values are NaN until it writes them, and once their sequence gives its pages back."""
    init, release = PagedCache.__init__, PagedCache.release

    def spoiled(self: PagedCache, *args: Any) -> None:
        init(self, *args)
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))

    def forget(self: PagedCache, slot: int) -> None:
        pages = self.table[slot, : self._count[slot]].tolist()
        self.keys[:, pages] = self.values[:, pages] = float("nan")
        release(self, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCache, "__init__", spoiled)
        patch.setattr(PagedCache, "release", forget)
        yield


def test_the_journal_replays_plan_for_plan_with_its_evictions() -> None:
    ran = served()
    assert ran.done.differences() == []
    assert ran.done.journal.steps["evicted"].sum() == ran.num_evicted
    evictions, _ = ran.done.journal.lists["evictions"]
    expected = [pack(p.window & ~(p.window if o.retained is None else o.retained)).reshape(-1) for p, o in ran.plans]
    assert np.array_equal(evictions, np.concatenate(expected))


@pytest.mark.parametrize("extra", ["", ",alpha=1"])
def test_the_twins_draws_evict_and_commit_on_the_device_as_in_the_twin(extra: str) -> None:
    twin, ran = StepModel(LATENCY, draws_of()), served(extra, drawn=True)
    for plan, outcome in ran.plans:
        expected = twin.step(plan)
        assert np.array_equal(outcome.committed, expected.committed)
        assert np.array_equal(outcome.retained, expected.retained)  # type: ignore[arg-type]
    assert ran.done.differences() == []
