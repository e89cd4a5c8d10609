"""LMDeploy 0.18's scheduler: prefill or decode, decided one forward ahead (lmdeploy/pytorch/paging, engine)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from ..admission import (
    copy_list,
    count_rows,
    keep_rows,
    let_in,
    mark_next,
    move,
    note_freed,
    place,
    pop,
    prefill_length,
    put,
    queue_row,
    queued,
    release,
    suspend,
    take_next,
)
from ..emission import has_masks
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
from ..part import Answers, Choice, Policy, Preset, Range, Scheduler
from ..prefix import PrefixMemory, caches_prefixes, count_idle, refresh_found
from ..records import F8, I4, I8, Record, columns_of, zeros_of
from ..rows.blocks import plan_pieces
from ..state import (
    DECODE_STEP,
    IGNORED,
    NEXT,
    NOTHING,
    PREFILL_STEP,
    ROWS,
    RUNNING,
    SCRATCH,
    AnyPolicy,
    PolicyState,
    Replica,
    num_arrived,
    running_slots,
    step_slots,
)
from ..unmasking import Unmasking
from .lmdeploy_2025 import FLAGS


class LookAheadColumns(Record):
    updated: F8  # s, end of its last step with an outcome
    turn: I8  # the replica's preemptions before its own last
    rank: I4  # row in that step
    computed: I4  # positions with KV after decided steps
    goal: I4  # positions of its whole prefill
    wanted: I4  # positions of the decided prefill


class LookAheadRecord(Protocol):
    after_chunk: bool  # the last decided step was a chunk, not its prompt's last
    preemptions: int
    short_turns: int  # prefills since the last chunk
    streak: int  # decode steps with requests waiting


LookAheadState = PolicyState[Any, LookAheadColumns, LookAheadRecord]


ORDERS = ("size", "fifo")
BY_SIZE = ORDERS.index("size")

# A prefill's order (_PrefillTurnPolicy): arrival; shortest first, no long prompts; one long, then shortest first.
FIRST_COME, SHORT, LONG, NO_TURN = range(4)
SHORTS, LONGS = 1 << 28, 1 << 30  # first sort keys
TAKEN = -2  # in place of a slot


@dataclass(frozen=True)
class LookAhead(Scheduler):
    """LMDeploy 0.18: prefill or decode, decided one forward ahead; no frozen groups (production-dllm-serving.md 4).

    A prompt longer than a prefill is computed in chunks, one such prompt at a time. After a chunk come decoding rows,
    then up to `opt_ttft_short_turns` prefills of prompts that fit, then the next chunk (InputsMakerAsync). A sequence
    takes pages when its next block does not fit; without free pages it waits with its own, and later computes only its
    block unless another sequence took them (Scheduler).
    """

    max_batch: Annotated[
        int | None, Range(1), "running sequences; none: the device's default, at most a prefill's block rows"
    ] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 8192
    prefill_interval: Annotated[int, Range(1), "decode forwards in a row, with requests waiting, before a prefill"] = 16
    opt_ttft_short_turns: Annotated[
        int | None,
        Range(1),
        "prefills of short prompts between two chunks of a long one; none: a long one takes one step, alone",
    ] = 3
    opt_ttft_policy: Annotated[str, Choice(ORDERS), "which long prompt goes first: fewest chunks, or first come"] = (
        "size"
    )
    opt_ttft_aging_sec: Annotated[float, Range(0), "waiting time that counts as one chunk less (s)"] = 2.0

    hides_host = True
    columns = columns_of(LookAheadColumns)

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        # The engine allows no aging below a millisecond.
        return {
            "prealloc": self._prealloc(policy),
            "aging": max(0.001, float(self.opt_ttft_aging_sec)),
            "shares": caches_prefixes(policy),
        }

    def record(self, policy: Policy) -> Mapping[str, Any]:
        return zeros_of(LookAheadRecord)

    def shares_prefixes(self, policy: Policy) -> bool:
        return True

    def reserved(self, policy: Policy, prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        block = policy.block_length
        return -(-(prompt + output) // block) * block - block + policy.width + self._prealloc(policy)

    def _prealloc(self, policy: Policy) -> int:
        """Tokens beyond the block with pages (DLLMEngineStrategy.get_prealloc_size)."""
        block = policy.block_length
        return min(self.prefill_interval // 2, policy.memory.page_size // block) * block

    def answers(self, policy: Policy) -> Answers:
        answers: dict[Any, Any] = {
            decide: decide_look_ahead,
            prefill_over: take_in,
            step_over: take_in,
            plan_prompts: plan_chunks,
        }
        if caches_prefixes(policy):
            answers |= {idle_pages: count_idle, put_back: refresh_found}
        return answers


@rule
def decide_look_ahead(replica: Replica, policy: AnyPolicy) -> int:
    """Run the step decided ahead, or decide; then decide ahead as if all rows in flight continued."""
    counters = replica.counters
    kind = take_next(replica)
    while True:  # `_look` stands here once, since each call compiles it again
        ahead = kind != NOTHING
        if kind == PREFILL_STEP:  # before the next chunk may be decided
            _note_prompts(replica, policy)
        target = ROWS
        if ahead:
            target = NEXT
        decision = _look(replica, policy, target)
        if ahead:
            counters.next_kind = decision
            keep_rows(replica)
        if ahead or decision == NOTHING:
            return kind
        kind = decision


@rule
def _note_prompts(replica: Replica, policy: LookAheadState) -> None:
    for slot in step_slots(replica):
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        sequence.num_tokens = columns.wanted
        sequence.num_keys = columns.computed
        sequence.left = columns.goal - columns.computed


@rule
def _look(replica: Replica, policy: LookAheadState, target: int) -> int:
    """Choose a step's rows: prompts, a long prompt's chunk, or all decoding rows (_ForwardInputsTask.run)."""
    record, fields = policy.record, policy.fields
    _seat_arrived(replica, policy)
    long = _half_prefilled(replica, policy)
    last = long >= 0 and policy.columns[long].goal - policy.columns[long].computed <= _chunk(replica)
    prefers_prompts = _prefers_prompts(replica, policy, last)
    due = record.short_turns >= fields.opt_ttft_short_turns
    put_off = long >= 0 and not last and record.after_chunk  # decoding rows before the next chunk
    first = then = NO_TURN
    if long >= 0 and not last and not due:
        first = SHORT
    elif long < 0 and prefers_prompts:
        first = FIRST_COME
        if _some_long(replica, policy):
            first, then = SHORT, LONG
            if due:
                first, then = LONG, SHORT
    num = 0
    prefills = False
    for grows in (put_off, not put_off):
        if num > 0:
            break
        if grows:
            num = _grow(replica, policy, target, long)
            continue
        for turn in (first, then):
            if num == 0 and turn != NO_TURN:
                num = _admit(replica, policy, target, turn)
        if num == 0 and long >= 0:
            num = _next_chunk(replica, policy, target, long)
        prefills = num > 0
    count_rows(replica, target, num)
    if num == 0:
        return NOTHING
    slot = replica.lists[target, 0]
    record.after_chunk = prefills and policy.columns[slot].computed < policy.columns[slot].goal
    if not prefills:
        return DECODE_STEP
    record.streak = 0
    return PREFILL_STEP


@rule
def _prefers_prompts(replica: Replica, policy: LookAheadState, last: int) -> bool:
    """Whether to prefill: a prompt's last chunk, or waiting requests (do_prefill_default).

    Requests are admitted after a streak of decode steps, below half a batch, or if they fill a prefill.
    """
    counters, fixed, record = replica.counters, replica.fixed, policy.record
    if last:
        return True
    if counters.num_waiting == 0:
        record.streak = 0
        return False
    if (
        record.streak >= policy.fields.prefill_interval
        or counters.num_running < 0.5 * fixed.max_batch
        or _fill_a_prefill(replica, policy)
    ):
        return True
    record.streak += 1
    return False


@rule
def _fill_a_prefill(replica: Replica, policy: AnyPolicy) -> bool:
    tokens = 0
    for i in range(replica.counters.num_waiting):
        tokens += _length(replica, policy, i)
        if tokens >= replica.fixed.max_prefill:
            return True
    return False


@rule
def _some_long(replica: Replica, policy: AnyPolicy) -> bool:
    for i in range(replica.counters.num_waiting):
        if _is_long(replica, policy, _length(replica, policy, i)):
            return True
    return False


@rule
def _chunk(replica: Replica) -> int:
    """Positions of a chunk, in whole blocks."""
    block = replica.fixed.block
    return max(block, replica.fixed.max_prefill // block * block)


@rule
def _is_long(replica: Replica, policy: LookAheadState, length: int) -> bool:
    """Whether a prompt is computed in chunks."""
    return policy.fields.opt_ttft_short_turns > 0 and length > _chunk(replica)


@rule
def _half_prefilled(replica: Replica, policy: LookAheadState) -> int:
    """The sequence with undecided chunks, or -1."""
    for slot in running_slots(replica):
        if policy.columns[slot].computed < policy.columns[slot].goal:
            return slot
    return -1


# ---- the queue: by arrival; preempted sequences by their last outcome ------------------------------------------------


@rule
def _length(replica: Replica, policy: LookAheadState, index: int) -> int:
    """Positions of the prefill at a place."""
    request, slot = queued(replica, index)
    length = prefill_length(replica, request, slot)
    if slot >= 0:
        length -= int(policy.columns[slot].computed)
    return length


@rule
def _updated(replica: Replica, policy: LookAheadState, index: int) -> float:
    """A place's arrival or last outcome (s)."""
    request, slot = queued(replica, index)
    if slot >= 0:
        return float(policy.columns[slot].updated)
    return float(replica.arrival[request])


@rule
def _preempt(replica: Replica, policy: LookAheadState, slot: int, target: int) -> None:
    """Requeue a sequence with its pages; its outcome in flight is dropped."""
    counters, record, row = replica.counters, policy.record, policy.columns[slot]
    if target == NEXT:
        for other in step_slots(replica):
            if other == slot:
                replica.sequences[slot].lost = True
    suspend(replica, slot)
    preempted(replica, policy, slot)
    row.computed = replica.sequences[slot].start
    row.turn = record.preemptions
    record.preemptions += 1
    index = counters.num_waiting
    while index > 0:
        other = queued(replica, index - 1)[1]
        time = _updated(replica, policy, index - 1)
        later = time > row.updated or (time == row.updated and (other < 0 or policy.columns[other].rank > row.rank))
        if not later:
            break
        move(replica, index - 1, index)
        index -= 1
    put(replica, index, int(replica.sequences[slot].request), slot)
    counters.num_waiting += 1


@rule
def _take(replica: Replica, num: int) -> None:
    """Remove the `num` TAKEN entries; the order stays."""
    counters = replica.counters
    index = counters.num_waiting - 1
    while queued(replica, index)[1] != TAKEN:
        index -= 1
    target = index
    while index >= 0:
        if queued(replica, index)[1] != TAKEN:
            move(replica, index, target)
            target -= 1
        index -= 1
    counters.queue_head += num
    counters.num_waiting -= num


@rule
def _sort(replica: Replica, policy: LookAheadState, turn: int) -> None:
    """Set the queue's sort keys (_PrefillReorderer)."""
    if turn == FIRST_COME:
        return
    first = -1
    for index in range(replica.counters.num_waiting):
        length = _length(replica, policy, index)
        key = SHORTS + length
        if _is_long(replica, policy, length):
            key = LONGS
            if turn == LONG:
                if policy.fields.opt_ttft_policy == BY_SIZE:
                    chunks = min(-(-length // _chunk(replica)), 8191)
                    age = max(0.0, replica.counters.clock - _updated(replica, policy, index))
                    credit = int(min(age // policy.fields.aging, 4096.0 + chunks))
                    key += (chunks - credit + 4096 << 13) + chunks
                if first < 0 or key < _key(replica, first, turn):
                    first = index
        replica.queue[queue_row(replica, index), 2] = key
    if first >= 0:
        replica.queue[queue_row(replica, first), 2] = 0


@rule
def _key(replica: Replica, index: int, turn: int) -> int:
    """A place's sort key; ties go to the first."""
    if turn == FIRST_COME:
        return 0
    return int(replica.queue[queue_row(replica, index), 2])


@rule
def _after(replica: Replica, index: int, turn: int) -> int:
    """The place after `index` by keys (-1: the first); -1 at the end."""
    num = replica.counters.num_waiting
    key = -1
    if index >= 0:
        key = _key(replica, index, turn)
    if turn == FIRST_COME and index + 1 < num:
        return index + 1
    best = -1
    for i in range(num):
        other = _key(replica, i, turn)
        if (other > key or (other == key and i > index)) and (best < 0 or other < _key(replica, best, turn)):
            best = i
    return best


# ---- admission ---------------------------------------------------------------------------------------------------


@rule
def _admit(replica: Replica, policy: LookAheadState, target: int, turn: int) -> int:
    """Admit the next prefill's requests; returns their number (_PrefillScheduler.schedule)."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    num = 0
    tokens = 0
    _sort(replica, policy, turn)
    following = _after(replica, -1, turn)
    while following >= 0 and counters.num_running < fixed.max_batch:
        index = following
        following = _after(replica, index, turn)
        request, slot = queued(replica, index)
        length = prefill_length(replica, request, slot)
        has_pages = slot >= 0 and replica.sequences[slot].pages > 0
        before, cached = 0, 0
        num_known = _num_known(replica, request, slot)
        if has_pages:
            before = int(policy.columns[slot].computed)
        else:
            cached = reusable(replica, policy, request, num_known - 1)[0]
        remaining = length - before - cached
        cost = remaining
        if _is_long(replica, policy, remaining):
            cost = min(remaining, _chunk(replica))
        # A turn of short prompts skips those that do not fit; other turns end there.
        if turn == SHORT and _is_long(replica, policy, remaining):
            put_back(replica, policy, request, cached)
            continue
        if num > 0 and tokens + cost > fixed.max_prefill:
            put_back(replica, policy, request, cached)
            if has_pages and fields.shares:
                _reclaim(replica, policy, slot)  # undo its prefix's match too
            if turn == SHORT and fields.shares:  # a longer one may be mostly cached
                continue
            break
        pages = -(-(before + cached + cost + fields.prealloc * (cost == remaining)) // fixed.page)
        if not _make_room_for(replica, policy, request, slot, pages, cached, turn):
            if has_pages and fields.shares:
                _reclaim(replica, policy, slot)
            fitted = num > 0 and tokens + length - before > fixed.max_prefill
            if turn == SHORT and (fitted or _is_long(replica, policy, length - before)):
                continue  # it fits only with cached pages
            break
        if has_pages:
            counters.pages_held += max(0, pages - int(replica.sequences[slot].pages))
            replica.sequences[slot].pages = max(pages, int(replica.sequences[slot].pages))
        else:
            new = slot < 0
            slot = place(replica, request, slot, length, pages)
            if new:
                placed(replica, policy, slot)
                _pass_over_early_end(replica, slot)
            reuse(replica, policy, slot, cached)
        columns = policy.columns[slot]
        columns.goal = length
        columns.wanted = cost
        columns.computed = before + cached + cost
        hold(replica, policy, slot, min(num_known, int(columns.computed)))
        let_in(replica, slot)
        put(replica, index, request, TAKEN)
        replica.lists[target, num] = slot
        num += 1
        tokens += cost
        if cost < remaining:
            policy.record.short_turns = 0
            break
    if num > 0:
        _take(replica, num)
        if turn == SHORT:
            policy.record.short_turns += 1
    return num


@rule
def _seat_arrived(replica: Replica, policy: LookAheadState) -> None:
    """Let requests whose prompt came over a link decode at once; their first block has the prompt's tail."""
    counters, fixed = replica.counters, replica.fixed
    while counters.num_waiting > 0 and counters.num_running < fixed.max_batch:
        request, slot = queued(replica, 0)
        if slot >= 0 or num_arrived(replica, request) == 0:
            return
        length = prefill_length(replica, request, slot)
        cached = reusable(replica, policy, request, length - fixed.block)[0]
        pages = -(-(length + int(policy.fields.prealloc)) // fixed.page)
        if not _make_room_for(replica, policy, request, slot, pages, cached, FIRST_COME):
            return
        pop(replica)
        slot = place(replica, request, slot, length, pages)
        placed(replica, policy, slot)
        _pass_over_early_end(replica, slot)
        reuse(replica, policy, slot, cached)
        columns = policy.columns[slot]
        columns.goal = cached
        columns.computed = cached
        columns.updated = counters.clock
        columns.rank = 0
        hold(replica, policy, slot, cached)
        let_in(replica, slot)


@rule
def _pass_over_early_end(replica: Replica, slot: int) -> None:
    """Move an EOS in the prompt's last block to the next block, where LMDeploy starts to look for one.

    LMDeploy assumes that the output begins after that block (DLLM sequences' output_start_pos).
    """
    sequence, fixed = replica.sequences[slot], replica.fixed
    first_end = int(sequence.start) + fixed.block
    if (
        fixed.stops != IGNORED
        and sequence.prompt < first_end
        and sequence.prompt % fixed.block > 0
        and sequence.stop <= first_end < sequence.end
    ):
        sequence.stop = first_end + 1


@rule
def _num_known(replica: Replica, request: int, slot: int) -> int:
    """A request's known tokens: prompt, or complete blocks."""
    if slot < 0:
        return max(int(replica.asked.input_length[request]), num_arrived(replica, request) + 1)
    sequence = replica.sequences[slot]
    if has_masks(replica, slot, replica.fixed.block):
        return max(int(sequence.start), int(sequence.prompt))
    return int(sequence.start) + replica.fixed.block


@rule
def _next_chunk(replica: Replica, policy: LookAheadState, target: int, slot: int) -> int:
    """Decide a prompt's next chunk; returns the number of rows, 0 without pages."""
    counters, sequence, columns = replica.counters, replica.sequences[slot], policy.columns[slot]
    tokens = min(_chunk(replica), int(columns.goal) - int(columns.computed))
    last = columns.computed + tokens == columns.goal
    pages = -(-(int(columns.computed) + tokens + policy.fields.prealloc * last) // replica.fixed.page)
    if not _make_room(replica, policy, pages - int(sequence.pages)):
        return 0
    _add_pages(replica, slot, pages)
    columns.computed += tokens
    columns.wanted = tokens
    hold(replica, policy, slot, min(int(columns.computed), _num_known(replica, int(sequence.request), slot)))
    if last:  # it becomes the last decoding row
        index = 0
        while replica.lists[RUNNING, index] != slot:
            index += 1
        for i in range(index, counters.num_running - 1):
            replica.lists[RUNNING, i] = replica.lists[RUNNING, i + 1]
        replica.lists[RUNNING, counters.num_running - 1] = slot
    replica.lists[target, 0] = slot
    policy.record.short_turns = 0
    return 1


@rule
def plan_chunks(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a prefill of whole prompts or a chunk, as decided."""
    plan_pieces(replica, _chunk(replica))


# ---- pages -------------------------------------------------------------------------------------------------------


@rule
def _grow(replica: Replica, policy: LookAheadState, target: int, long: int) -> int:
    """A decode step's rows; a sequence without pages for its next block waits (Scheduler.schedule_running).

    The last admitted asks first. long: a half-prefilled sequence, or -1.
    """
    counters, fixed = replica.counters, replica.fixed
    page, block = fixed.page, fixed.block
    num = counters.num_running
    copy_list(replica, RUNNING, SCRATCH, num)
    for i in range(num - 1, -1, -1):
        slot = replica.lists[SCRATCH, i]
        sequence = replica.sequences[slot]
        end = int(sequence.start) + fixed.width
        if slot == long or end + block <= sequence.pages * page:
            continue
        pages = -(-(end + policy.fields.prealloc) // page)
        if _make_room(replica, policy, pages - int(sequence.pages)):
            _add_pages(replica, slot, pages)
            hold(replica, policy, slot, _num_known(replica, int(sequence.request), slot))
        else:
            _preempt(replica, policy, slot, target)
    num = 0
    for slot in running_slots(replica):
        if slot != long:
            replica.lists[target, num] = slot
            num += 1
    return num


@rule
def _add_pages(replica: Replica, slot: int, pages: int) -> None:
    sequence = replica.sequences[slot]
    extra = max(0, int(pages) - int(sequence.pages))
    replica.counters.pages_held += extra
    sequence.pages += extra


@rule
def _make_room(replica: Replica, policy: LookAheadState, needed: int) -> bool:
    """Whether the pool gets `needed` free pages; preempted sequences lose theirs, the earliest preempted first."""
    counters, fixed = replica.counters, replica.fixed
    if fixed.num_pages - counters.pages_held - idle_pages(replica, policy) >= needed:
        return True
    while True:
        first = -1
        for index in range(counters.num_waiting):
            slot = queued(replica, index)[1]
            if (
                slot >= 0
                and replica.sequences[slot].pages > 0
                and (first < 0 or policy.columns[slot].turn < policy.columns[first].turn)
            ):
                first = slot
        if first >= 0:
            _reclaim(replica, policy, first)
        if fixed.num_pages - counters.pages_held >= needed:
            return True
        _drop_idle(replica, policy, 0)
        if first < 0:
            return False


@rule
def _make_room_for(
    replica: Replica, policy: AnyPolicy, request: int, slot: int, pages: int, cached: int, turn: int
) -> bool:
    """`_make_room` for an admission: other waiting sequences lose pages, the last in order first."""
    counters, fixed = replica.counters, replica.fixed
    needed = pages - cached // fixed.page
    if slot >= 0:
        needed -= int(replica.sequences[slot].pages)
    if fixed.num_pages - counters.pages_held - idle_pages(replica, policy) >= needed:
        return True
    while True:
        last = -1
        for index in range(counters.num_waiting):
            other = queued(replica, index)[1]
            if other < 0 or other == slot or replica.sequences[other].pages == 0:
                continue
            if last < 0 or _key(replica, index, turn) >= _key(replica, last, turn):
                last = index
        if last >= 0:
            _reclaim(replica, policy, queued(replica, last)[1])
        # Idle pages that the request would reuse are not free.
        touched = cached // fixed.page - reusable(replica, policy, request, cached)[1]
        if fixed.num_pages - counters.pages_held - touched >= needed:
            return True
        put_back(replica, policy, request, cached)
        _drop_idle(replica, policy, touched)
        if last < 0:
            return False


@rule
def _drop_idle(replica: Replica, policy: AnyPolicy, spared: int) -> None:
    """Evict all idle pages but the newest `spared`: LMDeploy's search for room does so even in vain."""
    counters = replica.counters
    pages_held = counters.pages_held
    counters.pages_held = replica.fixed.num_pages - spared
    hold(replica, policy, 0, 0)  # evicts
    counters.pages_held = pages_held


@rule
def _reclaim(replica: Replica, policy: LookAheadState, slot: int) -> None:
    """Free a waiting sequence's pages; its tokens are recomputed later."""
    give_back(replica, policy, slot)
    policy.columns[slot].computed = 0
    note_freed(replica, slot)


# ---- the end of a step -------------------------------------------------------------------------------------------


@rule
def take_in(replica: Replica, policy: LookAheadState) -> None:
    """Free finished rows' pages, and slots that the next step does not compute."""
    counters = replica.counters
    mark_next(replica, True)
    num = 0
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if sequence.finished:
            give_back(replica, policy, slot)
            if not sequence.in_flight:
                replica.lists[SCRATCH, num] = slot
                num += 1
        elif not sequence.lost:
            columns.updated = counters.now + counters.latency
            columns.rank = i
        elif sequence.pages == 0:
            note_freed(replica, slot)
        sequence.lost = False
    mark_next(replica, False)
    release(replica, policy, SCRATCH, num)


@dataclass(frozen=True)
class LowConfidence(Unmasking):
    """LMDeploy's low_confidence_dynamic: masks that reach the threshold commit."""

    own_threshold: ClassVar[float | None] = 0.85


PRESETS = {
    "lmdeploy-0.18": Preset(
        policy=Policy(
            "lmdeploy-0.18", batching=LookAhead(), unmasking=LowConfidence(threshold=0.85), memory=PrefixMemory()
        ),
        main="block_length",
        summary="LMDeploy 0.18: prefill or decode, decided a forward ahead by streak, waiting tokens or half a batch",
        citation="LMDeploy 0.18.0 (production-dllm-serving.md 4)",
        space={"max_batch": ["none", 16, 32, 64, 128], "max_prefill_tokens": [4096, 8192, 16384]},
        engine="lmdeploy",
        serve="--backend pytorch",
        flags={**FLAGS, "prefix_caching": "--enable-prefix-caching"},
    )
}
