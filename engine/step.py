"""A step's plan and outcome: all that passes between the engine and its driver."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import state
from .latency import Features
from .part import Policy
from .rows.blocks import visible_rows
from .state import MASKED, Masks


class Phase(IntEnum):
    """A row's part in a step."""

    PREFILL = state.PREFILL  # the prompt, and the first denoising step of the block where it ends
    DENOISE = state.DENOISE  # positions of its block, at least one a mask
    FLUSH = state.FLUSH  # committed positions only: writes KV
    IDLE = state.IDLE  # computed as the batch is frozen; outcome ignored
    # Full-sequence models, all denoising (engine/rows/passes.py):
    FULL = state.FULL  # the whole sequence
    PACK = state.PACK  # ... choosing keys for the next steps
    REUSE = state.REUSE  # the block; with a prefix cache all after it too
    REFRESH_RESPONSE = state.REFRESH_RESPONSE
    REFRESH_PROMPT = state.REFRESH_PROMPT  # and the response's most changed tokens
    PARTIAL = state.PARTIAL  # the response's most changed tokens


@dataclass(frozen=True, slots=True, eq=False)
class Evicting:
    """A step's input to eviction, an entry a row."""

    rule: Any
    num_decoded: npt.NDArray[np.int32]  # of the block
    num_steps: npt.NDArray[np.int32]  # that decoded any
    progress: npt.NDArray[np.int32]  # rightmost block column that went through all layers, or -1


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The next step. Arrays have a row a sequence, and columns for its window of blocks."""

    now: float  # s, when planned
    step: int  # of this engine
    prefill: bool
    requests: npt.NDArray[np.int32]
    phases: npt.NDArray[np.uint8]
    num_tokens: npt.NDArray[np.int32]  # positions computed; see `first`
    num_keys: npt.NDArray[np.int32]  # visible
    window: npt.NDArray[np.bool_]  # [rows, width] positions computed
    status: npt.NDArray[np.uint8]  # [rows, width] MASKED, PENDING or CACHED before the step
    evaluations: npt.NDArray[np.uint16]  # [rows, width] steps that computed the position as a mask
    block_start: npt.NDArray[np.int32]  # absolute position of column 0
    prompt: npt.NDArray[np.int32]  # prompt tokens
    end: npt.NDArray[np.int32]  # prompt + output tokens
    chunk: int  # most positions of a row; 0 in prefill
    features: Features
    slots: npt.NDArray[np.int32]  # in the engine's state
    waiting: int
    running: int
    pages: int  # KV pages held
    submitted: int  # requests so far
    preempted: tuple[int, ...] = ()  # requests sent back to the queue by the decision made with it
    freed: tuple[int, ...] = ()  # requests that freed pages since the last plan, preempted ones among them
    evicting: Evicting | None = None  # None: all positions go through all layers
    first: Features | None = None  # the first layer's; None: as the others
    threshold: float | None = None  # confidence at which masks commit; None: the policy's

    @property
    def masks(self) -> Masks:
        return Masks(
            status=self.status,
            evaluations=self.evaluations,
            window=self.window,
            start=self.block_start,
            prompt=self.prompt,
            request=self.requests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    latency: float  # s
    committed: npt.NDArray[np.bool_]  # [rows, width]
    device: float = float("nan")  # s of `latency` with the device busy; NaN: not measured
    retained: npt.NDArray[np.bool_] | None = None  # [rows, width] in all layers; None: the whole window
    ends: npt.NDArray[np.int32] | None = None  # [rows] ends after an EOS; None: as planned


def reached(policy: Policy, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """End of each row's known prefix after a step, [rows], within its window."""
    start = plan.block_start.astype(np.int64)
    if policy.rows.commits == "tokens":
        return start + 2  # a position's row predicts the next token
    resolved = (plan.status != MASKED) | committed
    return start + np.where(resolved.all(axis=1), resolved.shape[1], np.argmin(resolved, axis=1))


def features_left(plan: StepPlan, retained: npt.NDArray[np.bool_]) -> Features:
    """The plan's features for layers after an eviction that left `retained` [rows, width]."""
    assert plan.evicting is not None
    rule = plan.evicting.rule
    num, extent, qk_pairs = visible_rows(plan.status, retained, plan.window.shape[1], rule.visible == "listed")
    start = plan.block_start.astype(np.int64)
    tokens = int(num.sum())
    return plan.features._replace(
        tokens=tokens,
        sum_q_kv=int((num * start + qk_pairs).sum()),
        sum_kv=int((start + extent).sum()),
        head_rows=tokens,
        sampled_rows=plan.features.sampled_rows if rule.sample_block else tokens,
    )
