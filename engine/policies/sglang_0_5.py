"""SGLang 0.5.23's scheduler for diffusion models: rounds of prefill or decode, one block a row and round.

production-dllm-serving.md 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from ..admission import canvas, copy_list, head, let_in, place, pop, push_front, unseat
from ..errors import PolicyError
from ..hooks import (
    block_entered,
    commit_rows,
    decide,
    hold,
    holds_back,
    learn,
    placed,
    plan_prompts,
    plan_rows,
    reusable,
    reuse,
    settle,
    steady,
    step_over,
)
from ..jit import rule
from ..part import Answers, PagedMemory, Policy, Preset, Range, Scheduler
from ..prefix import PrefixMemory
from ..records import I4, U1, Record, columns_of, zeros_of
from ..rows.blocks import commit_block
from ..rows.features import add_row, no_rows, note_row, set_features
from ..rows.kind import Kind
from ..state import (
    CACHED,
    DECODE_STEP,
    DENOISE,
    FLUSH,
    GROUP,
    IDLE,
    MASKED,
    NO,
    NOTHING,
    PREFILL,
    PREFILL_STEP,
    ROWS,
    RUNNING,
    UNTIL_A_REQUEST,
    WHATEVER,
    AnyPolicy,
    Fixed,
    PolicyState,
    Replica,
    running_slots,
    step_slots,
)
from ..unmasking import Unmasking
from ..window_pages import have_room, in_sight, most_in_sight, shared
from .canvas import BY_LAW, Canvas
from .lmdeploy_2025 import UNBOUNDED, end_group


class RoundColumns(Record):
    computed: I4  # prompt tokens with KV after this step
    goal: I4  # prompt tokens to prefill
    wanted: I4  # positions of the coming step
    entry: U1  # NEW, PASSED_OVER or ENTERED


class RoundRecord(Protocol):
    """Mostly of the round being chosen."""

    as_before: bool  # its rows had all entered and took no page
    budget: int  # tokens left to compute
    goes_on: bool  # the step in flight continues the last step's round
    promised: int  # tokens promised to its rows
    prompts: int  # prompt tokens left to compute
    room: int  # free tokens of the pool
    taken: int  # tokens taken at once
    to_the_last: bool
    window_held: int  # pages of layers with a window
    window_room: int  # free tokens of their pool beyond all promises


RoundState = PolicyState[Any, RoundColumns, RoundRecord]


SOURCE = "SGLang 0.5.23 (production-dllm-serving.md 3)"
CLIP_MAX_NEW_TOKENS = 4096  # most answer tokens that room is promised for

# A running request: not yet considered by a round, passed over by one, or in.
NEW, PASSED_OVER, ENTERED = range(3)

_PAGES = PrefixMemory(page_size=32)  # a block a page, as with its radix cache


@dataclass(frozen=True)
class TwoPools(PagedMemory):
    """Two fixed pools: for layers with a window, and for others (HybridSWAPoolConfigurator)."""

    swa_full_tokens_ratio: Annotated[
        float, Range(0, 1, above=True), "tokens in the pool of layers with a window, per token in that of the others"
    ] = 0.8

    def pools(self, num_pages: int, window_bytes: int, kv_bytes: int) -> tuple[int, int]:
        ratio, page = self.swa_full_tokens_ratio, self.page_size
        full = int(num_pages * kv_bytes / (kv_bytes + ratio * window_bytes))
        window = -(-(int(full * page * ratio) // page * window_bytes) // kv_bytes)
        if window == 0:
            return 0, 0
        return full + window, window


@dataclass(frozen=True)
class Rounds(Scheduler):
    """SGLang 0.5.23: rounds of prefill while any prompt is left, else of decode, a block a row (3.2).

    A prompt's whole blocks are prefilled one a round; its tail begins the first decode block. A canvas model prefills
    its prompt in one forward, and each decoded canvas again; its layers with a window have their own pool.
    """

    max_running_requests: Annotated[int, Range(1), "running requests (the engine's default is 1)"] = 64
    dllm_fdfo: Annotated[bool, "rows go on when their block is done; false: rounds last until all blocks are done"] = (
        True
    )
    max_prefill_tokens: Annotated[int, Range(1), "tokens of a prefill; a canvas model's prompt is cut there"] = 16384
    ignore_eos: Annotated[bool, "canvas models: requests set ignore_eos, as in benchmarks; prompts alone need room"] = (
        False
    )

    pieces = True
    frees_windows = True
    columns = columns_of(RoundColumns)

    @property
    def max_batch(self) -> int | None:  # type: ignore[override]
        return self.max_running_requests

    def check(self, policy: Policy) -> None:
        if policy.commits_by == "acceptance" or policy.eviction.evicts or not policy.granularity.whole_block:
            raise PolicyError(f"{policy.name}: SGLang's rounds decode whole blocks, expected no chunk and no eviction")
        if self.ignore_eos and policy.granularity.on_a_grid:
            raise PolicyError(f"{policy.name}: ignore_eos is true, expected false but for canvas models")
        if not policy.granularity.on_a_grid and self.max_prefill_tokens < policy.block_length:
            raise PolicyError(
                f"{policy.name}: max_prefill_tokens is {self.max_prefill_tokens} and canvas_length "
                f"{policy.block_length}: expected at least a canvas, which is denoised whole"
            )

    def reserved(self, policy: Policy, prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        # A request for no tokens decodes a block, too.
        return super().reserved(policy, prompt, output + (prompt + output == 0))

    def at_once(self, policy: Policy, prompt: int, output: int) -> int:
        return max(prompt, policy.block_length)

    def most_reused(self, policy: Policy, prompt: int) -> int:
        return prompt // policy.block_length * policy.block_length

    def shares_prefixes(self, policy: Policy) -> bool:
        return policy.granularity.on_a_grid  # SGLang serves DiffusionGemma without its radix cache

    def refuses_quantised(self, family: str) -> str:
        # gemma4_renoise.py:95
        reason = "SGLang 0.5.23 refuses a quantised DiffusionGemma: expected bf16 weights, or vllm-diffusion"
        return reason * (family == "canvas")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        grid = policy.granularity.on_a_grid
        late = grid and policy.unmasking.strategy != "law"
        return {"grid": grid, "late": late}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        return zeros_of(RoundRecord)

    def answers(self, policy: Policy) -> Answers:
        answers: dict[Any, Any] = {
            decide: decide_round,
            placed: enter_round,
            step_over: step_of_round,
            block_entered: stay,
            holds_back: round_is_open,
        }
        if policy.leaps and self.dllm_fdfo:
            answers[steady] = steady_rounds
        return answers


@rule
def enter_round(replica: Replica, policy: RoundState, slot: int) -> None:
    """A new request: prefill its whole blocks, or a canvas model's whole prompt."""
    sequence, columns, block = replica.sequences[slot], policy.columns[slot], replica.fixed.block
    columns.computed = 0
    columns.goal = _goal(policy, int(sequence.prompt), block)
    columns.entry = NEW


@rule
def _goal(policy: RoundState, prompt: int, block: int) -> int:
    """Prompt tokens to prefill: whole blocks, or a canvas model's whole prompt."""
    if policy.fields.grid:
        return prompt // block * block
    return prompt


@rule
def stay(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    """Nothing changes: a canvas's keys come with its own prefill."""


@rule
def decide_round(replica: Replica, policy: RoundState) -> int:
    """Continue the round, or begin one: of prefilling rows if any, else of all (_process_dllm_batches)."""
    counters, record = replica.counters, policy.record
    record.goes_on = counters.num_group >= 0
    record.as_before = True
    if counters.num_group >= 0:
        copy_list(replica, GROUP, ROWS, counters.num_group)
        counters.num_rows = counters.num_group
        return DECODE_STEP
    decodes = 0
    some_prefill = False
    counters.num_rows = 0
    tries = 0
    while counters.num_rows == 0 and tries < 3:
        if counters.num_preempted == 0 or counters.num_running == 0:  # one preempted now must wait a round
            _take_on(replica, policy)
        _settle_pages(replica, policy)
        some_prefill = False
        for slot in running_slots(replica):
            if _prefills(replica, policy, slot):
                some_prefill = True
        # SGLang would wait forever: let the last row take the spare page, and decode.
        record.to_the_last = tries == 2
        some_prefill = some_prefill and not record.to_the_last
        decodes = _choose(replica, policy, some_prefill)
        # A round after an empty one follows at once, with the requests passed over.
        if counters.num_rows == 0 and (tries != 1 or not _preempt_last(replica, policy)):
            tries += 1
    num = counters.num_rows
    if num == 0:
        return NOTHING
    if decodes == 0:
        return PREFILL_STEP
    copy_list(replica, ROWS, GROUP, num)
    counters.num_group = num
    return DECODE_STEP


@rule
def _take_on(replica: Replica, policy: RoundState) -> None:
    """Let waiting requests run, up to the limit; they get pages when a round admits them."""
    counters, fixed = replica.counters, replica.fixed
    block = fixed.block
    while counters.num_waiting > 0 and counters.num_running < fixed.max_batch:
        request, slot = head(replica)
        if slot >= 0 and not _has_room_to_the_end(replica, policy, request, slot):
            return
        prompt = int(replica.asked.input_length[request])
        pop(replica)
        if slot < 0:
            slot = place(replica, request, slot, _goal(policy, prompt, block) + block, 0)
            placed(replica, policy, slot)
        let_in(replica, slot)


@rule
def _has_room_to_the_end(replica: Replica, policy: RoundState, request: int, slot: int) -> bool:
    """Whether the pool has room for all that a preempted request and the running ones may need.

    Only then is it readmitted; SGLang would have ended with an error.
    """
    counters, fixed = replica.counters, replica.fixed
    block = fixed.block
    pages = counters.pages_held
    window_pages = 0
    for other in running_slots(replica):
        sequence, columns, end = replica.sequences[other], policy.columns[other], _canvas_end(replica, policy, other)
        pages += -(-end // fixed.page) - sequence.pages - sequence.window_pages
        piece = min(int(columns.goal) - int(columns.computed), _largest_piece(fixed, int(sequence.prompt)))
        window_pages += max(int(sequence.window_pages), most_in_sight(fixed, end, max(block, piece)))
    prompt = int(replica.asked.input_length[request])
    start = _goal(policy, prompt, block)
    end = start + canvas(max(1, prompt + int(replica.asked.max_tokens[request])) - start, block)
    piece = min(max(start, int(replica.sequences[slot].start)), _largest_piece(fixed, prompt))
    if not policy.fields.grid and counters.num_running > 0:  # a round counts a row's pages among those it asks for
        pages += (counters.num_running + 1) * (-(-block // fixed.page) + 1)
    return have_room(fixed, pages + -(-end // fixed.page), window_pages + most_in_sight(fixed, end, max(block, piece)))


@rule
def _largest_piece(fixed: Fixed, prompt: int) -> int:
    """Most tokens of a sequence per prefill, so that a window's pool has room."""
    if fixed.keeps == 0:
        return UNBOUNDED
    return max(int(prompt), fixed.block)


@rule
def _settle_pages(replica: Replica, policy: RoundState) -> None:
    """Share the last round's pages; a decoded canvas frees its pages until encoded."""
    counters, fixed = replica.counters, replica.fixed
    for slot in running_slots(replica):
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if columns.entry != ENTERED:
            continue
        tokens = int(sequence.start)
        if columns.computed < columns.goal:
            tokens = int(columns.computed)
        hold(replica, policy, slot, tokens)
        context = -(-(int(sequence.start) + _num_encoded(replica, slot)) // fixed.page)
        if _is_decoded(replica, policy, slot) and sequence.pages > context:
            window_pages = int(sequence.window_pages)
            if window_pages > 0:
                window_pages = shared(
                    fixed, max(0, window_pages * fixed.kv_bytes // fixed.window_bytes - int(sequence.pages) + context)
                )
            counters.pages_held -= sequence.pages - context + sequence.window_pages - window_pages
            sequence.pages = context
            sequence.window_pages = window_pages


@rule
def _choose(replica: Replica, policy: RoundState, some_prefill: bool) -> int:
    """Choose a round's rows, those of earlier rounds first; returns how many decode (PrefillAdder)."""
    counters, fixed, record = replica.counters, replica.fixed, policy.record
    record.window_held = 0
    for slot in running_slots(replica):
        record.window_held += replica.sequences[slot].window_pages
    record.room = (fixed.num_pages - counters.pages_held) * fixed.page
    record.window_room = UNBOUNDED
    if fixed.window_pool > 0:
        record.room = (fixed.num_pages - fixed.window_pool - counters.pages_held + record.window_held) * fixed.page
        record.window_room = (
            (fixed.window_pool - record.window_held) * fixed.kv_bytes // fixed.window_bytes * fixed.page
        )
    record.promised = 0
    record.taken = 0
    record.prompts = fixed.max_prefill
    record.budget = fixed.max_prefill
    if policy.fields.grid:
        record.budget = fixed.max_batch * fixed.block
    counters.num_rows = 0
    decodes = 0
    is_open = True
    for turn in range(2):
        for slot in running_slots(replica):
            columns = policy.columns[slot]
            prefills = _prefills(replica, policy, slot)
            if not is_open or (columns.entry == NEW) != (turn == 1) or (some_prefill and not prefills):
                continue
            before = counters.num_rows
            if turn == 0:
                is_open = _go_on(replica, policy, slot, prefills)
            else:
                is_open = _enter(replica, policy, slot)
            if counters.num_rows > before and not _prefills(replica, policy, slot):
                decodes += 1
    return decodes


@rule
def _go_on(replica: Replica, policy: RoundState, slot: int, prefills: bool) -> bool:
    """Add a row of an earlier round; returns whether others may follow (add_dllm_staging_req)."""
    fixed, fields, sequence, columns = replica.fixed, policy.fields, replica.sequences[slot], policy.columns[slot]
    block = fixed.block
    allowance = _allowance(replica, policy, prefills)
    if allowance <= 0:
        return False
    remaining = block
    if _is_decoded(replica, policy, slot):
        remaining -= _num_encoded(replica, slot)
    elif columns.computed < columns.goal:
        remaining = int(columns.goal) - int(columns.computed)
    tokens = remaining
    cut = False
    if not fields.grid:
        if remaining > allowance and not prefills:
            return False
        tokens = min(remaining, allowance)
        if prefills:
            tokens = min(tokens, _largest_piece(fixed, int(sequence.prompt)))
        cut = tokens < remaining
    elif prefills:
        tokens = block
        cut = True
    else:
        begun = _is_begun(replica, slot)
        cut = not begun and sequence.prompt > sequence.start  # the prompt's tail counts on top of a block
        if begun and block > allowance:
            return False
    cached = 0
    if columns.entry == PASSED_OVER:
        cached = min(int(columns.computed), reusable(replica, policy, int(sequence.request), int(columns.computed))[0])
    if not _seat(replica, policy, slot, tokens, cached):
        return True
    limit = 0
    if not cut:
        limit = min(int(sequence.end) - int(sequence.prompt), CLIP_MAX_NEW_TOKENS)
    _charge(replica, policy, tokens, limit)
    return bool(_allowance(replica, policy, prefills) > 0)


@rule
def _allowance(replica: Replica, policy: RoundState, prefills: bool) -> int:
    """Most tokens for an earlier round's row (_get_dllm_remain_tokens)."""
    fixed, fields, record = replica.fixed, policy.fields, policy.record
    if record.to_the_last:  # room counts whole pages; a row may have part of one
        return int(record.budget)
    tokens = min(int(record.budget), int(record.room) - int(record.promised))
    if fields.grid or not prefills:
        tokens = min(tokens, fixed.block)
    if tokens <= 0:
        tokens = int(record.budget)
    if not fields.grid:
        tokens = min(tokens, int(record.room) - int(record.taken) - fixed.page, int(record.window_room) - fixed.page)
    return tokens


@rule
def _is_begun(replica: Replica, slot: int) -> bool:
    """Whether a forward has computed masks of a sequence's block."""
    for k in range(replica.fixed.block):
        if replica.evaluations[slot, k] > 0:
            return True
    return False


@rule
def _enter(replica: Replica, policy: RoundState, slot: int) -> bool:
    """Admit a request if the pool has room for all it needs; True if others may follow (add_one_req).

    With `ignore_eos` room for the prompt is enough, and a round's last prompt may be cut (add_one_req_ignore_eos). A
    skipped request joins the next round unchecked, as in SGLang.
    """
    fixed, fields, record = replica.fixed, policy.fields, policy.record
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    block, page, goal = fixed.block, fixed.page, int(columns.goal)
    length = max(int(sequence.prompt), goal)
    cached, shared_pages = reusable(replica, policy, int(sequence.request), goal)
    touched = (cached // page - shared_pages) * page  # idle pages that it would take are no room
    limit = min(int(sequence.end) - int(sequence.prompt) - int(sequence.emitted), CLIP_MAX_NEW_TOKENS)
    needed = length - cached
    if fields.grid:
        needed += block
    columns.entry = PASSED_OVER
    columns.computed = cached
    padded = -(-needed // page) * page
    if fields.ignore_eos:
        room = record.room - max(int(record.promised), int(record.taken))
        if padded + page > room or _in_window(fixed, needed, limit) > record.window_room:
            return False
    else:
        if (
            needed + limit + page >= record.room - touched - record.promised
            or _in_window(fixed, padded, limit) >= record.window_room
        ):
            return False
        if not fields.grid and replica.counters.num_rows > 0 and padded >= record.prompts:
            return False
    tokens = min(int(record.budget), goal, _largest_piece(fixed, int(sequence.prompt)))
    if fields.grid or cached == goal:
        tokens = block
    if not _seat(replica, policy, slot, tokens, cached):
        return False
    record.room -= touched
    _charge(replica, policy, tokens, 0)
    remaining = min(int(record.room) - max(int(record.promised), int(record.taken)), int(record.window_room))
    return bool(remaining > 0 and record.prompts > 0 and record.budget > 0)


@rule
def _charge(replica: Replica, policy: RoundState, tokens: int, limit: int) -> None:
    """Charge a row's tokens, and those it may ask for later, to the round (_update_prefill_budget)."""
    record, page = policy.record, replica.fixed.page
    tokens = -(-tokens // page) * page
    record.window_room -= _in_window(replica.fixed, tokens, limit)
    record.promised += tokens + page + limit
    record.taken += tokens + page
    record.prompts -= tokens
    record.budget -= tokens


@rule
def _in_window(fixed: Fixed, tokens: int, limit: int) -> int:
    """Tokens promised to a row in a window's own pool (estimate_swa_kv_tokens)."""
    if fixed.window_pool == 0:
        return 0
    before = fixed.keeps - 1
    return max(0, tokens - before) + min(tokens + limit, before) + fixed.page


@rule
def _seat(replica: Replica, policy: RoundState, slot: int, tokens: int, cached: int) -> bool:
    """Give a row pages and a place in the round; False without pages, where SGLang ends with an error."""
    counters, fixed, record = replica.counters, replica.fixed, policy.record
    sequence, columns = replica.sequences[slot], policy.columns[slot]
    new = columns.entry != ENTERED
    computed = int(columns.computed)
    if new:
        computed = cached
    prefills = computed < columns.goal
    before = int(sequence.start)
    end = min(before + tokens, _canvas_end(replica, policy, slot))
    if prefills:
        before = computed
        end = before + tokens
    elif _is_decoded(replica, policy, slot):
        before += _num_encoded(replica, slot)
        end = before + tokens
    pages = max(int(sequence.pages), -(-int(end) // fixed.page))
    window_pages = in_sight(fixed, before, end)
    extra = pages - sequence.pages
    if new and cached > 0:
        extra -= reusable(replica, policy, int(sequence.request), cached)[1]
    in_windows = record.window_held + window_pages - sequence.window_pages
    if not have_room(fixed, counters.pages_held - record.window_held + extra, in_windows):
        return False
    if new or pages != sequence.pages or window_pages != sequence.window_pages:
        record.as_before = False
    counters.pages_held += pages - sequence.pages + in_windows - record.window_held
    record.window_held = in_windows
    sequence.pages = pages
    sequence.window_pages = window_pages
    if new:
        reuse(replica, policy, slot, cached)
        columns.computed = cached
        columns.entry = ENTERED
    hold(replica, policy, slot, 0)
    columns.wanted = tokens
    replica.lists[ROWS, counters.num_rows] = slot
    counters.num_rows += 1
    return True


@rule
def _preempt_last(replica: Replica, policy: RoundState) -> bool:
    """Preempt the last of several admitted rows; False if fewer. SGLang would have ended."""
    counters = replica.counters
    entered = 0
    for slot in running_slots(replica):
        entered += policy.columns[slot].entry == ENTERED
    if entered < 2:
        return False
    for i in range(counters.num_running - 1, -1, -1):
        slot = replica.lists[RUNNING, i]
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if columns.entry == ENTERED:
            unseat(replica, policy, slot)
            push_front(replica, int(sequence.request), slot)
            columns.computed = 0
            columns.goal = max(int(sequence.start), int(columns.goal))
            columns.entry = NEW
            return True
    return False


@rule
def _canvas_end(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    sequence = replica.sequences[slot]
    return int(sequence.start) + canvas(max(1, int(sequence.end)) - int(sequence.start), replica.fixed.block)


@rule
def _prefills(replica: Replica, policy: RoundState, slot: int) -> bool:
    """Whether a sequence prefills: its prompt, or a decoded canvas."""
    columns = policy.columns[slot]
    if columns.entry == NEW:  # even if partly cached
        return columns.goal > 0 or not policy.fields.grid
    return columns.computed < columns.goal or _is_decoded(replica, policy, slot)


@rule
def _is_decoded(replica: Replica, policy: RoundState, slot: int) -> bool:
    """Whether its canvas is decoded but not encoded."""
    last = replica.fixed.block - 1
    return not policy.fields.grid and replica.status[slot, last] != MASKED and replica.status[slot, last] != CACHED


@rule
def _num_encoded(replica: Replica, slot: int) -> int:
    """Encoded tokens of a decoded canvas: a full pool may cut that pass."""
    num = 0
    for k in range(replica.fixed.block):
        num += replica.status[slot, k] == CACHED
    return num


@rule
def plan_round(replica: Replica, policy: RoundState) -> None:
    """Plan the chosen rows: prefills of prompts and canvases, decodes of blocks."""
    counters, fields, block, goes_on = replica.counters, policy.fields, replica.fixed.block, policy.record.goes_on
    decoded = 0
    encoded = 0
    sums = no_rows()
    for slot in step_slots(replica):
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        n, before = int(columns.wanted), int(sequence.start)
        sequence.left = 0
        first = 0  # first computed position of the block
        computed = True
        pairs = 0  # query-key pairs among its own positions
        sampled = 0
        # Rows done within the round are computed without effect until it ends.
        prefilled = goes_on and (sequence.phase == PREFILL or sequence.phase == IDLE)
        if sequence.finished or prefilled or (goes_on and _is_decoded(replica, policy, slot)):
            n = block
            if prefilled and not sequence.finished and not _is_decoded(replica, policy, slot):
                n = int(columns.wanted)
                before = int(columns.computed) - n
            phase = IDLE
            computed = False
            pairs = n * n
            sampled = n
        elif columns.computed < columns.goal:
            before = int(columns.computed)
            phase = PREFILL
            computed = False
            columns.computed += n
            sequence.left = columns.goal - columns.computed
            pairs = n * (n + 1) // 2
            if fields.grid:
                pairs = n * (n + block) // 2
        elif _is_decoded(replica, policy, slot):  # a canvas's causal pass
            phase = FLUSH
            first = _num_encoded(replica, slot)
            before += first
            pairs = n * (n + 1) // 2
            if counters.num_group < 0:  # a decode round counts it as decode
                encoded += n
        else:
            n = block
            phase = FLUSH
            for k in range(block):
                if replica.status[slot, k] == MASKED:
                    phase = DENOISE
            pairs = n * n
            sampled = n
        for k in range(block):
            replica.window[slot, k] = computed and first <= k and k < first + n
        note_row(sequence, phase, n, before + n)
        heads = sampled
        if fields.grid:  # a masked model's prefill runs decode's graph, with its LM head
            heads = n
        sums = add_row(sums, sequence, n * before + pairs, heads, sampled)
        decoded += sampled
    chunk = 0
    if decoded > 0:
        chunk = block
    set_features(replica, sums, chunk)
    counters.prefill_tokens += encoded
    counters.continues = goes_on


ROUND = Kind(
    "blocks in rounds",
    {plan_prompts: plan_round, plan_rows: plan_round, commit_rows: commit_block},
    asks=(learn, settle, holds_back, block_entered),
)
Rounds.rows = ROUND


@rule
def round_is_open(replica: Replica, policy: RoundState) -> bool:
    """Whether a sync round continues: until all blocks are done.

    By law a block is done when it commits, else after one more forward.
    """
    if policy.fields.dllm_fdfo:
        return False
    for slot in step_slots(replica):
        if replica.sequences[slot].phase == DENOISE and (policy.fields.late or not replica.committed[slot].any()):
            return True
    return False


@rule
def steady_rounds(replica: Replica, policy: RoundState) -> int:
    """A round in which all running sequences denoise is chosen again."""
    counters = replica.counters
    if counters.num_preempted > 0 or not policy.record.as_before:
        return NO
    if counters.num_running == replica.fixed.max_batch:
        return WHATEVER
    if counters.num_waiting == 0:
        return UNTIL_A_REQUEST
    return NO


@rule
def step_of_round(replica: Replica, policy: RoundState) -> None:
    """End the round; a sync round when its blocks are done."""
    policy.record.goes_on = holds_back(replica, policy)
    if policy.record.goes_on:
        return
    for slot in step_slots(replica):  # an answer's last block is stored, too
        if replica.sequences[slot].finished:
            hold(replica, policy, slot, int(replica.sequences[slot].stop))
    end_group(replica, policy)


@dataclass(frozen=True)
class LowConfidence(Unmasking):
    """SGLang's LowConfidence: masks above the threshold commit."""

    own_threshold: ClassVar[float | None] = 0.95


@dataclass(frozen=True)
class JointThreshold(Unmasking):
    """A block's tokens may change until a forward changes none; then its KV is final.

    Masks above `threshold` commit, at least the most confident; a token gives way to another above `edit_threshold`.
    The twin takes the number of forwards from a law, at its fitted thresholds.
    """

    edit_threshold: Annotated[float, Range(0, 1), "probability above which a token gives way to another"] = 0.0
    max_post_edit_steps: Annotated[int, Range(0, 4096), "most forwards of a block without masks"] = 16

    own_threshold: ClassVar[float | None] = 0.5
    last_steps: ClassVar[int] = 1  # one that changes nothing

    def most_steps(self, block_length: int) -> int:
        # One forward per mask, the edits, and the last ones.
        steps = block_length + self.max_post_edit_steps + self.last_steps
        return min(steps, self.denoising_steps or steps)

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"final": True}


@dataclass(frozen=True)
class JointThresholdInDel(JointThreshold):
    """JointThreshold with deletions and insertions, which shift tokens within the block (LLaDA2.2).

    The block keeps its length and is computed whole: edits cost forwards, not positions. A clean-up that changes
    something needs one forward more, for the KV; it is among the law's forwards.
    """

    last_steps: ClassVar[int] = 2  # a clean-up, and one that stores its tokens


_CONFIDENT = LowConfidence(threshold=0.95, strict=True)

# SGLang's flags of fields (sglang/srt/server_args.py); `config:` is a key of its algorithm's file.
SERVE = "--trust-remote-code --dllm-algorithm {}"
FLAGS = {
    "gpus": "--tp-size",
    "max_running_requests": "--max-running-requests",
    "dllm_fdfo": "--dllm-fdfo/--no-dllm-fdfo",
}
CACHING = {**FLAGS, "prefix_caching": "/--disable-radix-cache"}
IN_BLOCKS = {**CACHING, "block_length": "config:block_size", "threshold": "config:threshold"}
EDITS = {name: f"config:{name}" for name in ("edit_threshold", "max_post_edit_steps")}
LOW_CONFIDENCE = SERVE.format("LowConfidence")
SPACE = {"max_running_requests": [1, 4, 8, 16, 32, 64, 128]}

PRESETS = {
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
    "sglang-indel": Preset(
        Policy(
            "sglang-indel",
            batching=Rounds(),
            unmasking=JointThresholdInDel(threshold=0.5, strategy="law"),
            memory=_PAGES,
        ),
        "max_running_requests",
        "SGLang 0.5.23, JointThresholdInDel (LLaDA2.2): as sglang-joint, and tokens may be deleted and inserted",
        SOURCE,
        SPACE,
        engine="sglang",
        serve=SERVE.format("JointThresholdInDel"),
        flags={**IN_BLOCKS, **EDITS},
    ),
    "sglang-gemma": Preset(
        Policy(
            "sglang-gemma", batching=Rounds(), granularity=Canvas(), unmasking=BY_LAW, memory=TwoPools(page_size=256)
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
