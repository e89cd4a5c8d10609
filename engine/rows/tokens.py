"""Rows of an autoregressive model: one token follows another."""

import numpy as np

from ..emission import emit, finish
from ..hooks import commit_rows, draw_rows, hold, leap, paged_ahead, plan_prompts, plan_rows, steady
from ..jit import rule
from ..state import DENOISE, EMIT_END, PREFILL_STEP, AnyPolicy, Draws, Replica, step_slots
from .blocks import plan_prefill
from .features import add_row, no_rows, note_row, set_features
from .kind import Kind
from .leap import leap_tokens


@rule
def plan_tokens(replica: Replica, policy: AnyPolicy) -> None:
    sums = no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        num_keys = int(sequence.start) + 1
        note_row(sequence, DENOISE, 1, num_keys)
        sums = add_row(sums, sequence, num_keys, 1, 1)
        replica.window[slot, 0] = True
    set_features(replica, sums, 1)


@rule
def draw_tokens(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        replica.committed[slot, 0] = True


@rule
def commit_tokens(replica: Replica, policy: AnyPolicy, now: float) -> None:
    counters, emits = replica.counters, replica.fixed.emit != EMIT_END
    last, times = 0.0, 0  # a gap, and rows in succession with it: leaps multiply, too
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        sequence.start += 1
        if counters.kind == PREFILL_STEP and sequence.stop == sequence.prompt:
            continue  # a request for no tokens ends with its prompt
        if not sequence.prefilled:
            outcome = replica.requests[sequence.request]
            if np.isnan(outcome.first_block):
                outcome.first_block = now
        if emits and sequence.emitted < sequence.answer - sequence.prompt:
            gap = emit(replica, slot, 1, now)
            if gap != last:
                counters.gap_sum += last * times
                last, times = gap, 0
            times += 1
    counters.gap_sum += last * times
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if sequence.start + 1 >= sequence.stop:
            finish(replica, slot, now)


TOKENS = Kind(
    "tokens",
    {
        plan_prompts: plan_prefill, plan_rows: plan_tokens, draw_rows: draw_tokens, commit_rows: commit_tokens,
        leap: leap_tokens,
    },
    asks=(steady, paged_ahead, hold),
    commits="tokens",
)  # fmt: skip
