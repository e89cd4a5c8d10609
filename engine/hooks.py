"""The questions that a policy answers: placeholders, which the engine's rules call.

`Part.answers` maps a placeholder to the policy's rule; `core.core_of` puts it in place.
"""

from typing import TYPE_CHECKING, Any

from .jit import rule
from .state import NO, AnyPolicy, Evaluations, Marks, Replica, Status, num_arrived

if TYPE_CHECKING:
    from .draw import Draws
    from .journal import Journal
    from .latency import Cost

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
    """After a decode step: end the batch, or continue it."""


@rule
def rows_updated(replica: Replica, policy: AnyPolicy) -> None:
    """Reorder the running sequences after a step, finished ones excluded."""


@rule
def steady(replica: Replica, policy: AnyPolicy) -> int:
    """Whether the decode step that ended would be decided again: NO, UNTIL_A_REQUEST comes, or WHATEVER comes.

    The same rows, in the same order, as long as none of them ends or does other work, and the pages last.
    """
    return NO


@rule
def paged_ahead(replica: Replica, policy: AnyPolicy) -> int:
    """Tokens from a sequence's start with pages in its next step; asked where steps are steady."""
    return 0


@rule
def leap(
    replica: Replica, policy: AnyPolicy, draws: Any, cost: "Cost", journal: "Journal", horizon: float
) -> None:  # fmt: skip
    """Run at once the steps before the horizon that differ from the last by counts alone."""


@rule
def holds_back(replica: Replica, policy: AnyPolicy) -> bool:
    """Whether complete blocks wait until all rows of the batch are complete."""
    return False


@rule
def next_tokens(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Positions that a running sequence wants in the next step under a token budget; 0: none."""
    return 0


@rule
def begin_row(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """Set the phase and tokens of a sequence as its step begins, under a token budget."""


# ---- memory ------------------------------------------------------------------------------------------------------


@rule
def pages_to_admit(replica: Replica, policy: AnyPolicy, request: int, slot: int, length: int) -> int:
    """KV pages that a waiting request takes at admission; its prefill computes `length` positions."""
    return 0


@rule
def reusable(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> Any:
    """How many of a waiting request's first `tokens` are in the pool, and their pages that other requests hold.

    Those pages take no more of the pool. Without a prefix cache: KV that came over a link, on reserved pages.
    """
    return min(int(tokens), num_arrived(replica, request)), int(replica.requests[request].reserved)


@rule
def reuse(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """After an admission and its pages: the first `tokens` are in the pool and not computed."""
    row = replica.requests[replica.sequences[slot].request]
    replica.counters.pages_held -= row.reserved
    row.reserved = 0


@rule
def put_back(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> None:
    """A waiting request that would have reused its first `tokens` was not admitted."""


@rule
def idle_pages(replica: Replica, policy: AnyPolicy) -> Any:
    """Pages that no request holds but whose contents can be reused."""
    return 0


@rule
def hold(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """After a sequence's pages are counted: its first `tokens` will be in the pool after the decided steps."""


@rule
def leave_sight(replica: Replica, policy: AnyPolicy, slot: int, start: int) -> None:
    """A sequence's next step begins at `start`: shared pages that left the window may be freed."""


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
    """Plan a decode step of the chosen rows: each one's window, phase, tokens and keys, and the step's features."""


@rule
def commit_rows(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Apply the commits of the step in flight, and finish complete requests."""


@rule
def draw_rows(replica: Replica, policy: AnyPolicy, draws: "Draws") -> None:
    """Predict which computed positions commit, and which are retained if the step evicts."""


@rule
def draws_of_step(replica: Replica, policy: AnyPolicy, draws: "Draws") -> Any:
    """The draws for the step in flight, out of the run's."""
    return draws


@rule
def threshold(replica: Replica, policy: AnyPolicy) -> int:
    """The index of this step's threshold in the `thresholds` of the policy's unmasking."""
    return int(replica.counters.threshold)


# ---- positions of a block ----------------------------------------------------------------------------------------


@rule
def choose(replica: Replica, policy: AnyPolicy) -> int:
    """The most positions that a row of the coming step may compute."""
    return int(replica.fixed.width)


@rule
def select(status: Status, reach: int, chunk: int, fields: Any, window: Marks) -> None:
    """Mark a row's positions to compute, at most `chunk` of the first `reach`; window is all False."""


@rule
def settle(status: Status, evaluations: Evaluations, window: Marks, block: int, fields: Any, prefill: bool) -> None:
    """Update a row's status after computing `window`: count evaluations of masks, mark final KV as CACHED."""


@rule
def learn(replica: Replica, policy: AnyPolicy, prefill: bool) -> None:
    """Learn from the step in flight before its rows' status changes."""


# ---- a sequence's life -------------------------------------------------------------------------------------------


@rule
def placed(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A new request has this slot."""


@rule
def preempted(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A sequence has lost its pages."""


@rule
def block_entered(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A sequence has moved on to its next block."""


# ---- full-sequence passes ----------------------------------------------------------------------------------------


@rule
def work(prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any) -> Any:
    """A request's next step: its phase, the positions computed, and the keys that each sees."""
    return 0, 0, 0


@rule
def head_rows(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> int:
    """Rows of a step through the LM head."""
    return tokens


@rule
def held(prompt: int, length: int, state: int, fields: Any) -> int:
    """Tokens' worth of KV that a request holds while it runs; state: a token's other outputs, in tokens of KV."""
    return length


# Their placeholders would decide nothing or cost nothing.
NEEDED = (
    decide, plan_rows, commit_rows, draw_rows, select, settle, pages_to_admit, next_tokens, begin_row, work,
)  # fmt: skip
