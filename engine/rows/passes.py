"""Rows of a full-sequence model: every step denoises, by a full pass or a cheaper partial one.

A canvas is a request's output in whole blocks from the prompt's end. Length and pages are fixed at admission; nothing
is preempted. Such models (LLaDA, Dream) attend both ways, so keys change as tokens commit: cached keys are approximate,
refreshed by full passes (full-sequence-diffusion.md 1 to 4).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..admission import canvas, head, place, pop, release
from ..emission import emit, emit_prefixes, finish, has_masks, publish
from ..errors import PolicyError
from ..hooks import block_entered, commit_rows, give_back, head_rows, held, pages_to_admit, placed, plan_rows, work
from ..jit import is_ours, plain, rule
from ..part import Cache, Policy, Scheduler
from ..state import EMIT_END, EMIT_STEP, IDLE, MASKED, PENDING, ROWS, AnyPolicy, Replica, Sequence, step_slots
from ..view import engine_form
from .blocks import next_block
from .features import add_row, no_rows, note_row, set_features
from .kind import Kind

Ints = npt.NDArray[np.int64]
LOGITS = ("block", "all")


class RowPosition(NamedTuple):
    """What `work` depends on, an entry per row."""

    prompt: Ints  # tokens
    length: Ints  # prompt and canvas
    start: Ints  # first position of the current block
    step: Ints  # steps taken
    block_step: Ints  # ... in the current block
    block: int  # tokens of a block


class Work(NamedTuple):
    phases: npt.NDArray[np.uint8]
    tokens: Ints  # query positions
    keys: Ints  # seen by each of them


class PassScheduler(Scheduler):
    """A scheduler of passes: a request holds its canvas's memory from admission to end."""

    families = ("full-sequence",)
    max_num_logits: int

    @property
    def max_prefill_tokens(self) -> int:  # type: ignore[override]
        """Tokens of a prefill that needs as much memory as a step."""
        return self.max_num_logits

    def length(self, policy: Policy, prompt: int, output: int) -> int:
        return prompt + -(-output // policy.block_length) * policy.block_length

    def reserved(self, policy: Policy, prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        cache: Any = policy.cache  # an ApproximateCache
        tokens: Ints = cache.held(prompt, self.length(policy, prompt, output), state_tokens)
        return tokens.reshape(np.shape(prompt))

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"pads": self.pads}


class ApproximateCache(Cache):
    """A full-sequence model's cache; its rules give steps' work and requests' memory."""

    family = "full-sequence"
    rules: ClassVar[dict[Any, Any]] = {}  # hooks.work, hooks.head_rows, hooks.held
    # For executors:
    in_place = False  # keeps KV of every position
    packs = False  # PACK passes choose keys for later passes
    keeps_outputs = False  # also of attention and feed-forward
    votes = False  # masks vote for prompt keys to keep

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts or not policy.granularity.whole_block:
            raise PolicyError(
                f"{policy.name}: a full-sequence model computes whole blocks, without eviction inside them"
            )
        steps, block = policy.unmasking.denoising_steps, policy.block_length
        if steps is not None and steps > block:
            raise PolicyError(f"{policy.name}: denoising_steps is {steps}, expected at most the block length {block}")
        kind = next((kind for kind in type(self).__mro__ if work in vars(kind).get("rules", {})), None)
        if kind is None:
            return
        text = f"{policy.name}: {kind.__name__} answers work"
        if held not in vars(kind)["rules"]:  # an inherited `held` suits other work
            raise PolicyError(f"{text} and not held, the memory of a request: expected an answer to both")
        if self.overhead is None and not is_ours(vars(kind)["rules"][work]):
            raise PolicyError(
                f'{text} and does not declare overhead: expected a shipped cache such as "SparseCache", or "none"'
            )

    def answers(self, policy: Any) -> dict[Any, Any]:
        return self._rules()

    def work(self, position: RowPosition) -> Work:
        """Work of each request's next step."""
        phases, tokens, keys = self._answers(work, position[:5], position.block).reshape(-1, 3).T
        return Work(phases.astype(np.uint8), tokens, keys)

    def head_rows(self, position: RowPosition, tokens: Ints) -> Ints:
        """LM-head rows of steps that compute `tokens`."""
        return self._answers(head_rows, (*position[:3], tokens), position.block)

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        """Tokens' worth of KV of running requests (hooks.held)."""
        return self._answers(held, (prompt, length), state)

    def _answers(self, question: Any, columns: tuple[Ints, ...], number: int) -> Ints:
        """A rule's answers to each row of the columns, in Python."""
        rules = self._rules()
        rule = rules[question]
        answer = plain(rule if is_ours(rule) else engine_form(question, rule, rules[held]))
        rows = zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True)
        return np.array([answer(*row, number, self) for row in rows], np.int64)

    def _rules(self) -> dict[Any, Any]:
        rules: dict[Any, Any] = {}
        for kind in reversed(type(self).__mro__):
            rules.update(vars(kind).get("rules", {}))
        return rules


def first_layers(policy: Policy, prompt: npt.NDArray[Any], end: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> Ints:
    """Tokens, query-key pairs and visible keys of a first layer that computes all positions, [steps, 3].

    prompt, end: of all steps' rows, concatenated; offsets [steps + 1]: each step's first row.
    """
    block = policy.block_length
    prompt = prompt.astype(np.int64)
    output = -(-(end - prompt) // block) * block
    length, begin, rows = prompt + output, offsets[:-1], np.diff(offsets)
    if policy.batching.pads:  # to the longest prompt and output
        length = np.repeat(np.maximum.reduceat(prompt, begin) + np.maximum.reduceat(output, begin), rows)
    tokens = np.add.reduceat(length, begin)
    return np.column_stack([tokens, np.add.reduceat(length * length, begin), tokens])


@rule
def pages_of_canvas(replica: Replica, policy: AnyPolicy, request: int, slot: int, length: int) -> int:
    """A request's pages for its whole stay."""
    fixed, prompt = replica.fixed, int(replica.asked.input_length[request])
    length = prompt + canvas(int(replica.asked.max_tokens[request]), fixed.block)
    tokens = held(prompt, length, fixed.state_tokens, policy.fields)
    return -(-tokens // fixed.page)


@rule
def can_let_in(replica: Replica, policy: AnyPolicy) -> bool:
    """Whether the first waiting request's pages are free."""
    request, slot = head(replica)
    pages = pages_to_admit(replica, policy, request, slot, 0)
    return pages <= replica.fixed.num_pages - replica.counters.pages_held


@rule
def let_head_in(replica: Replica, policy: AnyPolicy) -> int:
    """Admit the first waiting request; its first block begins where its prompt ended."""
    request, slot = head(replica)
    pages = pages_to_admit(replica, policy, request, slot, 0)
    pop(replica)
    end = int(replica.asked.input_length[request]) + replica.fixed.block
    slot = place(replica, request, slot, end, pages)
    placed(replica, policy, slot)
    return slot


@rule
def tokens_of_row(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Query positions of a request's next step, unpadded."""
    sequence, block = replica.sequences[slot], replica.fixed.block
    prompt, length, start = _extent(sequence, block)
    _, tokens, _ = work(prompt, length, start, int(sequence.steps), int(sequence.block_steps), block, policy.fields)
    return int(tokens)


@rule
def _extent(sequence: Sequence, block: int) -> tuple[int, int, int]:
    """A request's prompt, prompt and canvas, and first position of its block."""
    prompt = int(sequence.prompt)
    return prompt, prompt + canvas(int(sequence.end) - prompt, block), int(sequence.start)


@rule
def _longest(replica: Replica) -> tuple[int, int, int]:
    """The same for a padded batch, whose rows are at the same block, finished ones included."""
    prompt = canvases = furthest = 0
    for slot in step_slots(replica):
        row_prompt, length, start = _extent(replica.sequences[slot], replica.fixed.block)
        prompt = max(prompt, row_prompt)
        canvases = max(canvases, length - row_prompt)
        furthest = max(furthest, start - row_prompt)
    return prompt, prompt + canvases, prompt + furthest


@rule
def plan_passes(replica: Replica, policy: AnyPolicy) -> None:
    """Plan each row's next step; a static batch is padded to its longest prompt and output."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    block = fixed.block
    longest = _longest(replica)
    total = 0
    total_pairs = 0
    sums = no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        prompt, length, start = longest if fields.pads else _extent(sequence, block)
        phase, tokens, keys = work(prompt, length, start, int(sequence.steps), int(sequence.block_steps), block, fields)
        # Requests for no tokens, and finished ones of a static batch.
        over = sequence.start >= sequence.stop
        for k in range(block):
            replica.window[slot, k] = not over
        note_row(sequence, IDLE if over and sequence.prefilled else phase, tokens, keys)
        heads = head_rows(prompt, length, start, tokens, block, fields)
        sums = add_row(sums, sequence, tokens * keys, heads, heads)
        total += length
        total_pairs += length * length
    set_features(replica, sums, block)
    if fields.first_layer_whole and total > sums.tokens:
        counters.first_tokens = total
        counters.first_q_kv = total_pairs
        counters.first_kv = total


@rule
def commit_passes(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Apply rows' commits; return complete blocks, or a static batch's answers at its end."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        for k in range(replica.window.shape[1]):
            if replica.window[slot, k] and replica.status[slot, k] == MASKED:
                replica.evaluations[slot, k] += 1
            if replica.committed[slot, k]:
                replica.status[slot, k] = PENDING
        sequence.steps += 1
        sequence.block_steps += 1
    if fields.pads:
        _end_together(replica, policy, now)
        return
    if fixed.emit == EMIT_STEP:
        emit_prefixes(replica, replica.fixed.block, now)
    gaps = 0.0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if sequence.stop == sequence.prompt:
            finish(replica, slot, now)
        elif (
            sequence.start < sequence.stop
            and not has_masks(replica, slot, fixed.block)
            and not _once_more(sequence.block_steps, fields)
        ):
            gaps += publish(replica, slot, int(fixed.block), now)
            if sequence.start + fixed.block >= sequence.stop:
                finish(replica, slot, now)
            else:
                next_block(replica, policy, slot)
                sequence.block_steps = 0
    counters.gap_sum += gaps
    release(replica, policy, ROWS, counters.num_rows)


@rule
def _end_together(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Move a static batch to its next block; return answers when its longest request is done."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    for slot in step_slots(replica):
        if replica.sequences[slot].start < replica.sequences[slot].stop and (
            has_masks(replica, slot, fixed.block) or _once_more(replica.sequences[slot].block_steps, fields)
        ):
            return
    goes_on = False
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if sequence.start < sequence.stop:
            next_block(replica, policy, slot)
        sequence.block_steps = 0
        if sequence.start < sequence.stop:
            goes_on = True
    if goes_on:
        return
    counters.num_group = -1
    gaps = 0.0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        tokens = int(sequence.answer) - int(sequence.prompt)
        if tokens > 0:
            replica.requests[sequence.request].first_block = now
            if fixed.emit != EMIT_END:
                gaps += emit(replica, slot, tokens, now)
        finish(replica, slot, now)
    counters.gap_sum += gaps
    release(replica, policy, ROWS, counters.num_rows)


@rule
def _once_more(block_steps: int, fields: Any) -> bool:
    """Whether a block finished by its first pass is computed again (Fast-dLLM's loop with a threshold)."""
    return fields.once_more and block_steps == 1


PASSES = Kind(
    "passes",
    {plan_rows: plan_passes, commit_rows: commit_passes, pages_to_admit: pages_of_canvas},
    asks=(work, head_rows, held, block_entered, give_back),
)
ApproximateCache.rows = PASSES
