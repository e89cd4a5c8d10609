"""Rows of a canvas model under a token budget: prompt chunks, denoising steps, committing passes."""

from typing import Any

from ..admission import knows_limit
from ..draw import draw_by_law
from ..hooks import (
    begin_row,
    block_entered,
    commit_rows,
    draw_rows,
    holds_back,
    learn,
    next_tokens,
    plan_prompts,
    plan_rows,
    settle,
)
from ..jit import rule
from ..state import DENOISE, FLUSH, IDLE, MASKED, PENDING, PREFILL, PolicyState, Replica, Status, step_slots
from .blocks import commit_block
from .chunked import ChunkColumns
from .features import add_row, no_rows, note_row, set_features
from .kind import Kind

CanvasState = PolicyState[Any, ChunkColumns, object]


@rule
def is_complete(status: Status) -> bool:
    """Whether a canvas is decoded: only the pass that stores its KV remains."""
    return status[0] != MASKED


@rule
def next_of_canvas(replica: Replica, policy: CanvasState, slot: int) -> int:
    """The rest of a prompt, or a canvas."""
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    if columns.computed < columns.goal:
        return int(columns.goal) - int(columns.computed)
    # vLLM counts any pass in flight as two tokens: it computes a useless last canvas, and skips every other step of
    # requests that lack two tokens.
    at_limit = sequence.start + 2 >= sequence.end and knows_limit(replica, sequence)
    if columns.unsure > 0 and at_limit:
        return 0
    return int(replica.fixed.block)


@rule
def begin_canvas(replica: Replica, policy: CanvasState, slot: int) -> None:
    """Begin a sequence's step: a prompt chunk, a denoising step, or the committing pass."""
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    n, before = int(columns.wanted), int(columns.computed)
    sequence.left = 0
    computed = False
    if sequence.finished:  # one canvas too many, already decided
        last = int(sequence.block) if is_complete(replica.status[slot]) else 0
        note_row(sequence, IDLE, n, int(sequence.start) + n + last)
    elif before < columns.goal:
        note_row(sequence, PREFILL, n, before + n)
        columns.computed = before + n
        sequence.left = columns.goal - columns.computed
        for p in range(len(replica.status[slot])):  # a preempted sequence restarts its canvas
            replica.status[slot, p] = MASKED
            replica.evaluations[slot, p] = 0
    else:
        note_row(sequence, FLUSH if is_complete(replica.status[slot]) else DENOISE, n, int(sequence.start) + n)
        columns.unsure = n
        computed = True
        if sequence.phase == FLUSH:  # a budget may cut it: it then commits a part
            sequence.block = n
            for p in range(n):
                replica.status[slot, p] = PENDING
    for p in range(replica.window.shape[1]):
        replica.window[slot, p] = computed and p < n


@rule
def plan_canvases(replica: Replica, policy: CanvasState) -> None:
    """Plan prompt chunks and canvas passes; only denoising is bidirectional."""
    sums = no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        n = int(sequence.num_tokens)
        over_canvas = sequence.phase == DENOISE or sequence.phase == IDLE
        own_pairs = n * n if over_canvas else n * (n + 1) // 2
        sampled = n if over_canvas else 0
        # vLLM computes the committing pass's logits and drops them.
        heads = n if sequence.phase == FLUSH and policy.fields.late else sampled
        sums = add_row(sums, sequence, n * (int(sequence.num_keys) - n) + own_pairs, heads, sampled)
    set_features(replica, sums, 0 if sums.prompt_tokens == sums.tokens else replica.fixed.block)


@rule
def canvas_entered(replica: Replica, policy: CanvasState, slot: int) -> None:
    """A canvas is committed; its KV is stored unless preempted."""
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    columns.goal += sequence.block
    if sequence.pages > 0:
        columns.computed += sequence.block
    sequence.block = replica.fixed.block


CANVAS = Kind(
    "canvas",
    {
        plan_prompts: plan_canvases, plan_rows: plan_canvases, draw_rows: draw_by_law, commit_rows: commit_block,
        next_tokens: next_of_canvas, begin_row: begin_canvas, block_entered: canvas_entered,
    },
    asks=(learn, settle, holds_back),
)  # fmt: skip
