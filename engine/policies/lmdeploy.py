"""LMDeploy's schedulers: groups of steps in which the batch is frozen (2025), and one forward ahead (0.18)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..admission import (
    bring_forward,
    canvas,
    copy_list,
    head,
    keep_rows,
    leave,
    let_in,
    place,
    pop,
    preempt,
    prefill_length,
    release,
    take_next,
)  # fmt: skip
from ..block import plan_pieces
from ..errors import PolicyError
from ..hooks import (
    decide,
    hold,
    pages_to_admit,
    placed,
    plan_prompts,
    preempted,
    prefill_over,
    reusable,
    reuse,
    reused,
    rows_updated,
    step_over,
)
from ..jit import rule
from ..part import BATCHING_SPACE, FITTED, Answers, Choice, Policy, Preset, Range, Scheduler, check_batch
from ..prefix import PrefixMemory
from ..state import DECODE_STEP, GROUP, NEXT, NOTHING, PREFILL_STEP, ROWS, RUNNING
from ..unmasking import Unmasking

MAX_LOOPS = 4096  # steps that a batch may be frozen for: more is a mistake, and nobody could stop it


PREEMPTS = ("updated", "admitted")
UPDATED = 0


@dataclass(frozen=True)
class Continuous(Scheduler):
    """LMDeploy: prefill first, and decode in groups of steps in which the batch is frozen (block-diffusion.md 2.1)."""

    max_batch: Annotated[
        int | None, Range(1), "sequences running; none: the device's default, at most a prefill's block rows"
    ] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 4096
    num_loops: Annotated[
        int | None, Range(1, MAX_LOOPS), "steps of a group; none: min(prefill_interval, 2 * (page // block_length))"
    ] = None
    prefill_interval: Annotated[int, Range(1), "bounds the steps of a group and the pages it reserves"] = 16
    decide_ahead: Annotated[bool, "decide on the next batch as a group's last step begins (LMDeploy's prefetch)"] = (
        False
    )

    fetch_nothing: Annotated[
        bool, "deciding ahead, a prefill that can let nobody in fetches no decode batch either (`enable_empty`)"
    ] = True
    reserve_at_prefill: Annotated[bool, "a prefill takes the pages that its first group may add, too"] = False
    reserve_past_end: Annotated[bool, "a group reserves pages beyond the end of the output"] = True
    preempts: Annotated[
        str, Choice(PREEMPTS), "who loses its pages: the sequence that was updated last, or admitted last"
    ] = "updated"

    neutral = frozenset(
        {
            "max_batch", "max_prefill_tokens", "num_loops", "prefill_interval", "decide_ahead", "fetch_nothing",
            "reserve_at_prefill", "reserve_past_end", "preempts",
        }
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_batch(self.max_batch, self.max_prefill_tokens)
        if self.num_loops is not None and not 1 <= self.num_loops <= MAX_LOOPS:
            expected = "at least 1" if self.num_loops < 1 else f"at most {MAX_LOOPS}"
            raise PolicyError(f"num_loops is {self.num_loops}, expected {expected}")
        if self.prefill_interval < 1:
            raise PolicyError(f"prefill_interval is {self.prefill_interval}, expected at least 1")
        if self.preempts not in PREEMPTS:
            raise PolicyError(f"preempts is {self.preempts!r}, expected {' or '.join(PREEMPTS)}")

    def check(self, policy: Policy) -> None:
        if policy.autoregressive and self.num_loops not in (None, 1):
            raise PolicyError(f"{policy.name}: num_loops is {self.num_loops}, expected 1 where every step is a token")

    def group_steps(self, page_size: int, block_length: int) -> int:
        """Steps of a decode group."""
        if self.num_loops is not None:
            return self.num_loops
        return max(1, min(self.prefill_interval, 2 * (page_size // block_length)))

    def reserved(self, policy: Policy, prompt: Any, output: Any) -> Any:
        block = policy.block_length
        tokens = -(-(prompt + output) // block) * block
        if self.reserve_past_end:  # as its last block begins
            tokens = tokens - block + policy.width + self._prealloc(policy)
        return tokens

    def _prealloc(self, policy: Policy) -> int:
        """Tokens beyond the window that a group reserves pages for: of blocks it may enter (block-diffusion.md 2.1)."""
        page, block = policy.memory.page_size, policy.block_length
        steps = 1 if policy.autoregressive else self.group_steps(page, block)
        if steps == 1:
            return 0
        # Two steps a block at the fastest, one when streaming runs ahead: a group may be asked to be longer.
        entered = steps if policy.obs else (steps + 1) // 2
        return max(min(self.prefill_interval // 2, page // block), entered) * block

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        page, block = policy.memory.page_size, policy.block_length
        steps = 1 if policy.autoregressive else self.group_steps(page, block)
        prealloc = self._prealloc(policy)
        at_prefill = prealloc if self.reserve_at_prefill else 0
        return {"group_steps": steps, "prealloc": prealloc, "prefill_prealloc": at_prefill}

    def answers(self, policy: Policy) -> Answers:
        return {
            decide: decide_continuous, step_over: group_step_over, pages_to_admit: pages_of_prefill,
            rows_updated: order_by_update,
        }  # fmt: skip


@rule
def decide_continuous(w: Any, x: Any) -> int:
    """Go on with the frozen group, run what was decided ahead, or decide now; and where asked decide ahead."""
    c, p = w.c[0], x.p[0]
    if c.num_group >= 0:
        copy_list(w, GROUP, ROWS, c.num_group)
        c.num_rows = c.num_group
        kind = DECODE_STEP
    else:
        kind = c.next_kind
        if kind == NOTHING:
            kind = _decide(w, x, ROWS, NOTHING)
            if kind == NOTHING:
                return kind
        else:
            copy_list(w, NEXT, ROWS, c.num_next)
            c.num_rows = c.num_next
            c.next_kind = NOTHING
        if kind == DECODE_STEP:
            copy_list(w, ROWS, GROUP, c.num_rows)
            c.num_group = c.num_rows
            c.loops_left = p.group_steps
    if p.decide_ahead and (kind == PREFILL_STEP or c.loops_left == 1):
        c.next_kind = _decide(w, x, NEXT, kind)
    return kind


@rule
def _decide(w: Any, x: Any, to: Any, in_flight: Any) -> int:
    """Prefill or decode, and which sequences; those of a step `in_flight` are out of reach until it ends."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    if in_flight != NOTHING:
        for i in range(c.num_rows):
            w.q[w.lists[ROWS, i]].in_flight = True
    ready = 0
    for i in range(c.num_running):
        if not w.q[w.lists[RUNNING, i]].in_flight:
            ready += 1
    kind = NOTHING
    num = 0
    if _prefers_prefill(c.num_waiting, ready, f.max_batch, p.decide_ahead):
        num = admit(w, x, to)
        if num > 0:
            kind = PREFILL_STEP
        elif in_flight != NOTHING and p.fetch_nothing:
            ready = -1
    if kind == NOTHING:
        # LMDeploy prefetches a decode batch only if enough sequences are left outside the one in flight.
        least = 0
        if in_flight == PREFILL_STEP:
            least = 1
        elif in_flight == DECODE_STEP:
            least = f.max_batch // 4 + 1
        if ready >= least:
            num = _make_room(w, x, to)
            if num > 0:
                kind = DECODE_STEP
    if in_flight != NOTHING:
        for i in range(c.num_rows):
            w.q[w.lists[ROWS, i]].in_flight = False
    if to == ROWS:
        c.num_rows = num
    else:
        c.num_next = num
    return kind


@rule
def _prefers_prefill(waiting: Any, ready: Any, max_batch: Any, ahead: Any) -> bool:
    """Whether to prefill next, with `ready` sequences that could decode.

    Deciding ahead sees few as ready, for most are in flight, so that whoever waits is nearly always let in; that is
    the rule where nothing is decided ahead.
    """
    if not ahead:
        return waiting > 0
    return waiting > 0 and (waiting >= 4 or ready < 0.5 * max_batch)


@rule
def admit(w: Any, x: Any, to: Any) -> int:
    """Let in the waiting requests that the next prefill takes, first come first served; their number."""
    c, f = w.c[0], w.f[0]
    num = 0
    tokens = 0
    while c.num_waiting > 0 and c.num_running < f.max_batch:
        more = admit_one(w, x, to, num, tokens)
        if more == 0:
            break
        num += 1
        tokens += more
    return num


@rule
def admit_one(w: Any, x: Any, to: Any, num: Any, tokens: Any) -> Any:
    """Let in the next waiting request as row `num` of a prefill that has so many tokens; those it adds, 0: it waits."""
    c, f = w.c[0], w.f[0]
    request, slot = head(w)
    length = prefill_length(w, request, slot)
    # The last block is always computed: a prefill is its first denoising step.
    there, held = reusable(w, x, request, length - int(f.block))
    if num > 0 and tokens + length - there > f.max_prefill:
        return 0
    pages = pages_to_admit(w, x, request, slot, length)
    if pages - held > f.num_pages - c.pages_held:
        return 0
    pop(w)
    new = slot < 0
    slot = place(w, request, slot, length, pages)
    if new:
        placed(w, x, slot)
    reuse(w, x, slot, there)
    hold(w, x, slot, length - int(f.block))
    let_in(w, slot)
    w.lists[to, num] = slot
    return length - there


@rule
def pages_of_prefill(w: Any, x: Any, request: Any, slot: Any, length: Any) -> Any:
    """Pages for the prompt and for what a group may add, within the request's canvas."""
    f, asked = w.f[0], w.asked
    whole = canvas(int(asked.input_length[request]) + int(asked.max_tokens[request]), f.block)
    return -(-min(length + x.p[0].prefill_prealloc, whole) // f.page)


@rule
def _make_room(w: Any, x: Any, to: Any) -> int:
    """Grow the pages of the running sequences for the coming group, preempting the last ones until the rest fit."""
    c, f = w.c[0], w.f[0]
    num = 0
    total = 0
    for i in range(c.num_running):
        slot = w.lists[RUNNING, i]
        if not w.q[slot].in_flight:
            w.lists[to, num] = slot
            num += 1
            total += _pages_needed(w, x, slot) - w.q[slot].pages
    while num > 0 and c.pages_held + total > f.num_pages:
        last = w.lists[to, num - 1]
        total -= _pages_needed(w, x, last) - w.q[last].pages
        preempt(w, x, last)
        preempted(w, x, last)
        num -= 1
    for i in range(num):
        slot = w.lists[to, i]
        w.q[slot].pages = _pages_needed(w, x, slot)
    if num > 0:
        c.pages_held += total
    for i in range(num):
        hold(w, x, w.lists[to, i], int(w.q[w.lists[to, i]].start))
    return num


@rule
def _pages_needed(w: Any, x: Any, slot: Any) -> Any:
    """Pages that a sequence's tokens and what the next group may add take; never fewer than it holds."""
    q, f, p = w.q[slot], w.f[0], x.p[0]
    tokens = int(q.start) + f.width + p.prealloc
    if not p.reserve_past_end:
        tokens = min(tokens, canvas(int(q.end), f.block))
    return max(-(-tokens // f.page), int(q.pages))


@rule
def order_by_update(w: Any, x: Any) -> None:
    """Put the rows of the step behind all others: LMDeploy's order is by the last update (block-diffusion.md 2.1)."""
    c = w.c[0]
    if x.p[0].preempts != UPDATED:
        return
    left = 0
    for i in range(c.num_rows):
        if not w.q[w.lists[ROWS, i]].finished:
            left += 1
    if left == c.num_running:  # all that run were in the step, in this order
        return
    for i in range(c.num_rows):
        q = w.q[w.lists[ROWS, i]]
        q.in_flight = not q.finished
    num = 0
    for i in range(c.num_running):
        slot = w.lists[RUNNING, i]
        if not w.q[slot].in_flight:
            w.lists[RUNNING, num] = slot
            num += 1
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        if w.q[slot].in_flight:
            w.q[slot].in_flight = False
            w.lists[RUNNING, num] = slot
            num += 1


@rule
def group_step_over(w: Any, x: Any) -> None:
    """A frozen group ends with its last step; who finished meanwhile leaves then."""
    c = w.c[0]
    c.loops_left -= 1
    if c.loops_left == 0:
        end_group(w, x)


@rule
def end_group(w: Any, x: Any) -> None:
    """Dissolve the batch in hand, and give back what its finished sequences held."""
    c = w.c[0]
    c.num_group = -1
    release(w, x, ROWS, c.num_rows)


@dataclass(frozen=True)
class LookAhead(Scheduler):
    """LMDeploy 0.18: prefill or decode, decided one forward ahead; no frozen groups (production-dllm-serving.md 4).

    A prompt longer than a prefill is computed a chunk at a time, one such prompt after another. Behind a chunk the rows
    that decode come next; then prompts that fit a prefill, the shortest first, until as many prefills as
    `opt_ttft_short_turns` have gone before the next chunk (lmdeploy/pytorch/engine/inputs_maker.py, #4695).
    """

    max_batch: Annotated[
        int | None, Range(1), "sequences running; none: the device's default, at most a prefill's block rows"
    ] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 8192
    prefill_interval: Annotated[int, Range(1), "decode forwards in a row, with requests waiting, before a prefill"] = 16
    opt_ttft_short_turns: Annotated[
        int | None, Range(1), "prefills of short prompts between two chunks of a long one; none: it is one step, alone"
    ] = 3

    neutral = frozenset({"max_batch", "max_prefill_tokens", "prefill_interval", "opt_ttft_short_turns"})
    hides_host = True
    columns = (
        ("computed", "i4"),  # positions whose KV is there once the steps decided on are over
        ("goal", "i4"),  # ... that its prefill is to compute
        ("wanted", "i4"),  # positions that the prefill decided on computes
    )

    def __post_init__(self) -> None:
        check_batch(self.max_batch, self.max_prefill_tokens)
        for name in ("prefill_interval", "opt_ttft_short_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PolicyError(f"{name} is {value}, expected at least 1")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"prealloc": self._prealloc(policy), "prefill_prealloc": 0, "reserve_past_end": True}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        # short_turns: prefills since the last chunk. after_chunk: the step decided on last was one that others follow.
        # short_until: no prompt ahead of this place is a long one, counting places on and on; head: the queue's then.
        return {"streak": 0, "short_turns": 0, "after_chunk": False, "short_until": 0, "head": 0}

    def shares_prefixes(self, policy: Policy) -> bool:
        return True

    def reserved(self, policy: Policy, prompt: Any, output: Any) -> Any:
        block = policy.block_length
        return -(-(prompt + output) // block) * block - block + policy.width + self._prealloc(policy)

    def _prealloc(self, policy: Policy) -> int:
        """Tokens that pages are extended by at a time: a step decided on ahead may be a block further on."""
        block = policy.block_length
        return max(1, min(8, policy.memory.page_size // block)) * block

    def answers(self, policy: Policy) -> Answers:
        return {
            decide: decide_look_ahead, prefill_over: leave, step_over: leave, pages_to_admit: pages_of_prefill,
            plan_prompts: plan_chunks,
        }  # fmt: skip


@rule
def decide_look_ahead(w: Any, x: Any) -> int:
    """Run what was decided ahead, or decide now; and decide ahead, as if all that is in flight went on."""
    c = w.c[0]
    kind = take_next(w)
    if kind == NOTHING:
        kind = _look(w, x, ROWS)
    if kind == PREFILL_STEP:  # the next chunk of a prompt may be decided on before this one is planned
        _note_prompts(w, x, ROWS, c.num_rows)
    if kind != NOTHING:
        c.next_kind = _look(w, x, NEXT)
        if c.next_kind == PREFILL_STEP and w.lists[NEXT, 0] != w.lists[ROWS, 0]:  # for who asks ahead what it computes
            _note_prompts(w, x, NEXT, c.num_next)
        keep_rows(w)
    return kind


@rule
def _note_prompts(w: Any, x: Any, which: Any, num: Any) -> None:
    """Note what a prefill that was decided on computes of its prompts."""
    for i in range(num):
        q, s = w.q[w.lists[which, i]], x.s[w.lists[which, i]]
        q.num_tokens = s.wanted
        q.num_keys = s.computed
        q.left = s.goal - s.computed


@rule
def _look(w: Any, x: Any, to: Any) -> int:
    """Choose the rows of a step: prompts, the chunk of one that is longer than a prefill, or all that decode."""
    c, m, p = w.c[0], x.m[0], x.p[0]
    if c.num_waiting == 0:
        m.streak = 0
    long = _half_prefilled(w, x)
    chunk_due = m.short_turns >= p.opt_ttft_short_turns
    last = long >= 0 and x.s[long].goal - x.s[long].computed <= _chunk(w)
    num = 0
    decodes = False
    tried_short = False
    tried_chunk = False
    if long >= 0:
        tried_chunk = last or not m.after_chunk
        if tried_chunk and not last and not chunk_due:
            num = _admit_short(w, x, to)
            tried_short = True
        if tried_chunk and num == 0:
            num = _next_chunk(w, x, to, long)
    elif _prefers_prompts(w, x):
        at = _long_one(w, x) if p.opt_ttft_short_turns > 0 else -1
        if at >= 0:
            if not chunk_due:
                num = _admit_short(w, x, to)
                tried_short = True
            if num == 0:
                bring_forward(w, at)
                num = _admit_long(w, x, to)
            if num == 0 and not tried_short:
                num = _admit_short(w, x, to)
        else:
            num = _admit_all(w, x, to)
    if num == 0:
        if long >= 0:
            w.q[long].in_flight = True  # it is not among those that decode
        num = _make_room(w, x, to)
        decodes = num > 0
        if long >= 0:
            w.q[long].in_flight = False
    if num == 0 and long >= 0 and not tried_chunk:  # nobody decodes behind a chunk
        if not chunk_due:
            num = _admit_short(w, x, to)
        if num == 0:
            num = _next_chunk(w, x, to, long)
    if to == ROWS:
        c.num_rows = num
    else:
        c.num_next = num
    if num == 0:
        return NOTHING
    slot = w.lists[to, 0]
    m.after_chunk = not decodes and x.s[slot].computed < x.s[slot].goal
    if not decodes:
        m.streak = 0
        return PREFILL_STEP
    if c.num_waiting > 0:
        m.streak += 1
    return DECODE_STEP


@rule
def _prefers_prompts(w: Any, x: Any) -> bool:
    """Whether to prefill those that wait: after a streak of decode steps, below half a batch, or if they are enough."""
    c, f = w.c[0], w.f[0]
    if c.num_waiting == 0:
        return False
    return (
        x.m[0].streak >= x.p[0].prefill_interval
        or c.num_running < 0.5 * f.max_batch
        or _waiting_tokens(w) >= f.max_prefill
    )


@rule
def _chunk(w: Any) -> Any:
    """Positions of a long prompt that one step computes: whole blocks."""
    block = int(w.f[0].block)
    return max(block, int(w.f[0].max_prefill) // block * block)


@rule
def _half_prefilled(w: Any, x: Any) -> Any:
    """The sequence whose prompt's next chunk no step has been decided on for; -1 where there is none."""
    for i in range(w.c[0].num_running):
        slot = w.lists[RUNNING, i]
        if x.s[slot].computed < x.s[slot].goal:
            return slot
    return -1


@rule
def _waiting_length(w: Any, at: Any) -> Any:
    """Positions that the prefill of a waiting request computes, by its place in the queue."""
    at = (w.c[0].queue_head + at) & (len(w.queue) - 1)
    return prefill_length(w, int(w.queue[at, 0]), int(w.queue[at, 1]))


@rule
def _long_one(w: Any, x: Any) -> Any:
    """The place in the queue of the first prompt that is longer than a prefill, -1 where none waits."""
    c, m = w.c[0], x.m[0]
    first = m.short_until - c.queue_head
    if c.queue_head < m.head or first > c.num_waiting:  # the queue has moved to a larger array, or is shorter
        first = 0
    m.head = c.queue_head
    for i in range(max(0, first), c.num_waiting):
        if _waiting_length(w, i) > _chunk(w):
            m.short_until = c.queue_head
            return i
    m.short_until = c.queue_head + c.num_waiting
    return -1


@rule
def _next_chunk(w: Any, x: Any, to: Any, slot: Any) -> int:
    """The next chunk of a prompt, if its pages are free: a step of one row, or of none."""
    c, f, q, s = w.c[0], w.f[0], w.q[slot], x.s[slot]
    wanted = min(_chunk(w), int(s.goal) - int(s.computed))
    pages = -(-(int(s.computed) + wanted) // int(f.page))
    if pages - q.pages > f.num_pages - c.pages_held:
        return 0
    c.pages_held += pages - q.pages
    q.pages = pages
    s.computed += wanted
    s.wanted = wanted
    hold(w, x, slot, min(int(s.computed), int(s.goal) - int(f.block)))
    if s.computed == s.goal:  # it joins those that decode, as the last
        at = 0
        while w.lists[RUNNING, at] != slot:
            at += 1
        for i in range(at, c.num_running - 1):
            w.lists[RUNNING, i] = w.lists[RUNNING, i + 1]
        w.lists[RUNNING, c.num_running - 1] = slot
    w.lists[to, 0] = slot
    x.m[0].short_turns = 0
    return 1


@rule
def _admit_long(w: Any, x: Any, to: Any) -> int:
    """Let the next waiting request in with the first chunk of its prompt; as a whole where enough is in the pool."""
    c, f = w.c[0], w.f[0]
    request, slot = head(w)
    length = prefill_length(w, request, slot)
    there, held = reusable(w, x, request, length - int(f.block))
    if length - there <= _chunk(w):
        return _admit_all(w, x, to)
    pages = -(-(there + _chunk(w)) // int(f.page))
    if c.num_running >= f.max_batch or pages - held > f.num_pages - c.pages_held:
        return 0
    pop(w)
    new = slot < 0
    slot = place(w, request, slot, length, there // int(f.page))
    if new:
        placed(w, x, slot)
    reuse(w, x, slot, there)
    let_in(w, slot)
    s = x.s[slot]
    s.computed = there
    s.goal = length
    return _next_chunk(w, x, to, slot)


@rule
def _admit_short(w: Any, x: Any, to: Any) -> int:
    """Let in prompts that a prefill takes whole, the shortest first, of equals the first come; how many."""
    c, f = w.c[0], w.f[0]
    num = 0
    tokens = 0
    while c.num_running < f.max_batch:
        at = -1
        for i in range(c.num_waiting):
            if _waiting_length(w, i) <= _chunk(w) and (at < 0 or _waiting_length(w, i) < _waiting_length(w, at)):
                at = i
        if at < 0:
            break
        bring_forward(w, at)
        more = admit_one(w, x, to, num, tokens)
        if more == 0:
            break
        num += 1
        tokens += more
    _whole_prompts(w, x, to, num)
    if num > 0:
        x.m[0].short_turns += 1
    return num


@rule
def _admit_all(w: Any, x: Any, to: Any) -> int:
    """Let in what the next prefill takes, first come first served."""
    num = admit(w, x, to)
    _whole_prompts(w, x, to, num)
    return num


@rule
def _whole_prompts(w: Any, x: Any, to: Any, num: Any) -> None:
    """Note that a prefill computes all that the pool lacks of these prompts."""
    for i in range(num):
        slot = w.lists[to, i]
        q, s = w.q[slot], x.s[slot]
        s.goal = q.start + w.f[0].block
        s.computed = s.goal
        s.wanted = s.goal - reused(w, x, slot)


@rule
def plan_chunks(w: Any, x: Any) -> None:
    """Plan a prefill of whole prompts, or of one's chunk: what each computes was noted as it was decided on."""
    plan_pieces(w, _chunk(w))


@rule
def _waiting_tokens(w: Any) -> Any:
    """Positions that the prefill of all that wait computes; no more are counted than one prefill may have."""
    c, f = w.c[0], w.f[0]
    tokens = 0
    for i in range(c.num_waiting):
        tokens += _waiting_length(w, i)
        if tokens >= f.max_prefill:
            break
    return tokens


@dataclass(frozen=True)
class LowConfidence(Unmasking):
    """LMDeploy's low_confidence_dynamic: masks that reach the threshold commit, 0.85 where nobody says another."""

    own_threshold: ClassVar[float | None] = 0.85


EVERY_STEP = Continuous(num_loops=1)  # no frozen groups
EVERY_STEP_AHEAD = Continuous(num_loops=1, decide_ahead=True)  # ... decided on a step ahead

# The engine's command line (lmdeploy/cli/utils.py), and its flag for each of our fields.
SERVE = "lmdeploy serve api_server MODEL --backend pytorch"
FLAGS = {
    "gpus": "--tp", "block_length": "--dllm-block-length", "strategy": "--dllm-unmasking-strategy",
    "threshold": "--dllm-confidence-threshold", "denoising_steps": "--dllm-denoising-steps",
    "max_batch": "--max-batch-size", "max_prefill_tokens": "--max-prefill-token-num",
    "page_size": "--cache-block-seq-len",
}  # fmt: skip

PRESETS = {
    "lmdeploy-bd32": Preset(
        Policy("lmdeploy-bd32", batching=Continuous(decide_ahead=True)),
        "block_length",
        "LMDeploy of 2025: the whole block every step, groups of frozen steps, a pass over each finished block",
        "LMDeploy's fork of December 2025, as FOCUS ran it (block-diffusion.md 2.1)",
        {FITTED: True, **BATCHING_SPACE, "num_loops": ["none", 1, 2, 4, 8]},
        reference=True,
        serve=SERVE,
        flags=FLAGS,
    ),
    "lmdeploy-0.18": Preset(
        Policy("lmdeploy-0.18", batching=LookAhead(), unmasking=LowConfidence(threshold=0.85), memory=PrefixMemory()),
        "block_length",
        "LMDeploy 0.18: prefill or decode, decided a forward ahead by streak, waiting tokens or half a batch",
        "LMDeploy 0.18.0 (production-dllm-serving.md 4)",
        serve=SERVE,
        flags={**FLAGS, "prefix_caching": "--enable-prefix-caching"},
    ),
}
