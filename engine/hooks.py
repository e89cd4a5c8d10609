"""The questions that a policy answers: the placeholders that the engine's rules call, each with what it is asked.

A policy's parts say which rule stands for which placeholder (`answers`); `core.core_of` puts them together. `replica`
is the replica's state (state.Replica), `policy` what the policy adds to it (state.PolicyState).
"""

from typing import TYPE_CHECKING, Any

from .jit import rule
from .state import AnyPolicy, Replica

if TYPE_CHECKING:
    from .draw import Draws

# ---- the scheduler -----------------------------------------------------------------------------------------------


@rule
def decide(replica: Replica, policy: AnyPolicy) -> int:
    """Choose what runs next: NOTHING, PREFILL_STEP or DECODE_STEP, its rows in `replica.lists[ROWS]`."""
    return 0


@rule
def prefill_over(replica: Replica, policy: AnyPolicy) -> None:
    """A step's commits are in that prefilled alone: by default what the finished ones held comes free."""


@rule
def step_over(replica: Replica, policy: AnyPolicy) -> None:
    """A decode step's commits are in: end the batch, or go on with it."""


@rule
def rows_updated(replica: Replica, policy: AnyPolicy) -> None:
    """Order the running sequences after a step: its commits are in, and those that finished have left."""


@rule
def holds_back(replica: Replica, policy: AnyPolicy) -> bool:
    """Whether this decode step's blocks stay as they are until all rows of the batch are complete."""
    return False


@rule
def next_tokens(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Positions that a running sequence asks of the next step, under a budget of tokens; 0: it has no more to ask."""
    return 0


@rule
def begin_row(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A step with this sequence begins, under a budget of tokens: note what it computes, and its phase."""


# ---- memory ------------------------------------------------------------------------------------------------------


@rule
def pages_to_admit(replica: Replica, policy: AnyPolicy, request: int, slot: int, length: int) -> int:
    """KV pages that a waiting request takes when it is let in, whose prefill computes `length` positions."""
    return 0


@rule
def reusable(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> Any:
    """Tokens at the beginning of a waiting request, at most so many, whose keys and values are in the pool already.

    And how many of their pages others hold: letting the request in takes no more of the pool for those.
    """
    return 0, 0


@rule
def reuse(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """A request was let in, and its pages counted; its first `tokens` are not computed: they are in the pool."""


@rule
def put_back(replica: Replica, policy: AnyPolicy, request: int, tokens: int) -> None:
    """A waiting request that was to reuse the pages of its first `tokens` was not let in."""


@rule
def idle_pages(replica: Replica, policy: AnyPolicy) -> Any:
    """Pages of the pool that nobody holds, and whose keys and values may still be reused."""
    return 0


@rule
def hold(replica: Replica, policy: AnyPolicy, slot: int, tokens: int) -> None:
    """A sequence's pages are counted; after the steps decided on, keys and values of its first `tokens` are there."""


@rule
def leave_sight(replica: Replica, policy: AnyPolicy, slot: int, start: int) -> None:
    """A sequence's next step begins at `start`: pages of layers with a window that it shares may come free."""


@rule
def give_back(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """A sequence gives back its pages."""
    counters, sequence = replica.counters, replica.sequences[slot]
    counters.pages_held -= sequence.pages + sequence.window_pages
    sequence.pages = 0
    sequence.window_pages = 0


# ---- rows --------------------------------------------------------------------------------------------------------


@rule
def plan_prompts(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a step whose rows prefill: tokens and keys of each, and the step's features."""


@rule
def plan_rows(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a decode step of the chosen rows: window, phase, tokens and keys of each, and the step's features."""


@rule
def commit_rows(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Bring the rows of the step in flight up to date with what it committed; who is done is finished."""


@rule
def draw_rows(replica: Replica, policy: AnyPolicy, draws: "Draws") -> None:
    """Predict which computed positions of the step in flight commit, and which are retained where some are evicted."""


@rule
def draws_of_step(replica: Replica, policy: AnyPolicy, draws: "Draws") -> Any:
    """The draws that the step in flight commits by, of those of a run."""
    return draws


@rule
def threshold(replica: Replica, policy: AnyPolicy) -> int:
    """The place of this step's threshold among the `thresholds` of the policy's unmasking."""
    return int(replica.counters.threshold)  # as `threshold_now` chose it in plain Python


# ---- positions of a block ----------------------------------------------------------------------------------------


@rule
def choose(replica: Replica, policy: AnyPolicy) -> int:
    """The most positions that a row of the coming step may compute."""
    return int(replica.fixed.width)


@rule
def select(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    """Mark the positions of a row that a step computes, at most `chunk` of the first `reach`; window is all False."""


@rule
def settle(status: Any, evaluations: Any, window: Any, block: int, fields: Any, prefill: bool) -> None:
    """Bring a row's status up to date with having computed `window`: masks were evaluated, KV may be right now."""


@rule
def learn(replica: Replica, policy: AnyPolicy, prefill: bool) -> None:
    """Take in what the step in flight computed and committed, before the rows' status changes."""


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
    """The phase of a request's next step, the positions it computes and the keys that each of them sees."""
    return 0, 0, 0


@rule
def head_rows(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> int:
    """Rows of a step through the LM head."""
    return tokens


@rule
def held(prompt: int, length: int, state: int, fields: Any) -> int:
    """Tokens' worth of keys and values that a request holds while it runs.

    state: that the outputs of a token's attention and feed-forward take: 1 where keys are as wide as hidden states.
    """
    return length


# Without an answer of a policy's own these would decide nothing, or cost nothing: whoever asks them needs one.
NEEDED = (
    decide, plan_rows, commit_rows, draw_rows, select, settle, pages_to_admit, next_tokens, begin_row, work,
)  # fmt: skip
