"""Rows of an autoregressive model: one token follows another."""

from typing import Any

import numpy as np

from .emission import emit, finish, set_features
from .jit import rule
from .state import DENOISE, EMIT_END, PREFILL_STEP, ROWS


@rule
def plan_tokens(w: Any, x: Any) -> None:
    """Plan a decode step: each row computes its next token."""
    c = w.c[0]
    keys = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        seen = int(q.start) + 1
        q.num_tokens = 1
        q.num_keys = seen
        q.num_retained = 1
        q.phase = DENOISE
        w.window[slot, 0] = True
        keys += seen
    n = c.num_rows
    set_features(w, n, keys, keys, n, n, 1)


@rule
def draw_tokens(w: Any, x: Any, d: Any) -> None:
    """Every row commits its token."""
    for i in range(w.c[0].num_rows):
        w.committed[w.lists[ROWS, i], 0] = True


@rule
def commit_tokens(w: Any, x: Any, now: Any) -> None:
    """Every row has one token more."""
    c, emits = w.c[0], w.f[0].emit != EMIT_END
    gaps = 0.0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        q.start += 1
        if c.kind == PREFILL_STEP:
            if q.stop == q.prompt:
                continue  # a request for no tokens is over once its prompt is in
            r = w.r[q.request]
            if np.isnan(r.first_block):
                r.first_block = now
        if emits and q.emitted < q.answer - q.prompt:
            gaps += emit(w, slot, 1, now)
    c.gap_sum += gaps
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if q.start + 1 >= q.stop:
            finish(w, slot, now)
