"""Rows of a full-sequence model: every step is a denoising step of a request, a full pass or a cheap one.

A request's canvas is its output rounded up to whole blocks that begin where its prompt ends. Its length is fixed, and
so are its pages: they are held from admission to the end, and nobody is preempted. Such a model (LLaDA, Dream) attends
in both directions, so that keys change while tokens are committed: a cache of them is an approximation, refreshed by
full passes (full-sequence-diffusion.md 1 to 4).
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from .admission import canvas, head, place, pop, release
from .block import next_block
from .emission import emit, emit_prefixes, finish, has_masks, publish, set_features
from .errors import PolicyError
from .hooks import head_rows, held, pages_to_admit, placed, work
from .jit import is_ours, plain, rule
from .part import Cache, Policy
from .state import EMIT_END, EMIT_STEP, IDLE, MASKED, PENDING, ROWS

Ints = npt.NDArray[np.int64]
LOGITS = ("block", "all")


class RowPosition(NamedTuple):
    """Where requests stand, one entry a row; tokens of a request are its prompt and its canvas of whole blocks."""

    prompt: Ints  # tokens
    length: Ints  # prompt and canvas
    start: Ints  # first position of the current block
    step: Ints  # steps taken
    block_step: Ints  # of those, in the current block
    block: int  # tokens of a block


class Work(NamedTuple):
    """The work of a step, one entry a row."""

    phases: npt.NDArray[np.uint8]
    tokens: Ints  # query positions
    keys: Ints  # that each of them sees


class ApproximateCache(Cache):
    """A cache of a full-sequence model; its rules say what each step computes and sees, and what it holds."""

    full_sequence = True
    rules: ClassVar[dict[Any, Any]] = {}  # for hooks.work, hooks.head_rows and hooks.held
    # What it keeps, as an executor must know it:
    in_place = False  # keys and values of every position, each in a place of its own
    packs = False  # a PACK pass chooses the keys that later passes see
    keeps_outputs = False  # the outputs of attention and feed-forward too: passes over parts of a sequence
    votes = False  # masks vote for the keys of the prompt that are kept

    def check(self, policy: Policy) -> None:
        for kind in type(self).__mro__:
            rules = vars(kind).get("rules", {})
            if work not in rules:
                continue
            said = f"{policy.name}: {kind.__name__} answers work"
            if held not in rules:  # what it inherits is held for other work
                raise PolicyError(f"{said} and not held, the memory of a request: expected an answer to both")
            if self.overhead is None and not is_ours(rules[work]):
                raise PolicyError(
                    f"{said} and does not declare overhead: expected the shipped cache whose measured overhead it has, "
                    'such as "SparseCache", or "none"'
                )
            return

    def answers(self, policy: Any) -> dict[Any, Any]:
        return {**self._rules(), pages_to_admit: pages_of_canvas}

    def work(self, at: RowPosition) -> Work:
        """The work of each request's next step."""
        step = plain(self._rules()[work])
        columns = zip(at.prompt.tolist(), at.length.tolist(), at.start.tolist(), at.step.tolist(),
                      at.block_step.tolist(), strict=True)  # fmt: skip
        rows = [step(*row, at.block, self) for row in columns]
        phases, tokens, keys = (np.array([row[i] for row in rows], np.int64) for i in range(3))
        return Work(phases.astype(np.uint8), tokens, keys)

    def head_rows(self, at: RowPosition, tokens: Ints) -> Ints:
        """Rows through the LM head of a step that computes so many tokens."""
        count = plain(self._rules()[head_rows])
        columns = zip(at.prompt.tolist(), at.length.tolist(), at.start.tolist(), tokens.tolist(), strict=True)
        return np.array([count(*row, at.block, self) for row in columns], np.int64)

    def held(self, prompt: Ints, length: Ints, state: int = 1) -> Ints:
        """Tokens' worth of keys and values that requests hold while they run (hooks.held)."""
        count = plain(self._rules()[held])
        rows = zip(np.atleast_1d(prompt).tolist(), np.atleast_1d(length).tolist(), strict=True)
        return np.array([count(*row, state, self) for row in rows], np.int64)

    def _rules(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for kind in reversed(type(self).__mro__):
            found.update(vars(kind).get("rules", {}))
        return found


def first_layers(policy: Policy, prompt: npt.NDArray[Any], end: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> Ints:
    """Tokens, query-key pairs and visible keys of a first layer that computes all positions, [steps, 3].

    prompt, end: of the steps' rows, one step's after another's; offsets [steps + 1]: where each step's begin.
    """
    block = policy.block_length
    prompt = prompt.astype(np.int64)
    output = -(-(end - prompt) // block) * block
    length, begin, rows = prompt + output, offsets[:-1], np.diff(offsets)
    if policy.batching.pads:  # to the longest prompt and the longest output
        length = np.repeat(np.maximum.reduceat(prompt, begin) + np.maximum.reduceat(output, begin), rows)
    tokens = np.add.reduceat(length, begin)
    return np.column_stack([tokens, np.add.reduceat(length * length, begin), tokens])


def check_logits(logits: str) -> None:
    """PolicyError unless there are such rows of logits."""
    if logits not in LOGITS:
        raise PolicyError(f"logits is {logits!r}, expected block or all")


@rule
def pages_of_canvas(w: Any, x: Any, request: Any, slot: Any, length: Any) -> Any:
    """Pages of a request from beginning to end."""
    f, prompt = w.f[0], int(w.asked.input_length[request])
    tokens = held(prompt, prompt + canvas(int(w.asked.max_tokens[request]), int(f.block)), int(f.state_tokens), x.p[0])
    return -(-tokens // f.page)


@rule
def can_let_in(w: Any, x: Any) -> bool:
    """Whether there are pages for the request that is next in the queue."""
    request, slot = head(w)
    return pages_to_admit(w, x, request, slot, 0) <= w.f[0].num_pages - w.c[0].pages_held


@rule
def let_head_in(w: Any, x: Any) -> int:
    """Give the request that is next in the queue a slot and its pages; its first block begins where its prompt ends."""
    request, slot = head(w)
    pages = pages_to_admit(w, x, request, slot, 0)
    pop(w)
    slot = place(w, request, slot, int(w.asked.input_length[request]) + int(w.f[0].block), pages)
    placed(w, x, slot)
    return slot


@rule
def tokens_of_row(w: Any, x: Any, slot: Any) -> int:
    """Query positions of a request's next step, in a batch that pads nothing."""
    q, block = w.q[slot], int(w.f[0].block)
    prompt = int(q.prompt)
    length = prompt + canvas(int(q.end) - prompt, block)
    _, tokens, _ = work(prompt, length, int(q.start), int(q.steps), int(q.block_steps), block, x.p[0])
    return int(tokens)


@rule
def plan_passes(w: Any, x: Any) -> None:
    """Plan the next step of each row, those of a static batch as padded to its longest prompt and output."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    block = int(f.block)
    longest_prompt = 0
    longest_canvas = 0
    furthest = 0
    for i in range(c.num_rows):
        q = w.q[w.lists[ROWS, i]]
        longest_prompt = max(longest_prompt, int(q.prompt))
        longest_canvas = max(longest_canvas, canvas(int(q.end) - int(q.prompt), block))
        furthest = max(furthest, int(q.start) - int(q.prompt))
    total = 0
    qk_pairs = 0
    sum_keys = 0
    head_sum = 0
    whole = 0
    whole_pairs = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        prompt = int(q.prompt)
        length = prompt + canvas(int(q.end) - prompt, block)
        start = int(q.start)
        if p.pads:  # all are at the same block, those included that have none left
            prompt = longest_prompt
            length = longest_prompt + longest_canvas
            start = longest_prompt + furthest
        phase, tokens, keys = work(prompt, length, start, int(q.steps), int(q.block_steps), block, p)
        # A request for no tokens has no block, and one that a static batch carries along has none left.
        over = q.start >= q.stop
        for k in range(block):
            w.window[slot, k] = not over
        q.phase = IDLE if over and q.prefilled else phase
        q.num_tokens = tokens
        q.num_keys = keys
        q.num_retained = tokens
        total += tokens
        qk_pairs += tokens * keys
        sum_keys += keys
        head_sum += head_rows(prompt, length, start, tokens, block, p)
        whole += length
        whole_pairs += length * length
    set_features(w, total, qk_pairs, sum_keys, head_sum, head_sum, block)
    if p.first_layer_whole and whole > total:
        c.first_tokens = whole
        c.first_q_kv = whole_pairs
        c.first_kv = whole


@rule
def commit_passes(w: Any, x: Any, now: Any) -> None:
    """Take in what each row committed; hand out complete blocks, or a static batch's answers all at once."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if not q.prefilled:
            q.prefilled = True
            c.outstanding_tokens -= q.prompt
            c.expected_tokens -= q.prompt
        for k in range(w.window.shape[1]):
            if w.window[slot, k] and w.status[slot, k] == MASKED:
                w.evaluations[slot, k] += 1
            if w.committed[slot, k]:
                w.status[slot, k] = PENDING
        q.steps += 1
        q.block_steps += 1
    if p.pads:
        _end_together(w, x, now)
        return
    if f.emit == EMIT_STEP:
        emit_prefixes(w, now)
    gaps = 0.0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if q.stop == q.prompt:
            finish(w, slot, now)
        elif q.start < q.stop and not has_masks(w, slot, f.block) and not _once_more(q.block_steps, p):
            gaps += publish(w, slot, now)
            if q.start + f.block >= q.stop:
                finish(w, slot, now)
            else:
                next_block(w, x, slot)
                q.block_steps = 0
    c.gap_sum += gaps
    release(w, x, ROWS, c.num_rows)


@rule
def _end_together(w: Any, x: Any, now: Any) -> None:
    """A static batch goes from block to block as one, and hands out nothing before its longest request is done."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        # Who has no block left is carried along.
        if w.q[slot].start < w.q[slot].stop and (has_masks(w, slot, f.block) or _once_more(w.q[slot].block_steps, p)):
            return
    goes_on = False
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if q.start < q.stop:
            next_block(w, x, slot)
        q.block_steps = 0
        if q.start < q.stop:
            goes_on = True
    if goes_on:
        return
    c.num_group = -1
    gaps = 0.0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        tokens = int(q.answer) - int(q.prompt)
        if tokens > 0:
            w.r[q.request].first_block = now
            if f.emit != EMIT_END:
                gaps += emit(w, slot, tokens, now)
        finish(w, slot, now)
    c.gap_sum += gaps
    release(w, x, ROWS, c.num_rows)


@rule
def _once_more(block_steps: Any, p: Any) -> bool:
    """Whether a block is computed again though its first pass has finished it (Fast-dLLM's loop with a threshold)."""
    return p.once_more and block_steps == 1
