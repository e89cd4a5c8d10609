"""Rows of an autoregressive model: one token follows another."""

import numpy as np

from .draw import Draws
from .emission import emit, finish, set_features
from .jit import rule
from .state import DENOISE, EMIT_END, PREFILL_STEP, ROWS, AnyPolicy, Replica


@rule
def plan_tokens(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a decode step: each row computes its next token."""
    counters = replica.counters
    keys = 0
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence = replica.sequences[slot]
        seen = int(sequence.start) + 1
        sequence.num_tokens = 1
        sequence.num_keys = seen
        sequence.num_retained = 1
        sequence.phase = DENOISE
        replica.window[slot, 0] = True
        keys += seen
    n = counters.num_rows
    set_features(replica, n, keys, keys, n, n, 1)


@rule
def draw_tokens(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    """Every row commits its token."""
    for i in range(replica.counters.num_rows):
        replica.committed[replica.lists[ROWS, i], 0] = True


@rule
def commit_tokens(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Every row has one token more."""
    counters, emits = replica.counters, replica.fixed.emit != EMIT_END
    gaps = 0.0
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence = replica.sequences[slot]
        sequence.start += 1
        if counters.kind == PREFILL_STEP:
            if sequence.stop == sequence.prompt:
                continue  # a request for no tokens is over once its prompt is in
            outcome = replica.requests[sequence.request]
            if np.isnan(outcome.first_block):
                outcome.first_block = now
        if emits and sequence.emitted < sequence.answer - sequence.prompt:
            gaps += emit(replica, slot, 1, now)
    counters.gap_sum += gaps
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence = replica.sequences[slot]
        if sequence.start + 1 >= sequence.stop:
            finish(replica, slot, now)
