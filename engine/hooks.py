"""The questions that a policy answers: placeholders, called by the engine's rules.

`Part.answers` maps placeholders to the policy's rules; `core.core_of` puts them in place.
"""

from typing import Any

from .jit import rule
from .state import NO, AnyPolicy, Cost, Draws, Evaluations, Marks, Replica, Status, num_arrived

# ---- the scheduler -----------------------------------------------------------------------------------------------


@rule
def decide(replica: Replica, policy: AnyPolicy) -> int:
    """Choose what runs next: NOTHING, PREFILL_STEP or DECODE_STEP; rows in `replica.lists[ROWS]`."""
    return 0


@rule
def prefill_over(replica: Replica, policy: AnyPolicy) -> None:
    """After a step of prefills only; by default finished requests free their pages."""


@rule
def step_over(replica: Replica, policy: AnyPolicy) -> None:
    """After a decode step: end the batch or continue it; the answer releases finished rows (admission.release)."""


@rule
def rows_updated(replica: Replica, policy: AnyPolicy) -> None:
    """Reorder the running sequences after a step, finished ones excluded."""


@rule
def steady(replica: Replica, policy: AnyPolicy) -> int:
    """Whether the decode step that ended would be decided again: NO, UNTIL_A_REQUEST comes, or WHATEVER comes.

    With the same rows in the same order, until one ends or does other work, or pages run out. NO if it preempted.
    """
    return NO


@rule
def paged_ahead(replica: Replica, policy: AnyPolicy) -> int:
    """Tokens from a sequence's start with pages in its next step; asked if steps are steady."""
    return 0


@rule
def leap(replica: Replica, policy: AnyPolicy, draws: Any, cost: Cost, horizon: float) -> None:
    """Run at once the steps before the horizon that differ only by counts; asked if none is recorded."""


@rule
def holds_back(replica: Replica, policy: AnyPolicy) -> bool:
    """Whether complete blocks wait until the batch's rows are all complete."""
    return False


@rule
def next_tokens(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Positions that a running sequence wants next, under a token budget; 0: none."""
    return 0


@rule
def begin_row(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """Set a sequence's phase and tokens as its step begins, under a token budget."""


# ---- memory ------------------------------------------------------------------------------------------------------


@rule
def pages_to_admit(replica: Replica, policy: AnyPolicy, request: int, slot: int, length: int) -> int:
    """KV pages that a waiting request takes when admitted; its prefill computes `length` positions."""
    return 0


@rule
def reusable(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> Any:
    """How many of a waiting request's first `tokens` are in the pool, and their pages that other requests hold.

    Such pages take no more room. Without a prefix cache: KV from a link, on reserved pages.
    """
    return min(int(tokens), num_arrived(replica, request)), int(replica.requests[request].reserved)


@rule
def reuse(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """After an admission: the first `tokens` are in the pool and not computed."""
    row = replica.requests[replica.sequences[slot].request]
    replica.counters.pages_held -= row.reserved
    row.reserved = 0


@rule
def put_back(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> None:
    """A waiting request that would have reused its first `tokens` is not admitted."""


@rule
def idle_pages(replica: Replica, policy: AnyPolicy) -> Any:
    """Reusable pages without holders."""
    return 0


@rule
def hold(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """After counting a sequence's pages: its first `tokens` will be in the pool after the decided steps."""


@rule
def give_back(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    counters, sequence = replica.counters, replica.sequences[slot]
    counters.pages_held -= sequence.pages + sequence.window_pages
    sequence.pages = 0
    sequence.window_pages = 0


# ---- rows --------------------------------------------------------------------------------------------------------


@rule
def plan_prompts(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a step of prefills: each row's tokens and keys, and the step's features."""


@rule
def plan_rows(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a decode step of the chosen rows: windows, phases, tokens, keys, and the step's features."""


@rule
def commit_rows(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Apply the commits of the step in flight; finish complete requests."""


@rule
def draw_rows(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    """Predict which computed positions commit and, if the step evicts, which are retained.

    An answer that evicts also counts the retained features (`left_tokens` ...), which the price needs.
    """


@rule
def draws_of_step(replica: Replica, policy: AnyPolicy, draws: Draws) -> Any:
    """The run's draws for the step in flight."""
    return draws


@rule
def threshold_now(replica: Replica, policy: AnyPolicy) -> int:
    """Index of this step's threshold in the unmasking's `thresholds`."""
    return int(replica.counters.threshold)


# ---- positions of a block ----------------------------------------------------------------------------------------


@rule
def choose(replica: Replica, policy: AnyPolicy) -> int:
    """Most positions of a row in the coming step."""
    return int(replica.fixed.width)


@rule
def verified(replica: Replica, policy: AnyPolicy) -> int:
    """Most drafts of a row that the step verifies; the others count as rejected."""
    return int(replica.fixed.width)


@rule
def columns_in_reach(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Leftmost columns of a row that its coming step may compute; by default those within its length."""
    sequence, block = replica.sequences[slot], replica.fixed.block
    num_blocks = max(1, -(-(sequence.end - sequence.start) // block))
    return int(min(replica.fixed.width, num_blocks * block))


@rule
def opens(status: Status, opened: int, block: int, fields: Any) -> bool:
    """Whether a row opens a block after its first `opened`, at least one; asked before each decode step of a buffer.

    Not asked with all blocks open, at the request's limit, or after its EOS.
    """
    return False


@rule
def select(status: Status, reach: int, chunk: int, fields: Any, window: Marks) -> None:
    """Mark a row's positions to compute, at most `chunk` of the first `reach`; window is all False."""


@rule
def settle(status: Status, evaluations: Evaluations, window: Marks, block: int, fields: Any, prefill: bool) -> None:
    """Update a row's status after computing `window`: count masks' evaluations, mark final KV as CACHED."""


@rule
def learn(replica: Replica, policy: AnyPolicy, prefill: bool) -> None:
    """Learn from the step in flight before its rows' status changes."""


# ---- a sequence's life -------------------------------------------------------------------------------------------


@rule
def placed(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A new request gets this slot."""


@rule
def preempted(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A running sequence went back to the queue, without its pages or, as LMDeploy 0.18's may, with them."""


@rule
def block_entered(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A sequence entered its next block."""


# ---- full-sequence passes ----------------------------------------------------------------------------------------


@rule
def work(prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any) -> Any:
    """A request's next step: phase, positions computed, keys seen by each."""
    return 0, 0, 0


@rule
def head_rows(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> int:
    """Rows of a step through the LM head."""
    return tokens


@rule
def held(prompt: int, length: int, state: int, fields: Any) -> int:
    """Tokens' worth of KV held by a running request; state: a token's other outputs, in tokens of KV."""
    return length


# Placeholders that would decide nothing or cost nothing.
NEEDED = (decide, plan_rows, commit_rows, draw_rows, select, settle, pages_to_admit, next_tokens, begin_row, work)
