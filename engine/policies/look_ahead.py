"""LMDeploy 0.18's scheduler: prefill or decode, decided one forward ahead (lmdeploy/pytorch/paging, engine)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..admission import copy_list, keep_rows, let_in, place, prefill_length, release, suspend, take_next
from ..block import plan_pieces
from ..emission import has_masks
from ..errors import PolicyError
from ..hooks import (
    decide,
    give_back,
    hold,
    idle_pages,
    placed,
    plan_prompts,
    preempted,
    prefill_over,
    put_back,
    reusable,
    reuse,
    step_over,
)
from ..jit import rule
from ..part import Answers, Choice, Policy, Preset, Range, Scheduler, check_batch
from ..prefix import PrefixMemory, caches_prefixes, count_idle, refresh_found
from ..state import DECODE_STEP, FREED, IGNORED, NEXT, NOTHING, PREFILL_STEP, ROWS, RUNNING, SCRATCH
from ..unmasking import Unmasking
from .lmdeploy import FLAGS

ORDERS = ("size", "fifo")
BY_SIZE = ORDERS.index("size")

# Which requests a prefill takes first (_PrefillTurnPolicy): the first come; the shortest, and no long prompt; one long
# prompt, then the shortest.
FIRST_COME, SHORT, LONG = range(3)
SHORTS, LONGS = 1 << 28, 1 << 30  # keys of the queue's entries begin here: int32
TAKEN = -2  # in place of an entry's slot


@dataclass(frozen=True)
class LookAhead(Scheduler):
    """LMDeploy 0.18: prefill or decode, decided one forward ahead; no frozen groups (production-dllm-serving.md 4).

    A prompt longer than a prefill is computed a chunk at a time, one such prompt after another. Behind a chunk the rows
    that decode come next; then prompts that fit a prefill, the shortest first, until as many prefills as
    `opt_ttft_short_turns` have gone before the next chunk (InputsMakerAsync). A sequence asks for more pages when
    its next block no longer fits those that it has. One that finds none waits again; it keeps its pages, and computes
    its block alone when its turn comes, unless another request needs them first (Scheduler).
    """

    max_batch: Annotated[
        int | None, Range(1), "sequences running; none: the device's default, at most a prefill's block rows"
    ] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 8192
    prefill_interval: Annotated[int, Range(1), "decode forwards in a row, with requests waiting, before a prefill"] = 16
    opt_ttft_short_turns: Annotated[
        int | None, Range(1), "prefills of short prompts between two chunks of a long one; none: it is one step, alone"
    ] = 3
    opt_ttft_policy: Annotated[
        str, Choice(ORDERS), "which long prompt goes first: the one of fewest chunks, or the first come"
    ] = "size"
    opt_ttft_aging_sec: Annotated[float, Range(0), "seconds of waiting that count as a chunk less (s)"] = 2.0

    neutral = frozenset(
        {
            "max_batch", "max_prefill_tokens", "prefill_interval", "opt_ttft_short_turns", "opt_ttft_policy",
            "opt_ttft_aging_sec",
        }
    )  # fmt: skip
    hides_host = True
    columns = (
        ("updated", "f8"),  # s, end of the last step whose outcome it has
        ("turn", "i8"),  # preemptions of the replica before its last one
        ("rank", "i4"),  # its row in the step that it was updated by
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
        if self.opt_ttft_policy not in ORDERS:
            raise PolicyError(f"opt_ttft_policy is {self.opt_ttft_policy!r}, expected {' or '.join(ORDERS)}")
        if not self.opt_ttft_aging_sec >= 0:
            raise PolicyError(f"opt_ttft_aging_sec is {self.opt_ttft_aging_sec}, expected at least 0")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        # The engine takes no aging below a millisecond.
        return {
            "prealloc": self._prealloc(policy),
            "aging": max(0.001, float(self.opt_ttft_aging_sec)),
            "shares": caches_prefixes(policy),
        }

    def record(self, policy: Policy) -> Mapping[str, Any]:
        # streak: decode steps chosen with requests waiting. short_turns: prefills of short prompts since the last
        # chunk. after_chunk: the step decided on last was a chunk, and not its prompt's last.
        return {"streak": 0, "short_turns": 0, "after_chunk": False, "preemptions": 0}

    def shares_prefixes(self, policy: Policy) -> bool:
        return True

    def reserved(self, policy: Policy, prompt: Any, output: Any) -> Any:
        block = policy.block_length
        return -(-(prompt + output) // block) * block - block + policy.width + self._prealloc(policy)

    def _prealloc(self, policy: Policy) -> int:
        """Tokens beyond the block that pages are taken for (DLLMEngineStrategy.get_prealloc_size).

        At least a block: a step decided on ahead may be one further on. LMDeploy takes none at a prefill_interval of 1.
        """
        block = policy.block_length
        return max(1, min(self.prefill_interval // 2, policy.memory.page_size // block)) * block

    def answers(self, policy: Policy) -> Answers:
        rules = {decide: decide_look_ahead, prefill_over: take_in, step_over: take_in, plan_prompts: plan_chunks}
        return rules | ({idle_pages: count_idle, put_back: refresh_found} if caches_prefixes(policy) else {})


@rule
def decide_look_ahead(w: Any, x: Any) -> int:
    """Run the step that was decided on ahead, or decide now; and decide ahead, as if all that is in flight went on."""
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
    """Choose the rows of a step: prompts, the chunk of a long one, or all that decode (_ForwardInputsTask.run)."""
    c, m, p = w.c[0], x.m[0], x.p[0]
    long = _half_prefilled(w, x)
    last = long >= 0 and x.s[long].goal - x.s[long].computed <= _chunk(w)
    prefers_prompts = _prefers_prompts(w, x, last)
    due = m.short_turns >= p.opt_ttft_short_turns
    put_off = long >= 0 and not last and m.after_chunk  # the rows that decode come before the next chunk
    tried_short = False
    num = 0
    if long >= 0 and not put_off:
        if not last and not due:
            num = _admit(w, x, to, SHORT)
        if num == 0:
            num = _next_chunk(w, x, to, long)
    elif long < 0 and prefers_prompts:
        some_long = _some_long(w, x)
        if some_long and not due:
            num = _admit(w, x, to, SHORT)
            tried_short = True
        if num == 0:
            num = _admit(w, x, to, LONG if some_long else FIRST_COME)
        if num == 0 and some_long and not tried_short:
            num = _admit(w, x, to, SHORT)
    prefills = num > 0
    if num == 0:
        num = _grow(w, x, to, long)
    if num == 0 and put_off:
        if not due:
            num = _admit(w, x, to, SHORT)
        if num == 0:
            num = _next_chunk(w, x, to, long)
        prefills = num > 0
    if to == ROWS:
        c.num_rows = num
    else:
        c.num_next = num
    if num == 0:
        return NOTHING
    slot = w.lists[to, 0]
    m.after_chunk = prefills and x.s[slot].computed < x.s[slot].goal
    if not prefills:
        return DECODE_STEP
    m.streak = 0
    return PREFILL_STEP


@rule
def _prefers_prompts(w: Any, x: Any, last: Any) -> bool:
    """Whether to prefill: a prompt's last chunk, or requests that wait (do_prefill_default).

    Requests are let in after a streak of decode steps, below half a batch, or if they fill a prefill.
    """
    c, f, m = w.c[0], w.f[0], x.m[0]
    if last:
        return True
    if c.num_waiting == 0:
        m.streak = 0
        return False
    if m.streak >= x.p[0].prefill_interval or c.num_running < 0.5 * f.max_batch or _fill_a_prefill(w, x):
        return True
    m.streak += 1
    return False


@rule
def _fill_a_prefill(w: Any, x: Any) -> bool:
    """Whether the requests that wait have as many tokens to compute as a prefill takes."""
    tokens = 0
    for i in range(w.c[0].num_waiting):
        tokens += _length(w, x, i)
        if tokens >= w.f[0].max_prefill:
            return True
    return False


@rule
def _some_long(w: Any, x: Any) -> bool:
    """Whether a prompt waits that is longer than a prefill."""
    for i in range(w.c[0].num_waiting):
        if _is_long(w, x, _length(w, x, i)):
            return True
    return False


@rule
def _chunk(w: Any) -> Any:
    """Positions of a long prompt that one step computes: whole blocks."""
    block = int(w.f[0].block)
    return max(block, int(w.f[0].max_prefill) // block * block)


@rule
def _is_long(w: Any, x: Any, length: Any) -> bool:
    """Whether a prompt is computed a chunk at a time."""
    return x.p[0].opt_ttft_short_turns > 0 and length > _chunk(w)


@rule
def _half_prefilled(w: Any, x: Any) -> Any:
    """The sequence whose prompt's next chunk no step has been decided on for; -1 where there is none."""
    for i in range(w.c[0].num_running):
        slot = w.lists[RUNNING, i]
        if x.s[slot].computed < x.s[slot].goal:
            return slot
    return -1


# ---- the queue: in order of arrival, a preempted sequence as if it had come when its last outcome did --------------


@rule
def _place(w: Any, at: Any) -> Any:
    """The row of `w.queue` that a place in the queue is."""
    return (int(w.c[0].queue_head) + at) & (len(w.queue) - 1)


@rule
def _entry(w: Any, at: Any) -> Any:
    """The request at a place in the queue, and the slot of its progress: -1 for none, TAKEN once it was let in."""
    row = _place(w, at)
    return int(w.queue[row, 0]), int(w.queue[row, 1])


@rule
def _length(w: Any, x: Any, at: Any) -> Any:
    """Positions that the prefill of a waiting request computes, by its place in the queue."""
    request, slot = _entry(w, at)
    return prefill_length(w, request, slot) - (int(x.s[slot].computed) if slot >= 0 else 0)


@rule
def _came(w: Any, x: Any, at: Any) -> float:
    """When a waiting request came, or was brought up to date last (s)."""
    request, slot = _entry(w, at)
    return float(x.s[slot].updated) if slot >= 0 else float(w.arrival[request])


@rule
def _preempt(w: Any, x: Any, slot: Any, to: Any) -> None:
    """Have a sequence wait again, with its pages; an outcome of it that is in flight is thrown away."""
    c, m, s = w.c[0], x.m[0], x.s[slot]
    if to == NEXT:
        for i in range(c.num_rows):
            if w.lists[ROWS, i] == slot:
                w.q[slot].lost = True
    suspend(w, slot)
    preempted(w, x, slot)
    s.computed = w.q[slot].start
    s.turn = m.preemptions
    m.preemptions += 1
    at = int(c.num_waiting)
    while at > 0:
        other = _entry(w, at - 1)[1]
        came = _came(w, x, at - 1)
        later = came > s.updated or (came == s.updated and (other < 0 or x.s[other].rank > s.rank))
        if not later:
            break
        _move(w, at - 1, at)
        at -= 1
    w.queue[_place(w, at), 0] = w.q[slot].request
    w.queue[_place(w, at), 1] = slot
    c.num_waiting += 1


@rule
def _move(w: Any, at: Any, to: Any) -> None:
    """Copy an entry of the queue to another place."""
    for k in range(2):
        w.queue[_place(w, to), k] = w.queue[_place(w, at), k]


@rule
def _take(w: Any, num: Any) -> None:
    """Take the `num` entries that were let in out of the queue; the others keep their order."""
    c = w.c[0]
    at = int(c.num_waiting) - 1
    while _entry(w, at)[1] != TAKEN:
        at -= 1
    to = at
    while at >= 0:
        if _entry(w, at)[1] != TAKEN:
            _move(w, at, to)
            to -= 1
        at -= 1
    c.queue_head += num
    c.num_waiting -= num


@rule
def _sort(w: Any, x: Any, turn: Any) -> None:
    """Give each entry of the queue the key by which a prefill tries them (_PrefillReorderer)."""
    if turn == FIRST_COME:
        return
    first = -1
    for at in range(w.c[0].num_waiting):
        length = _length(w, x, at)
        key = SHORTS + length
        if _is_long(w, x, length):
            key = LONGS
            if turn == LONG:
                if x.p[0].opt_ttft_policy == BY_SIZE:
                    chunks = min(-(-length // _chunk(w)), 8191)
                    age = max(0.0, w.c[0].clock - _came(w, x, at))
                    credit = int(min(age // x.p[0].aging, 4096.0 + chunks))
                    key += (chunks - credit + 4096 << 13) + chunks
                if first < 0 or key < _key(w, first, turn):
                    first = at
        w.queue[_place(w, at), 2] = key
    if first >= 0:
        w.queue[_place(w, first), 2] = 0


@rule
def _key(w: Any, at: Any, turn: Any) -> Any:
    """The key of a place in the queue; of equal ones the first comes first."""
    return 0 if turn == FIRST_COME else int(w.queue[_place(w, at), 2])


@rule
def _after(w: Any, at: Any, turn: Any) -> Any:
    """The place in the queue that is tried after this one (-1: the first); -1 where there is none."""
    num = int(w.c[0].num_waiting)
    if turn == FIRST_COME:
        return at + 1 if at + 1 < num else -1
    key = _key(w, at, turn) if at >= 0 else -1
    best = -1
    for i in range(num):
        own = _key(w, i, turn)
        if (own > key or (own == key and i > at)) and (best < 0 or own < _key(w, best, turn)):
            best = i
    return best


# ---- letting requests in -----------------------------------------------------------------------------------------


@rule
def _admit(w: Any, x: Any, to: Any, turn: Any) -> int:
    """Let in the requests that the next prefill takes; their number (_PrefillScheduler.schedule)."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    num_waiting = int(c.num_waiting)
    if num_waiting == 0 or c.num_running >= f.max_batch:
        return 0
    _sort(w, x, turn)
    num = 0
    tokens = 0
    at = _after(w, -1, turn)
    while at >= 0 and c.num_running < f.max_batch:
        here = at
        at = _after(w, here, turn)
        request, slot = _entry(w, here)
        whole = prefill_length(w, request, slot)
        kept = slot >= 0 and w.q[slot].pages > 0
        before = int(x.s[slot].computed) if kept else 0
        known = _known(w, request, slot)
        there = 0
        if not kept:
            there = reusable(w, x, request, known - 1)[0]
        left = whole - before - there
        cost = min(left, _chunk(w)) if _is_long(w, x, left) else left
        # A turn of short prompts passes over those that do not fit it; others end with the first that does not.
        if turn == SHORT and _is_long(w, x, left):
            put_back(w, x, request, there)
            continue
        if num > 0 and tokens + cost > f.max_prefill:
            put_back(w, x, request, there)
            if kept and p.shares:
                _reclaim(w, x, slot)  # with the match of its prefix that is taken back
            if turn == SHORT and p.shares:  # the pool may have most of a longer one
                continue
            break
        pages = -(-(before + there + cost + (p.prealloc if cost == left else 0)) // int(f.page))
        if not _make_room_for(w, x, request, slot, pages, there, turn):
            if kept and p.shares:
                _reclaim(w, x, slot)
            fitted = num > 0 and tokens + whole - before > f.max_prefill
            if turn == SHORT and (fitted or _is_long(w, x, whole - before)):
                continue  # what the pool has of it alone made it fit
            break
        if kept:
            c.pages_held += max(0, pages - int(w.q[slot].pages))
            w.q[slot].pages = max(pages, int(w.q[slot].pages))
        else:
            new = slot < 0
            slot = place(w, request, slot, whole, pages)
            if new:
                placed(w, x, slot)
                _pass_over_early_end(w, slot)
            reuse(w, x, slot, there)
        s = x.s[slot]
        s.goal = whole
        s.wanted = cost
        s.computed = before + there + cost
        hold(w, x, slot, min(known, int(s.computed)))
        let_in(w, slot)
        w.queue[_place(w, here), 1] = TAKEN
        w.lists[to, num] = slot
        num += 1
        tokens += cost
        if cost < left:
            x.m[0].short_turns = 0
            break
    if num > 0:
        _take(w, num)
        if turn == SHORT:
            x.m[0].short_turns += 1
    return num


@rule
def _pass_over_early_end(w: Any, slot: Any) -> None:
    """Have a request whose EOS lies in the block that its prompt ends in go on to the next: no EOS is sought there.

    The engine takes the output to begin behind that block (DLLM sequences' output_start_pos).
    """
    q, f = w.q[slot], w.f[0]
    first_end = int(q.start) + int(f.block)
    if f.stops != IGNORED and q.prompt < first_end and q.prompt % f.block > 0 and q.stop <= first_end < q.end:
        q.stop = first_end + 1


@rule
def _known(w: Any, request: Any, slot: Any) -> Any:
    """Tokens of a request whose text is known up to there: its prompt, or its complete blocks."""
    if slot < 0:
        return int(w.asked.input_length[request])
    q = w.q[slot]
    if has_masks(w, slot, int(w.f[0].block)):
        return max(int(q.start), int(q.prompt))
    return int(q.start) + int(w.f[0].block)


@rule
def _next_chunk(w: Any, x: Any, to: Any, slot: Any) -> int:
    """The next chunk of a prompt, if there are pages for it: a step of one row, or of none."""
    c, q, s = w.c[0], w.q[slot], x.s[slot]
    wanted = min(_chunk(w), int(s.goal) - int(s.computed))
    last = s.computed + wanted == s.goal
    pages = -(-(int(s.computed) + wanted + (x.p[0].prealloc if last else 0)) // int(w.f[0].page))
    if not _make_room(w, x, pages - int(q.pages)):
        return 0
    _add_pages(w, slot, pages)
    s.computed += wanted
    s.wanted = wanted
    hold(w, x, slot, min(int(s.computed), _known(w, int(q.request), slot)))
    if last:  # it joins those that decode, as the last
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
def plan_chunks(w: Any, x: Any) -> None:
    """Plan a prefill of whole prompts, or of one's chunk: what each computes was noted as it was decided on."""
    plan_pieces(w, _chunk(w))


# ---- pages -------------------------------------------------------------------------------------------------------


@rule
def _grow(w: Any, x: Any, to: Any, long: Any) -> int:
    """The rows of a decode step; who finds no pages for its next block waits again (Scheduler.schedule_running).

    The last let in asks first. long: a sequence that is half prefilled, or -1.
    """
    c, f = w.c[0], w.f[0]
    page, block = int(f.page), int(f.block)
    num = int(c.num_running)
    copy_list(w, RUNNING, SCRATCH, num)
    for i in range(num - 1, -1, -1):
        slot = w.lists[SCRATCH, i]
        q = w.q[slot]
        end = int(q.start) + int(f.width)
        if slot == long or end + block <= q.pages * page:
            continue
        pages = -(-(end + x.p[0].prealloc) // page)
        if _make_room(w, x, pages - int(q.pages)):
            _add_pages(w, slot, pages)
            hold(w, x, slot, _known(w, int(q.request), slot))
        else:
            _preempt(w, x, slot, to)
    num = 0
    for i in range(c.num_running):
        if w.lists[RUNNING, i] != long:
            w.lists[to, num] = w.lists[RUNNING, i]
            num += 1
    return num


@rule
def _add_pages(w: Any, slot: Any, pages: Any) -> None:
    """Have a sequence hold so many pages, if it does not hold more."""
    q = w.q[slot]
    more = max(0, int(pages) - int(q.pages))
    w.c[0].pages_held += more
    q.pages += more


@rule
def _make_room(w: Any, x: Any, more: Any) -> bool:
    """Whether the pool has so many pages more; preempted sequences give theirs, the first preempted first."""
    c, f = w.c[0], w.f[0]
    if f.num_pages - c.pages_held - idle_pages(w, x) >= more:
        return True
    while True:
        first = -1
        for at in range(c.num_waiting):
            slot = _entry(w, at)[1]
            if slot >= 0 and w.q[slot].pages > 0 and (first < 0 or x.s[slot].turn < x.s[first].turn):
                first = slot
        if first >= 0:
            _reclaim(w, x, first)
        if f.num_pages - c.pages_held >= more:
            return True
        _drop_idle(w, x, 0)
        if first < 0:
            return False


@rule
def _make_room_for(w: Any, x: Any, request: Any, slot: Any, pages: Any, there: Any, turn: Any) -> bool:
    """The same for a request that would be let in: others that wait give their pages, the last in order first."""
    c, f = w.c[0], w.f[0]
    own = int(w.q[slot].pages) if slot >= 0 else 0
    more = pages - own - there // int(f.page)
    if f.num_pages - c.pages_held - idle_pages(w, x) >= more:
        return True
    while True:
        last = -1
        for at in range(c.num_waiting):
            other = _entry(w, at)[1]
            if other < 0 or other == slot or w.q[other].pages == 0:
                continue
            if last < 0 or _key(w, at, turn) >= _key(w, last, turn):
                last = at
        if last >= 0:
            _reclaim(w, x, _entry(w, last)[1])
        # Idle pages that it would take up are no room.
        touched = there // int(f.page) - reusable(w, x, request, there)[1]
        if f.num_pages - c.pages_held - touched >= more:
            return True
        put_back(w, x, request, there)
        _drop_idle(w, x, touched)
        if last < 0:
            return False


@rule
def _drop_idle(w: Any, x: Any, spared: Any) -> None:
    """Forget all idle pages but the newest `spared`: a search for room does, though it finds too little."""
    c = w.c[0]
    held = int(c.pages_held)
    c.pages_held = w.f[0].num_pages - spared
    hold(w, x, 0, 0)  # which makes room
    c.pages_held = held


@rule
def _reclaim(w: Any, x: Any, slot: Any) -> None:
    """Take the pages of a sequence that waits: it computes all that it had again."""
    c = w.c[0]
    give_back(w, x, slot)
    x.s[slot].computed = 0
    w.lists[FREED, c.num_freed] = w.q[slot].request
    c.num_freed += 1


# ---- the end of a step -------------------------------------------------------------------------------------------


@rule
def take_in(w: Any, x: Any) -> None:
    """A step is over: finished rows give their pages back, and leave unless the next step computes them too."""
    c = w.c[0]
    ahead = c.num_next if c.next_kind != NOTHING else 0
    for i in range(ahead):
        w.q[w.lists[NEXT, i]].in_flight = True
    num = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q, s = w.q[slot], x.s[slot]
        if q.finished:
            give_back(w, x, slot)
            if not q.in_flight:
                w.lists[SCRATCH, num] = slot
                num += 1
        elif not q.lost:
            s.updated = c.now + c.latency
            s.rank = i
        elif q.pages == 0:
            w.lists[FREED, c.num_freed] = q.request
            c.num_freed += 1
        q.lost = False
    for i in range(ahead):
        w.q[w.lists[NEXT, i]].in_flight = False
    release(w, x, SCRATCH, num)


@dataclass(frozen=True)
class LowConfidence(Unmasking):
    """LMDeploy's low_confidence_dynamic: masks that reach the threshold commit, 0.85 where nobody says another."""

    own_threshold: ClassVar[float | None] = 0.85


PRESETS = {
    "lmdeploy-0.18": Preset(
        Policy("lmdeploy-0.18", batching=LookAhead(), unmasking=LowConfidence(threshold=0.85), memory=PrefixMemory()),
        "block_length",
        "LMDeploy 0.18: prefill or decode, decided a forward ahead by streak, waiting tokens or half a batch",
        "LMDeploy 0.18.0 (production-dllm-serving.md 4)",
        {"max_batch": ["none", 16, 32, 64, 128], "max_prefill_tokens": [4096, 8192, 16384]},
        engine="lmdeploy",
        serve="--backend pytorch",
        flags={**FLAGS, "prefix_caching": "--enable-prefix-caching"},
    ),
}
