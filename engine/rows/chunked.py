"""Rows of an autoregressive model under a token budget: prompt chunks, next tokens, drafts to verify."""

from typing import Any

from ..admission import knows_limit
from ..draw import accept_row, masks_of
from ..emission import emit, finish
from ..hooks import begin_row, commit_rows, draw_rows, next_tokens, plan_prompts, plan_rows, verified
from ..jit import rule
from ..records import I4, Bool, Record
from ..state import DENOISE, EMIT_END, IDLE, NEXT, PREFILL, AnyPolicy, Draws, PolicyState, Replica, step_slots
from .features import add_row, no_rows, note_row, set_features
from .kind import Kind


class ChunkColumns(Record):
    """A sequence's columns under a token budget."""

    computed: I4  # tokens with KV after decided steps
    settled: I4  # ... after finished steps
    goal: I4  # tokens known by then; once computed, the next is sampled
    wanted: I4  # positions of the decided step
    drafts: I4  # ... that are drafts
    unsure: I4  # positions in flight that may be taken back: drafts, or a canvas
    sampled: Bool  # its last row was sampled: a token and its drafts come next
    rests: Bool  # the discipline leaves it out of the next decision


ChunkState = PolicyState[Any, ChunkColumns, object]


@rule
def prefills(columns: ChunkColumns, fields: Any) -> bool:
    """Whether the next positions are prompt tokens, or tokens whose KV is lost."""
    return columns.goal > columns.computed if fields.canvases else not columns.sampled


@rule
def next_of_chunked(replica: Replica, policy: ChunkState, slot: int) -> int:
    """The rest of a prompt, or the last token and drafts."""
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    output = max(1, int(sequence.end) - int(sequence.prompt))
    if columns.goal - sequence.prompt >= output and knows_limit(replica, sequence):  # the step in flight reaches it
        return 0
    remaining = int(columns.goal) - int(columns.computed)
    return remaining if prefills(columns, policy.fields) else remaining + policy.fields.drafts


@rule
def draft_tokens(replica: Replica, policy: ChunkState, target: int) -> int:
    """Positions of the draft forward behind a decided step; 0 where no row can verify its drafts.

    None can behind a prompt's chunk that is not the last, or behind a request's last token (vLLM's `_drafts_unused`).
    """
    counters, queries = replica.counters, int(policy.fields.queries)
    num = int(counters.num_rows)
    if target == NEXT:
        num = int(counters.num_next)
    for i in range(num * (queries > 0)):
        slot = replica.lists[target, i]
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        is_last = sequence.prompt + max(1, int(sequence.end) - int(sequence.prompt)) <= columns.goal + 1
        samples = columns.computed + columns.unsure + columns.wanted >= columns.goal
        if samples and not (is_last and knows_limit(replica, sequence)):
            return num * queries
    return 0


@rule
def begin_chunked(replica: Replica, policy: ChunkState, slot: int) -> None:
    """Begin a sequence's step: count its positions as computed."""
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    n, before = int(columns.wanted), int(columns.computed)
    sequence.left = 0
    sampled = 0
    if sequence.finished:  # after the decision
        note_row(sequence, IDLE, n, before + n)
    else:
        note_row(sequence, PREFILL if prefills(columns, policy.fields) else DENOISE, n, before + n)
        columns.computed = min(before + n, int(columns.goal))
        columns.unsure = before + n - columns.computed
        sequence.left = columns.goal - columns.computed
        if columns.computed == columns.goal:
            sampled = 1 + columns.drafts
            columns.sampled = True
            columns.goal += 1
    for p in range(replica.window.shape[1]):
        replica.window[slot, p] = p < sampled


@rule
def num_sampled(replica: Replica, slot: int) -> int:
    """Positions of a row that may commit: a token and its drafts."""
    num = 0
    for p in range(replica.window.shape[1]):
        num += replica.window[slot, p]
    return num


@rule
def plan_chunked(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a causal step of prompt chunks and next tokens; only sampled positions need the LM head."""
    width = replica.window.shape[1]
    most = 1 + verified(replica, policy)
    sums = no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        sampled = num_sampled(replica, slot)
        if sampled > most:
            replica.window[slot, most:] = False
            sequence.num_tokens -= sampled - most
            sequence.num_keys -= sampled - most
            sampled = most
        n = int(sequence.num_tokens)
        sums = add_row(sums, sequence, n * (int(sequence.num_keys) - n) + n * (n + 1) // 2, sampled, sampled)
    set_features(replica, sums, 0 if sums.prompt_tokens == sums.tokens else width)


@rule
def draw_chunked(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    """Commit each sampled row's token, and drafts up to the first rejected one."""
    for slot in step_slots(replica):
        accept_row(masks_of(replica, slot, replica.window[slot]), replica.committed[slot], draws)


@rule
def commit_chunked(replica: Replica, policy: ChunkState, now: float) -> None:
    """Add committed tokens to the rows; preempted sequences recompute them."""
    counters, emits = replica.counters, replica.fixed.emit != EMIT_END
    gaps = 0.0
    for slot in step_slots(replica):
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if sequence.phase == IDLE or not replica.committed[slot, 0]:
            continue
        num = 0
        for p in range(replica.committed.shape[1]):
            num += replica.committed[slot, p]
        tokens = min(num, int(sequence.stop) - int(sequence.start) - 1)
        if tokens > 0:
            sequence.start += tokens
            columns.goal += tokens - 1
            if sequence.pages > 0:
                columns.computed += tokens - 1
            outcome = replica.requests[sequence.request]
            if outcome.first_block != outcome.first_block:
                outcome.first_block = now
            returned = min(tokens, int(sequence.answer) - int(sequence.prompt) - int(sequence.emitted))
            if emits and returned > 0:
                gaps += emit(replica, slot, returned, now)
        if sequence.start + 1 >= sequence.stop:
            finish(replica, slot, now)
    counters.gap_sum += gaps


CHUNKED = Kind(
    "chunked",
    {
        plan_prompts: plan_chunked, plan_rows: plan_chunked, draw_rows: draw_chunked, commit_rows: commit_chunked,
        next_tokens: next_of_chunked, begin_row: begin_chunked,
    },
    asks=(verified,),
    commits="tokens",
)  # fmt: skip
