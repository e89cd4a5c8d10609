"""SGLang's scheduler for diffusion models: rounds of prefill or of decode, each row a block a round.

`Rounds` is release 0.5.23 (production-dllm-serving.md 3); `BlockSynchronous` its first port, a year older.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..admission import canvas, copy_list, head, let_in, place, pop, push_front, unseat
from ..emission import set_features
from ..errors import PolicyError
from ..hooks import (
    block_entered,
    decide,
    hold,
    holds_back,
    pages_to_admit,
    placed,
    plan_prompts,
    plan_rows,
    reusable,
    reuse,
    step_over,
)
from ..jit import rule
from ..part import Answers, PagedMemory, Policy, Preset, Range, Scheduler, check_batch
from ..prefix import PrefixMemory
from ..state import (
    CACHED,
    DECODE_STEP,
    DENOISE,
    FLUSH,
    GROUP,
    IDLE,
    MASKED,
    NOTHING,
    PREFILL,
    PREFILL_STEP,
    ROWS,
    RUNNING,
)
from ..unmasking import Unmasking
from ..windows import have_room, in_sight, most_in_sight, shared
from .canvas import BY_LAW, Canvas
from .lmdeploy import decide_continuous, end_group, pages_of_prefill

SOURCE = "SGLang 0.5.23 (production-dllm-serving.md 3)"
CLIP_MAX_NEW_TOKENS = 4096  # tokens of an answer that are promised room at most
UNBOUNDED = 1 << 40  # tokens: the room of layers with a window that have no pool of their own

# A request that runs: no round has let it in, one has passed it over, or it is in.
NEW, PASSED_OVER, ENTERED = range(3)

_PAGES = PrefixMemory(page_size=32)  # a page a block, as with its radix cache


@dataclass(frozen=True)
class TwoPools(PagedMemory):
    """Pages that are divided at the start between layers with a window and the others (HybridSWAPoolConfigurator)."""

    swa_full_tokens_ratio: Annotated[
        float, Range(0, 1), "tokens that layers with a window have room for, for each token of the other layers"
    ] = 0.8

    neutral = PagedMemory.neutral | {"swa_full_tokens_ratio"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.swa_full_tokens_ratio <= 1:
            raise PolicyError(f"swa_full_tokens_ratio is {self.swa_full_tokens_ratio}, expected above 0, at most 1")

    def pools(self, num_pages: int, window_bytes: int, kv_bytes: int) -> tuple[int, int]:
        ratio, page = self.swa_full_tokens_ratio, self.page_size
        full = int(num_pages * kv_bytes / (kv_bytes + ratio * window_bytes))
        window = -(-(int(full * page * ratio) // page * window_bytes) // kv_bytes)
        return (full + window, window) if window else (0, 0)


@dataclass(frozen=True)
class BlockSynchronous(Scheduler):
    """SGLang's sync mode: the batch changes between blocks, each as slow as its slowest (block-diffusion.md 2.3)."""

    max_batch: Annotated[int | None, Range(1), "sequences running; none: the device's default"] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 4096

    neutral = frozenset({"max_batch", "max_prefill_tokens"})

    def __post_init__(self) -> None:
        check_batch(self.max_batch, self.max_prefill_tokens)

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts or not policy.granularity.whole_block:
            raise PolicyError(f"{policy.name}: block-synchronous batching computes whole blocks, without eviction")

    def numbers(self, policy: Policy) -> dict[str, bool | int | float]:
        return {
            "decide_ahead": False, "fetch_nothing": False, "group_steps": 1, "prealloc": 0, "prefill_prealloc": 0,
            "reserve_past_end": False,
        }  # fmt: skip

    def answers(self, policy: Policy) -> Answers:
        return {
            decide: decide_continuous, step_over: round_step_over, holds_back: round_goes_on,
            pages_to_admit: pages_of_prefill,
        }  # fmt: skip


@rule
def round_goes_on(w: Any, x: Any) -> bool:
    """A round of blocks ends with the forward that every block entered complete (2.3)."""
    for i in range(w.c[0].num_rows):
        if w.q[w.lists[ROWS, i]].phase == DENOISE:
            return True
    return False


@rule
def round_step_over(w: Any, x: Any) -> None:
    """The batch changes where a round ends."""
    if not round_goes_on(w, x):
        end_group(w, x)


@dataclass(frozen=True)
class Rounds(Scheduler):
    """SGLang 0.5.23: while any request prefills nothing else runs, and each row takes a block a round (3.2).

    A prompt's whole blocks are prefilled one a round, and its tail is the head of the first decode block. A canvas
    model prefills its prompt in one forward, and each canvas again once it is decoded. Its layers with a window have a
    pool of their own, which the engine budgets like the other.
    """

    max_running_requests: Annotated[int, Range(1), "requests running (the engine's own default is 1)"] = 64
    dllm_fdfo: Annotated[bool, "a row whose block is done goes on; false: rounds last until all blocks are done"] = True
    max_prefill_tokens: Annotated[int, Range(1), "tokens of a prefill; a canvas model's prompt is cut there"] = 16384
    prefill_blocks_per_round: Annotated[int, Range(1, 4096), "blocks of a prompt a round (proposed: PR 31586)"] = 1
    mixed: Annotated[bool, "prefill and decode in one forward (proposed: PR 33196)"] = False
    steps_per_round: Annotated[int, Range(1, 4096), "forwards that the host plans at once (proposed: PR 33190)"] = 1

    neutral = frozenset(
        {
            "max_running_requests", "dllm_fdfo", "max_prefill_tokens", "prefill_blocks_per_round", "mixed",
            "steps_per_round",
        }
    )  # fmt: skip
    pieces = True
    frees_windows = True
    plans_rows = True
    columns = (
        ("computed", "i4"),  # tokens of the prompt that are prefilled, once the step in flight is over
        ("goal", "i4"),  # ... that are to be
        ("wanted", "i4"),  # positions that the coming step computes
        ("entry", "u1"),  # NEW, PASSED_OVER or ENTERED
    )

    def __post_init__(self) -> None:
        if self.max_running_requests < 1:
            raise PolicyError(f"max_running_requests is {self.max_running_requests}, expected at least 1")
        check_batch(None, self.max_prefill_tokens)
        for name in ("prefill_blocks_per_round", "steps_per_round"):
            if not 1 <= getattr(self, name) <= 4096:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected 1 to 4096")
        if not self.dllm_fdfo and (self.mixed or self.steps_per_round > 1):
            found = f"mixed={str(self.mixed).lower()}, steps_per_round={self.steps_per_round}"
            raise PolicyError(f"dllm_fdfo is false and {found}: expected mixed=false, steps_per_round=1")

    @property
    def max_batch(self) -> int | None:  # type: ignore[override]
        return self.max_running_requests

    def check(self, policy: Policy) -> None:
        if policy.autoregressive or policy.eviction.evicts or not policy.granularity.whole_block:
            raise PolicyError(f"{policy.name}: SGLang's rounds compute whole blocks, without eviction")
        if not policy.granularity.on_a_grid and self.max_prefill_tokens < policy.block_length:
            raise PolicyError(
                f"{policy.name}: max_prefill_tokens is {self.max_prefill_tokens} and canvas_length "
                f"{policy.block_length}: expected at least a canvas, no part of which is denoised alone"
            )

    def reserved(self, policy: Policy, prompt: Any, output: Any) -> Any:
        # A request of no tokens at all decodes a block, too.
        return super().reserved(policy, prompt, output + (prompt + output == 0))

    def at_once(self, policy: Policy, prompt: int, output: int) -> int:
        return max(prompt, policy.block_length * (1 + int(self.numbers(policy)["entered"])))

    def shares_prefixes(self, policy: Policy) -> bool:
        return policy.granularity.on_a_grid  # SGLang serves DiffusionGemma without its radix cache

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        grid = policy.granularity.on_a_grid
        late = grid and policy.unmasking.strategy != "law"
        # Blocks that a row may enter within a round: one that ends with a pass of its own takes two forwards at least.
        entered = self.steps_per_round // 2 if late else self.steps_per_round - 1
        return {"grid": grid, "late": late, "last": 0, "scratch": 0, "entered": entered}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        # goes_on: the step in flight is of the same round as the one before. The others are tokens of the round that is
        # being chosen: the pool's room, what its rows are promised and take at once, and what it may still compute. Of
        # layers with a window: the pages held, and what their pool's room has beyond all that its rows may ask for.
        return {
            "goes_on": False, "room": 0, "promised": 0, "taken": 0, "prompts": 0, "budget": 0, "to_the_last": False,
            "window_held": 0, "window_room": 0,
        }  # fmt: skip

    def answers(self, policy: Policy) -> Answers:
        return {
            decide: decide_round, placed: enter_round, plan_prompts: plan_round, plan_rows: plan_round,
            step_over: step_of_round, block_entered: stay, holds_back: round_is_open,
        }  # fmt: skip


@rule
def enter_round(w: Any, x: Any, slot: Any) -> None:
    """A new request: its whole blocks are to prefill, or all of its prompt where canvases begin behind it."""
    q, s, block = w.q[slot], x.s[slot], int(w.f[0].block)
    s.computed = 0
    s.goal = int(q.prompt) // block * block if x.p[0].grid else q.prompt
    s.entry = NEW


@rule
def stay(w: Any, x: Any, slot: Any) -> None:
    """Leave the prompt's count as it is: a canvas's keys come with a prefill of its own, which its status tells."""


@rule
def decide_round(w: Any, x: Any) -> int:
    """Go on with the round, or begin one: of those that prefill if any does, else of all (_process_dllm_batches)."""
    c, p, m = w.c[0], x.p[0], x.m[0]
    m.goes_on = c.num_group >= 0
    if c.num_group >= 0:
        copy_list(w, GROUP, ROWS, c.num_group)
        c.num_rows = c.num_group
        return DECODE_STEP
    decodes = 0
    some_prefill = False
    c.num_rows = 0
    tries = 0
    while c.num_rows == 0 and tries < 3:
        if c.num_preempted == 0 or c.num_running == 0:  # one that has just given way comes back in another round
            _take_on(w, x)
        _settle_pages(w, x)
        some_prefill = False
        for i in range(c.num_running):
            if _prefills(w, x, w.lists[RUNNING, i]):
                some_prefill = True
        # Where the engine would wait for ever: the last row uses the page that it leaves free, and need not prefill.
        m.to_the_last = tries == 2
        some_prefill = some_prefill and not m.to_the_last
        decodes = _choose(w, x, some_prefill)
        # A round of none is followed by the next at once, which those that it passed over join.
        if c.num_rows == 0 and (tries != 1 or not _preempt_last(w, x)):
            tries += 1
    num = int(c.num_rows)
    if num == 0:
        return NOTHING
    if decodes == 0:
        return PREFILL_STEP
    copy_list(w, ROWS, GROUP, num)
    c.num_group = num
    # A round with prompts in it is one forward: their next blocks need pages first.
    c.loops_left = 1 if some_prefill else p.steps_per_round
    return DECODE_STEP


@rule
def _take_on(w: Any, x: Any) -> None:
    """Take waiting requests up to the limit of those that run; they hold no pages until a round lets them in."""
    c, f = w.c[0], w.f[0]
    block = int(f.block)
    while c.num_waiting > 0 and c.num_running < f.max_batch:
        request, slot = head(w)
        if slot >= 0 and not _has_room_to_the_end(w, x, request, slot):
            return
        prompt = int(w.asked.input_length[request])
        pop(w)
        if slot < 0:
            behind = prompt // block * block if x.p[0].grid else prompt
            slot = place(w, request, slot, behind + block, 0)
            placed(w, x, slot)
        let_in(w, slot)


@rule
def _has_room_to_the_end(w: Any, x: Any, request: Any, slot: Any) -> bool:
    """Whether there is room for all that a preempted request may come to need, beside what those that run may.

    It comes in again but then: SGLang preempts nobody, and has ended where dsim does.
    """
    c, f = w.c[0], w.f[0]
    block = int(f.block)
    decoded = block * (1 + x.p[0].entered)  # positions that a round computes of a row
    pages = int(c.pages_held)
    seen = 0
    for i in range(c.num_running):
        other = w.lists[RUNNING, i]
        q, s, end = w.q[other], x.s[other], _canvas_end(w, x, other)
        pages += -(-end // int(f.page)) - q.pages - q.window_pages
        piece = min(int(s.goal) - int(s.computed), _largest_piece(f, int(q.prompt)))
        seen += max(int(q.window_pages), most_in_sight(f, end, max(decoded, piece)))
    prompt = int(w.asked.input_length[request])
    start = prompt // block * block if x.p[0].grid else prompt
    end = start + canvas(max(1, prompt + int(w.asked.max_tokens[request])) - start, block)
    piece = min(max(start, int(w.q[slot].start)), _largest_piece(f, prompt))
    if not x.p[0].grid and c.num_running > 0:  # a round counts what a row holds among what it asks for
        pages += (c.num_running + 1) * (-(-block // int(f.page)) + 1)
    return have_room(f, pages + -(-end // int(f.page)), seen + most_in_sight(f, end, max(decoded, piece)))


@rule
def _largest_piece(f: Any, prompt: Any) -> Any:
    """Tokens of a sequence that are prefilled at once: for no more has a pool of a window's pages room for certain."""
    return max(int(prompt), int(f.block)) if f.keeps > 0 else UNBOUNDED


@rule
def _settle_pages(w: Any, x: Any) -> None:
    """Others may use what the last round left; a decoded canvas gives its pages back until it is encoded."""
    c, f = w.c[0], w.f[0]
    for i in range(c.num_running):
        slot = w.lists[RUNNING, i]
        q, s = w.q[slot], x.s[slot]
        if s.entry != ENTERED:
            continue
        hold(w, x, slot, int(s.computed) if s.computed < s.goal else int(q.start))
        context = -(-(int(q.start) + _num_encoded(w, slot)) // int(f.page))
        if _is_decoded(w, x, slot) and q.pages > context:
            seen = int(q.window_pages)
            if seen > 0:
                seen = shared(f, max(0, seen * int(f.kv_bytes) // int(f.window_bytes) - int(q.pages) + context))
            c.pages_held -= q.pages - context + q.window_pages - seen
            q.pages = context
            q.window_pages = seen


@rule
def _choose(w: Any, x: Any, some_prefill: Any) -> int:
    """Choose the rows of a round; how many of them decode. Rows that were let in before come first (PrefillAdder)."""
    c, f, p, m = w.c[0], w.f[0], x.p[0], x.m[0]
    m.window_held = 0
    for i in range(c.num_running):
        m.window_held += w.q[w.lists[RUNNING, i]].window_pages
    m.room = (f.num_pages - c.pages_held) * f.page
    m.window_room = UNBOUNDED
    if f.window_pool > 0:
        m.room = (f.num_pages - f.window_pool - c.pages_held + m.window_held) * f.page
        m.window_room = (f.window_pool - m.window_held) * f.kv_bytes // f.window_bytes * f.page
    m.promised = 0
    m.taken = 0
    m.prompts = f.max_prefill
    m.budget = f.max_batch * f.block * p.prefill_blocks_per_round if p.grid else f.max_prefill
    c.num_rows = 0
    decodes = 0
    more = True
    for turn in range(2):
        for i in range(c.num_running):
            slot = w.lists[RUNNING, i]
            s = x.s[slot]
            prefills = _prefills(w, x, slot)
            if not more or (s.entry == NEW) != (turn == 1) or (some_prefill and not p.mixed and not prefills):
                continue
            before = int(c.num_rows)
            more = _go_on(w, x, slot, prefills) if turn == 0 else _enter(w, x, slot)
            if c.num_rows > before and not _prefills(w, x, slot):
                decodes += 1
    return decodes


@rule
def _go_on(w: Any, x: Any, slot: Any, prefills: Any) -> bool:
    """Give a row that was let in before its part in a round; whether others may follow (add_dllm_staging_req)."""
    f, p, q, s = w.f[0], x.p[0], w.q[slot], x.s[slot]
    block = int(f.block)
    most = _most(w, x, prefills)
    if most <= 0:
        return False
    left = int(s.goal) - int(s.computed) if s.computed < s.goal else block
    if _is_decoded(w, x, slot):
        left = block - _num_encoded(w, slot)
    wanted = left
    cut = False
    if not p.grid:
        if left > most and not prefills:
            return False
        wanted = min(left, most)
        if prefills:
            wanted = min(wanted, _largest_piece(f, int(q.prompt)))
        cut = wanted < left
    elif prefills:
        wanted = min(left, block * p.prefill_blocks_per_round)
        cut = True
    else:
        begun = _is_begun(w, slot)
        cut = not begun and q.prompt > q.start  # the prompt's tail counts beside a block
        if begun and block > most:
            return False
    there = 0
    if s.entry == PASSED_OVER:
        there = min(int(s.computed), reusable(w, x, int(q.request), int(s.computed))[0])
    if not _seat(w, x, slot, wanted, there):
        return True
    limit = int(q.end) - int(q.prompt)
    _charge(w, x, wanted, 0 if cut else min(limit, CLIP_MAX_NEW_TOKENS))
    return bool(_most(w, x, prefills) > 0)


@rule
def _most(w: Any, x: Any, prefills: Any) -> Any:
    """Tokens that a row let in before may compute in this round (_get_dllm_remain_tokens)."""
    f, p, m = w.f[0], x.p[0], x.m[0]
    if m.to_the_last:  # the room is of whole pages, and a row may have a part of one left: its pages are asked for
        return int(m.budget)
    most = min(int(m.budget), int(m.room) - int(m.promised))
    if p.grid or not prefills:
        most = min(most, int(f.block) * (p.prefill_blocks_per_round if prefills else 1))
    if most <= 0:
        most = int(m.budget)
    if not p.grid:
        most = min(most, int(m.room) - int(m.taken) - int(f.page), int(m.window_room) - int(f.page))
    return most


@rule
def _is_begun(w: Any, slot: Any) -> bool:
    """Whether a forward has computed the masks of a sequence's block."""
    for k in range(w.f[0].block):
        if w.evaluations[slot, k] > 0:
            return True
    return False


@rule
def _enter(w: Any, x: Any, slot: Any) -> bool:
    """Let a request in where the pool has room for all that it asks for; whether others may follow (add_one_req).

    One that is passed over joins the next round as if it had been let in: the engine checks that no more.
    """
    f, p, m, q, s = w.f[0], x.p[0], x.m[0], w.q[slot], x.s[slot]
    block, page = int(f.block), int(f.page)
    known = max(int(q.prompt), int(s.goal))
    there, held = reusable(w, x, int(q.request), int(s.goal)) if p.grid else (0, 0)
    touched = (there // page - held) * page  # idle pages that it would take up are no room
    limit = min(int(q.end) - int(q.prompt) - int(q.emitted), CLIP_MAX_NEW_TOKENS)
    asks = known - there + (block if p.grid else 0)
    s.entry = PASSED_OVER
    s.computed = there
    if asks + limit + page >= m.room - touched - m.promised or _in_window(f, asks, limit) >= m.window_room:
        return False
    if not p.grid and w.c[0].num_rows > 0 and -(-asks // page) * page >= m.prompts:
        return False
    wanted = min(int(m.budget), int(s.goal), _largest_piece(f, int(q.prompt)))
    if p.grid:
        wanted = block if there == s.goal else min(int(s.goal) - there, block * p.prefill_blocks_per_round)
    if not _seat(w, x, slot, wanted, there):
        return False
    m.room -= touched
    _charge(w, x, wanted, 0)
    left = min(int(m.room) - max(int(m.promised), int(m.taken)), int(m.window_room))
    return bool(left > 0 and m.prompts > 0 and m.budget > 0)


@rule
def _charge(w: Any, x: Any, tokens: Any, limit: Any) -> None:
    """Count a row's tokens, and what it may ask for later, among those of the round (_update_prefill_budget)."""
    m, page = x.m[0], int(w.f[0].page)
    m.window_room -= _in_window(w.f[0], tokens, limit)
    tokens = -(-tokens // page) * page
    m.promised += tokens + page + limit
    m.taken += tokens + page
    m.prompts -= tokens
    m.budget -= tokens


@rule
def _in_window(f: Any, tokens: Any, limit: Any) -> Any:
    """Tokens that a row is promised in layers with a window that have a pool (estimate_swa_kv_tokens)."""
    if f.window_pool == 0:
        return 0
    tokens, before = -(-tokens // int(f.page)) * int(f.page), int(f.keeps) - 1
    return max(0, tokens - before) + min(tokens + limit, before) + int(f.page)


@rule
def _seat(w: Any, x: Any, slot: Any, wanted: Any, there: Any) -> bool:
    """Give a row its pages and its place in the round, if there are pages: SGLang ends where there are none."""
    c, f, p, m, q, s = w.c[0], w.f[0], x.p[0], x.m[0], w.q[slot], x.s[slot]
    new = s.entry != ENTERED
    computed = there if new else int(s.computed)
    prefills = computed < s.goal
    before = computed if prefills else int(q.start)
    if not prefills and _is_decoded(w, x, slot):
        before += _num_encoded(w, slot)
    tokens = before + wanted
    if not prefills and not _is_decoded(w, x, slot):
        tokens = min(int(q.start) + wanted * (1 + p.entered), _canvas_end(w, x, slot))
    pages = max(int(q.pages), -(-int(tokens) // int(f.page)))
    seen = in_sight(f, before, tokens)
    more = pages - q.pages
    if new:
        more -= reusable(w, x, int(q.request), there)[1] if there > 0 else 0
    in_windows = m.window_held + seen - q.window_pages
    if not have_room(f, c.pages_held - m.window_held + more, in_windows):
        return False
    c.pages_held += pages - q.pages + in_windows - m.window_held
    m.window_held = in_windows
    q.pages = pages
    q.window_pages = seen
    if new:
        reuse(w, x, slot, there)
        s.computed = there
        s.entry = ENTERED
    hold(w, x, slot, 0)
    s.wanted = wanted
    w.lists[ROWS, c.num_rows] = slot
    c.num_rows += 1
    return True


@rule
def _preempt_last(w: Any, x: Any) -> bool:
    """Where no row finds pages, take those of the last let in of several; SGLang would have ended. Whether one was."""
    c = w.c[0]
    entered = 0
    for i in range(c.num_running):
        entered += x.s[w.lists[RUNNING, i]].entry == ENTERED
    if entered < 2:
        return False
    for i in range(c.num_running - 1, -1, -1):
        slot = w.lists[RUNNING, i]
        q, s = w.q[slot], x.s[slot]
        if s.entry == ENTERED:
            unseat(w, x, slot)
            push_front(w, int(q.request), slot)
            s.computed = 0
            s.goal = max(int(q.start), int(s.goal))
            s.entry = NEW
            return True
    return False


@rule
def _canvas_end(w: Any, x: Any, slot: Any) -> Any:
    """Where a sequence's last block ends."""
    q = w.q[slot]
    return int(q.start) + canvas(max(1, int(q.end)) - int(q.start), int(w.f[0].block))


@rule
def _prefills(w: Any, x: Any, slot: Any) -> bool:
    """Whether a sequence is in its prefill phase: blocks of its prompt are missing, or the keys of a decoded canvas."""
    s = x.s[slot]
    if s.entry == NEW:  # whatever the pool may have of it
        return s.goal > 0 or not x.p[0].grid
    return s.computed < s.goal or _is_decoded(w, x, slot)


@rule
def _is_decoded(w: Any, x: Any, slot: Any) -> bool:
    """Whether a sequence's canvas is decoded, and keys of it are missing."""
    last = int(w.f[0].block) - 1
    return not x.p[0].grid and w.status[slot, last] != MASKED and w.status[slot, last] != CACHED


@rule
def _num_encoded(w: Any, slot: Any) -> int:
    """Tokens of a decoded canvas whose keys are there: what is left of the pool may cut the pass that leaves them."""
    num = 0
    for k in range(w.f[0].block):
        num += w.status[slot, k] == CACHED
    return num


@rule
def plan_round(w: Any, x: Any) -> None:
    """Plan the chosen rows: blocks of prompts, and blocks that are decoded or whose keys are left behind."""
    c, p, block, goes_on = w.c[0], x.p[0], int(w.f[0].block), x.m[0].goes_on
    tokens = 0
    qk_pairs = 0
    keys = 0
    prompts = 0
    decoded = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q, s = w.q[slot], x.s[slot]
        n, before = int(s.wanted), int(q.start)
        q.left = 0
        first = 0  # ... of the block's positions that the step computes
        computed = True
        # A finished row, a prompt's and a canvas decoded within the round are computed for nothing until it ends.
        prefilled = goes_on and (q.phase == PREFILL or q.phase == IDLE)
        if q.finished or prefilled or (goes_on and _is_decoded(w, x, slot)):
            n = block
            if prefilled and not q.finished and not _is_decoded(w, x, slot):
                n = int(s.wanted)
                before = int(s.computed) - n
            q.phase = IDLE
            computed = False
            qk_pairs += n * (before + n)
            decoded += n
        elif s.computed < s.goal:
            before = int(s.computed)
            q.phase = PREFILL
            computed = False
            s.computed += n
            q.left = s.goal - s.computed
            qk_pairs += n * before + (n * (n + block) // 2 if p.grid else n * (n + 1) // 2)
            prompts += n
        elif _is_decoded(w, x, slot):  # a canvas's causal pass
            q.phase = FLUSH
            first = _num_encoded(w, slot)
            before += first
            qk_pairs += n * before + n * (n + 1) // 2
            if c.num_group < 0:  # in a mixed round it is one of the forwards of those that decode
                prompts += n
        else:
            n = block
            q.phase = FLUSH
            for k in range(block):
                if w.status[slot, k] == MASKED:
                    q.phase = DENOISE
            qk_pairs += n * (before + n)
            decoded += n
        for k in range(block):
            w.window[slot, k] = computed and first <= k and k < first + n
        q.num_tokens = n
        q.num_retained = n
        q.num_keys = before + n
        tokens += n
        keys += before + n
    # A masked model's prefill runs the graph of a decode round, LM head and all.
    head_rows = tokens if p.grid else decoded
    set_features(w, tokens, qk_pairs, keys, head_rows, decoded, block if decoded > 0 else 0)
    c.prefill_tokens = prompts
    c.continues = goes_on


@rule
def round_is_open(w: Any, x: Any) -> bool:
    """Whether a sync round goes on: until all of its blocks are done.

    Blocks of a law are done as they commit, all at once; others with the forward that they enter complete.
    """
    if x.p[0].dllm_fdfo:
        return False
    for i in range(w.c[0].num_rows):
        slot = w.lists[ROWS, i]
        if w.q[slot].phase == DENOISE and (x.p[0].late or not w.committed[slot].any()):
            return True
    return False


@rule
def step_of_round(w: Any, x: Any) -> None:
    """A round ends with its last forward; one of blocks in step goes on until all are done."""
    c = w.c[0]
    x.m[0].goes_on = holds_back(w, x)
    if x.m[0].goes_on:
        return
    c.loops_left -= 1
    if c.loops_left <= 0:
        for i in range(c.num_rows):  # an answer's last block has its keys, too
            slot = w.lists[ROWS, i]
            if w.q[slot].finished:
                hold(w, x, slot, int(w.q[slot].stop))
        end_group(w, x)


@dataclass(frozen=True)
class LowConfidence(Unmasking):
    """SGLang's LowConfidence: masks above the threshold commit, 0.95 where nobody says another."""

    own_threshold: ClassVar[float | None] = 0.95


@dataclass(frozen=True)
class JointThreshold(Unmasking):
    """Tokens change until a forward changes none, which leaves their keys and values right: a law of such forwards.

    A mask commits above `threshold`, the surest always; a token that is there gives way to another above
    `edit_threshold`. In the twin the law says how many forwards that takes, of whatever thresholds it was fitted at.
    """

    edit_threshold: Annotated[float, Range(0, 1), "probability above which a token gives way to another"] = 0.0
    max_post_edit_steps: Annotated[int, Range(0, 4096), "forwards of a block without a mask, at most"] = 16

    own_threshold: ClassVar[float | None] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.edit_threshold <= 1:
            raise PolicyError(f"edit_threshold is {self.edit_threshold}, expected 0 to 1")
        if not 0 <= self.max_post_edit_steps <= 4096:
            raise PolicyError(f"max_post_edit_steps is {self.max_post_edit_steps}, expected 0 to 4096")

    def most_steps(self, block_length: int) -> int:
        # A forward for each mask, the edits, and the one that changes nothing.
        most = block_length + self.max_post_edit_steps + 1
        return most if self.denoising_steps is None else min(most, self.denoising_steps)

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"final": True}


_CONFIDENT = LowConfidence(threshold=0.95, strict=True)

# SGLang's flag for each of our fields (sglang/srt/server_args.py); `config:` is a key of its algorithm's file.
SERVE = "--trust-remote-code --dllm-algorithm {}"
FLAGS = {
    "gpus": "--tp-size", "max_running_requests": "--max-running-requests", "dllm_fdfo": "--dllm-fdfo/--no-dllm-fdfo",
}  # fmt: skip
CACHING = {**FLAGS, "prefix_caching": "/--disable-radix-cache"}
IN_BLOCKS = {**CACHING, "block_length": "config:block_size", "threshold": "config:threshold"}
EDITS = {name: f"config:{name}" for name in ("edit_threshold", "max_post_edit_steps")}
LOW_CONFIDENCE = SERVE.format("LowConfidence")
# What the tuner tries.
SPACE = {"max_running_requests": [1, 4, 8, 16, 32, 64, 128]}

PRESETS = {
    "sglang-bd32": Preset(
        Policy("sglang-bd32", batching=BlockSynchronous()),
        "block_length",
        "SGLang's sync mode of 2025: the batch changes between blocks, each as slow as its slowest",
        "SGLang's first port, as FOCUS ran it (block-diffusion.md 2.3)",
    ),
    "sglang-fdfo": Preset(
        Policy("sglang-fdfo", batching=Rounds(), unmasking=_CONFIDENT, memory=_PAGES),
        "max_running_requests",
        "SGLang 0.5.23 (LLaDA2, SDAR): rounds of prefill, a block a row, or of decode; done blocks go on at once",
        SOURCE,
        SPACE,
        engine="sglang",
        serve=LOW_CONFIDENCE,
        flags=IN_BLOCKS,
    ),
    "sglang-sync": Preset(
        Policy("sglang-sync", batching=Rounds(dllm_fdfo=False), unmasking=_CONFIDENT, memory=_PAGES),
        "max_running_requests",
        "SGLang 0.5.23 with --no-dllm-fdfo: decode rounds last until all their blocks are done",
        SOURCE,
        SPACE,
        engine="sglang",
        serve=LOW_CONFIDENCE,
        flags=IN_BLOCKS,
    ),
    "sglang-joint": Preset(
        Policy(
            "sglang-joint", batching=Rounds(), unmasking=JointThreshold(threshold=0.5, strategy="law"), memory=_PAGES
        ),
        "max_running_requests",
        "SGLang 0.5.23, JointThreshold (LLaDA2.1): tokens of a block may change until its last forward",
        SOURCE,
        SPACE,
        engine="sglang",
        serve=SERVE.format("JointThreshold"),
        flags={**IN_BLOCKS, **EDITS},
    ),
    "sglang-gemma": Preset(
        Policy(
            "sglang-gemma",
            batching=Rounds(),
            granularity=Canvas(late=False),
            unmasking=BY_LAW,
            memory=TwoPools(page_size=256),
        ),
        "max_running_requests",
        "DiffusionGemma on SGLang 0.5.23: a decoded canvas is prefilled in a round of its own, while all others wait",
        SOURCE,
        {"max_running_requests": [2, 4, 8, 16, 32, 64], "max_prefill_tokens": [4096, 8192, 16384]},
        engine="sglang",
        serve=SERVE.format("Gemma4Renoise"),
        flags={
            **FLAGS,
            "max_prefill_tokens": "--max-prefill-tokens",
            "swa_full_tokens_ratio": "--swa-full-tokens-ratio",
        },
    ),
}
