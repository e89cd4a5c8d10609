"""Measure steps of a given shape through the serving loop, host time included."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import STEP_COLUMNS, RequestTable, StepRecorder
from dsim.engine.latency import Features
from dsim.engine.policies.ar import Autoregressive
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.whole_block import FixedBlock
from dsim.engine.request import Request
from dsim.engine.spec import Policy, every_step
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live.device_loop import serve
from dsim.live.executor import ModelExecutor
from dsim.live.forward import Forward
from dsim.live.prompts import Prompts, random_prompts
from dsim.live.session import made_ready

SETTLE = 2  # steps before latencies count
MOST_STEPS = 64  # of a token or more, that sequences have pages for
# One mask a step: none passes the threshold.
PATIENT = CommitModel(workload="one a step", block_length=1, threshold=0.9, temperature=None, pass_probability=(1e-9,))


@dataclass(frozen=True, order=True)
class Shape:
    """`batch` sequences compute `window` positions each after `context` keys; window 0: prefill `context` tokens."""

    batch: int
    window: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * (self.window or self.context)

    def policy(self, block: int) -> Policy:
        limits = {"max_batch": self.batch, "max_prefill_tokens": max(block, self.batch * max(1, self.context))}
        if self.window == 1:
            return every_step(limits, Autoregressive())
        if self.window in (0, block):
            return every_step(limits, FixedBlock(block))
        return every_step(limits, FixedChunk(self.window, block), DelayedCache())


@dataclass(frozen=True)
class Measured:
    """Steps of one shape: the middle one's features, and all times."""

    features: Features
    latency: npt.NDArray[np.float64]  # [steps], s
    device: npt.NDArray[np.float64]  # [steps], s


def measure(forward: Forward, shape: Shape, block: int, repeats: int, prompts: Prompts | None = None) -> Measured:
    """Measure `repeats` steps of a shape; decode steps never compute `context`, a multiple of `block`.

    prompts: default random.
    """
    assert shape.context % block == 0, f"context is {shape.context}, expected a multiple of {block}"
    policy = shape.policy(block)
    limits = Limits(1 << 20, 1 << 30, shape.batch)  # the cache limits pages
    num_steps = repeats + SETTLE
    rounds = num_steps + 1 if shape.window == 0 else 1  # the first may be a capture
    output = 0 if shape.window == 0 else max((num_steps + 2) * block, MOST_STEPS + block)
    requests = [Request(i, 0.0, shape.context, output) for i in range(shape.batch * rounds)]
    lengths = np.full(len(requests), shape.context), np.full(len(requests), output)
    drawn = policy.commits_by != "acceptance"
    draws = CommitDraws(PATIENT.for_block(policy.block_length), 0, *lengths, block) if drawn else None
    prompts = prompts or random_prompts(forward.model.config, 0)
    executor = _Contextual(forward, policy, prompts, draws, policy.batching.max_prefill_tokens, shape)
    steps = _served(forward, executor, Engine(policy, limits, RequestTable(len(requests))), requests, num_steps)
    # A block's last step may be smaller.
    alike = (steps["prefill"] == (shape.window == 0)) & (steps["tokens"] == shape.tokens) & ~np.array(executor.late)
    counted = np.flatnonzero(alike)[-max(repeats, executor.measured - SETTLE) :]
    features = features_at(steps, int(counted[len(counted) // 2]))
    return Measured(features, steps["latency"][counted], steps["device"][counted])


def _served(
    forward: Forward, executor: "_Contextual", engine: Engine, requests: list[Request], num_steps: int
) -> dict[str, npt.NDArray[Any]]:
    """The journal of requests served until `num_steps` steps count."""
    parts: list[Mapping[str, Any]] = []
    recorder = StepRecorder(lambda columns, lists: parts.append(columns), engine.policy.block_length, batch=256)
    try:
        serve(engine, executor, requests, recorder=recorder, stop=lambda: executor.measured >= num_steps,
              meanwhile=forward.meanwhile)  # fmt: skip
    finally:
        forward.cache.clear()
    recorder.flush()
    return {name: np.concatenate([columns[name] for columns in parts]) for name in STEP_COLUMNS}


def features_at(steps: Mapping[str, npt.NDArray[Any]], i: int) -> Features:
    tokens, qk_pairs, keys, head, sampled, batch, forwards = (
        int(steps[name][i])
        for name in ("tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "batch", "num_forwards")
    )
    return Features(
        tokens=tokens,
        sum_q_kv=qk_pairs,
        sum_kv=keys,
        head_rows=head,
        sampled_rows=sampled,
        batch=batch,
        prefill_tokens=tokens if steps["prefill"][i] else 0,
        num_forwards=forwards,
    )


class _Contextual(ModelExecutor):
    """Skips prefills when decode steps are measured."""

    def __init__(self, *arguments: Any) -> None:
        *base, self._shape = arguments
        super().__init__(*base)
        self.measured = 0
        self.late: list[bool] = []  # by step: it compiled or captured

    def step(self, plan: StepPlan) -> StepOutcome:
        if plan.prefill and self._shape.window:
            self._open(plan, plan.num_tokens.astype(np.int64))
            self.late.append(False)
            return StepOutcome(0.0, np.full_like(plan.window, self._policy.rows.commits == "tokens"))
        ready = made_ready(self._forward)
        outcome = super().step(plan)
        self.late.append(made_ready(self._forward) > ready)
        if plan.features.tokens == self._shape.tokens and not self.late[-1]:
            self.measured += 1
        return outcome


def pages_of(context: int, block: int, page: int) -> int:
    """Most pages of a measured sequence; one is spare, for uneven batches."""
    return -(-(context + 2 * block + MOST_STEPS) // page) + 1
