"""vLLM's v1 scheduler: each step has a token budget; running requests draw on it first.

There are no phases: a request computes known tokens not yet computed. Prompt chunks and others' next tokens share a
forward (production-dllm-serving.md 2.3; vllm/v1/core/sched/scheduler.py of 0.32.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np

from ..admission import (
    count_rows,
    is_held,
    keep_rows,
    leave,
    let_in,
    place,
    pop_at,
    push_front,
    queued,
    take_next,
    unseat,
)
from ..errors import PolicyError
from ..hooks import (
    begin_row,
    decide,
    hold,
    leap,
    next_tokens,
    paged_ahead,
    placed,
    preempted,
    prefill_over,
    reusable,
    reuse,
    steady,
    step_over,
    verified,
)
from ..jit import rule
from ..latency import seconds
from ..part import QUESTIONS, UNLIMITED, Answers, Choice, OnDevice, Policy, Preset, Range, Scheduler
from ..prefix import PrefixMemory
from ..records import I8, Record, columns_of
from ..rows.chunked import CHUNKED, ChunkColumns, draft_tokens, num_sampled, prefills
from ..rows.leap import leap_chunked
from ..state import (
    ASK_AGAIN,
    DECODE_STEP,
    IDLE,
    NEXT,
    NO,
    NOTHING,
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
from ..window_pages import in_sight, most_in_sight
from .ar import Autoregressive
from .canvas import BY_LAW, Canvas


class Allowance(Record):
    """What a discipline allows a decision."""

    most_admitted: I8  # requests
    most_prompt_tokens: I8  # besides those that running requests with whole prompts may want


BudgetState = PolicyState[Any, ChunkColumns, Allowance]


DRAFTERS = ("none", "ngram", "eagle", "draft_model", "dflash", "dspark")
BLOCK_DRAFTERS = ("dflash", "dspark")  # a forward of their own drafts a block
# Drafts of published checkpoints: blocks of 16 with their anchor (z-lab's DFlash), and of 7 (DSpark).
USUAL_DRAFTS = {"none": 0, "ngram": 3, "eagle": 3, "draft_model": 3, "dflash": 15, "dspark": 7}
SOURCE = "vLLM 0.32.0 and 0.33.0 (production-dllm-serving.md 2.3)"
MOST_DRAFTS = 63  # with the next token a row of 64
CURVE_CONTEXT = 8192  # tokens behind the steps that vLLM times at its start
LARGE, LARGEST = 70 * 2**30, 160 * 2**30  # bytes
USUAL_TOKENS = 8192  # of a step, on a large GPU
SMALL = "8.0", "12.1"  # compute capabilities that count as small: A100 and GB10


def _is_large(device: OnDevice) -> bool:
    """The tier of more sequences and tokens (vllm/engine/arg_utils.py:2940 of 0.33.0)."""
    return device.memory_bytes >= LARGE and device.compute_capability not in SMALL


@dataclass(frozen=True)
class TokenBudget(Scheduler):
    max_num_seqs: Annotated[
        int | None, Range(1), "running sequences; none: 1024 on GPUs of at least 70 GiB except A100 and GB10, else 256"
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Range(1),
        "tokens per step, prompts included; none: 16384 on GPUs of at least 160 GiB, 8192 of 70 GiB except A100 and "
        "GB10, else 2048",
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Range(0), "most tokens of a prompt per step when there are other requests; 0: the budget"
    ] = 0
    enable_chunked_prefill: Annotated[bool, "compute prompts that exceed the budget in chunks"] = True
    async_scheduling: Annotated[bool, "decide a step when the previous one begins, before its outcome is known"] = True

    pieces = True
    idles_finished = True
    frees_windows = True
    hashes_all = True
    open_to = frozenset(QUESTIONS)
    columns = columns_of(ChunkColumns)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise PolicyError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} and enable_chunked_prefill is "
                "false: expected 0"
            )
        if self.max_num_seqs is not None and self.max_num_seqs > self.most_tokens:
            raise PolicyError(
                f"max_num_seqs is {self.max_num_seqs}, expected at most max_num_batched_tokens, {self.most_tokens}"
            )

    @property
    def max_batch(self) -> int | None:  # type: ignore[override]
        return self.max_num_seqs

    @property
    def max_prefill_tokens(self) -> int:  # type: ignore[override]
        return self.most_tokens

    @property
    def most_tokens(self) -> int:
        return self.max_num_batched_tokens or USUAL_TOKENS

    @property
    def hides_host(self) -> bool:  # type: ignore[override]
        return self.async_scheduling

    def batch_on(self, device: OnDevice, usual: int, block_length: int) -> int:
        sequences = 256
        if _is_large(device):
            sequences = 1024
        return min(sequences, self.most_tokens)

    def on(self, device: OnDevice) -> Self:
        if self.max_num_batched_tokens is not None:
            return self
        tokens = 2048
        if device.memory_bytes >= LARGEST:
            tokens = 16384
        elif _is_large(device):
            tokens = USUAL_TOKENS
        return replace(self, max_num_batched_tokens=tokens)

    def numbers(self, policy: Policy) -> dict[str, int]:
        return {"max_num_batched_tokens": self.most_tokens, "late": True}

    def record(self, policy: Policy) -> dict[str, int]:
        return {"most_admitted": UNLIMITED, "most_prompt_tokens": UNLIMITED}

    def check(self, policy: Policy) -> None:
        if not policy.granularity.under_budget:
            kind = type(policy.granularity).__name__
            raise PolicyError(
                f"{policy.name}: granularity is {kind}, expected Autoregressive or Canvas under a token budget"
            )
        block, threshold = policy.block_length, self.long_prefill_token_threshold
        if self.most_tokens < block:
            raise PolicyError(
                f"{policy.name}: max_num_batched_tokens is {self.most_tokens}, expected at least the canvas "
                f"length {block}"
            )
        if 0 < threshold < block:
            raise PolicyError(
                f"{policy.name}: long_prefill_token_threshold is {threshold}, expected 0 or at least the canvas "
                f"length {block}"
            )

    def reserved(self, policy: Policy, prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        numbers = policy.granularity.numbers(policy)
        ahead = numbers["drafts"] + numbers["scratch"] + numbers["look_ahead"]
        if self._cuts_canvases(policy):  # canvases then end anywhere; one may begin at the last token
            return prompt + output + policy.block_length - 1 + ahead
        return super().reserved(policy, prompt, output) + ahead

    def _cuts_canvases(self, policy: Policy) -> bool:
        """Whether the budget may cut a canvas."""
        block, rows = policy.block_length, self.max_num_seqs or self.most_tokens
        short = self.most_tokens < rows * block or self.long_prefill_token_threshold > 0
        return block > 1 and rows > 1 and short

    def at_once(self, policy: Policy, prompt: int, output: int) -> int:
        return self.most_tokens * (1 + self.async_scheduling)

    def shares_prefixes(self, policy: Policy) -> bool:
        return True

    def fits(self, policy: Policy, length: int) -> bool:
        # A request preempted at its end recomputes everything.
        return self.enable_chunked_prefill or length <= self.most_tokens

    def answers(self, policy: Policy) -> Answers:
        answers: dict[Any, Any] = {
            decide: decide_budget,
            prefill_over: end_budget,
            step_over: end_budget,
            placed: start_over,
            preempted: start_again,
        }
        if policy.leaps:
            answers[steady] = steady_budget
        return answers


# ---- rules -----------------------------------------------------------------------------------------------------------


@rule
def start_over(replica: Replica, policy: BudgetState, slot: int) -> None:
    """A new request: compute its whole prompt."""
    start_again(replica, policy, slot)
    policy.columns[slot].goal = max(1, int(replica.sequences[slot].prompt))


@rule
def start_again(replica: Replica, policy: BudgetState, slot: int) -> None:
    """A preempted sequence: recompute all known tokens."""
    columns = policy.columns[slot]
    columns.computed = 0
    columns.settled = 0
    columns.unsure = 0
    columns.sampled = False


@rule
def decide_budget(replica: Replica, policy: BudgetState) -> int:
    """Run the step decided ahead, or decide; then decide ahead if configured.

    A discipline is asked in Python before each decision: of two in a row, the first is kept as decided ahead.
    """
    counters, fields = replica.counters, policy.fields
    kind = take_next(replica)
    while True:  # `_fill` stands here once: each call of it is compiled for itself
        ahead = kind != NOTHING
        if ahead:
            counters.draft_tokens = counters.next_draft_tokens
            for slot in step_slots(replica):
                begin_row(replica, policy, slot)
            if not fields.async_scheduling:
                return kind
        asks_again = not ahead and fields.async_scheduling and counters.num_waiting >= counters.ask_from
        target = ROWS
        if ahead or asks_again:
            target = NEXT
        decision = _fill(replica, policy, target)
        counters.next_draft_tokens = draft_tokens(replica, policy, target)
        if asks_again and decision != NOTHING:
            counters.next_kind = decision
            return ASK_AGAIN
        if ahead:
            counters.next_kind = decision
            keep_rows(replica)
        if ahead or decision == NOTHING:
            return kind
        kind = decision


@rule
def _fill(replica: Replica, policy: BudgetState, target: int) -> int:
    """Choose a step's rows and tokens within the budget: running requests, then waiting ones."""
    counters, fixed, fields, allowance = replica.counters, replica.fixed, policy.fields, policy.record
    budget = _allowed(replica, policy)
    inputs = int(fields.max_num_batched_tokens) - int(fields.slots)  # a row's slots are no tokens
    most_running = min(int(fixed.max_batch), int(counters.num_running + allowance.most_admitted))
    limit = int(fields.long_prefill_token_threshold)  # of a row
    if limit == 0 or counters.num_running + counters.num_waiting == 1:
        limit = budget
    sampled = int(not fields.canvases)  # tokens behind those that a step computes
    num = 0
    decodes = 0
    some_preempted = False
    some_prefill = False
    i = 0
    while i < counters.num_running and budget > 0:
        slot = replica.lists[RUNNING, i]
        i += 1
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if columns.rests:
            continue
        of_prompt = prefills(columns, policy.fields)
        before = int(columns.computed) + int(columns.unsure)
        n = min(next_tokens(replica, policy, slot), limit, budget, inputs, fixed.context_limit - before - sampled)
        if n <= 0:
            continue
        end = before + n
        needed = max(int(sequence.pages), _pages_to(fixed, fields, end))
        window_pages = in_sight(fixed, columns.settled, needed * fixed.page)
        extra = needed - sequence.pages + window_pages - sequence.window_pages
        is_preempted = False
        while not is_preempted and extra > fixed.num_pages - counters.pages_held:
            some_preempted = True
            youngest = replica.lists[RUNNING, counters.num_running - 1]
            unseat(replica, policy, youngest)
            push_front(replica, int(replica.sequences[youngest].request), youngest)
            preempted(replica, policy, youngest)
            is_preempted = youngest == slot
        if is_preempted:
            break
        counters.pages_held += extra
        sequence.pages = needed
        sequence.window_pages = window_pages
        hold(replica, policy, slot, min(end, int(sequence.start) + sampled - fields.hash_ahead))
        columns.wanted = n
        columns.drafts = max(0, n - (int(columns.goal) - int(columns.computed)))  # none of a prompt
        some_prefill = some_prefill or of_prompt
        decodes += not of_prompt
        budget, inputs = budget - n, inputs - n - int(fields.slots)
        replica.lists[target, num] = slot
        num += 1
    num_ran = num
    num_held = 0  # at the front of the queue
    while not some_preempted and counters.num_waiting > num_held and budget > 0 and counters.num_running < most_running:
        if is_held(replica, num_held):
            num_held += 1
            continue
        request, slot = queued(replica, num_held)
        num_known = max(1, int(replica.asked.input_length[request]))
        if slot >= 0:  # all that it had when preempted
            num_known = int(policy.columns[slot].goal)
        # The last token is always computed: the next is sampled from it.
        cached, shared_pages = reusable(replica, policy, request, num_known - 1)
        tokens = num_known - cached
        padded = 1 + int(fields.drafts)  # all rows of a step are alike
        fits = cached + padded < fixed.context_limit
        if fields.drafts > 0 and tokens == 1 and not some_prefill and num_ran + cached > 0 and fits:
            tokens = padded
            if tokens > min(budget, inputs):
                break
        n = min(tokens, limit, budget, inputs)
        if n <= 0 or (n < tokens and not fields.enable_chunked_prefill):
            break
        free = fixed.num_pages - counters.pages_held + shared_pages
        pages = _pages_to(fixed, fields, cached + n)
        window_pages = in_sight(fixed, cached, pages * fixed.page)
        if pages + window_pages > free or _pages_of_known(fixed, fields, num_known, cached) > free:
            break
        pop_at(replica, num_held)
        new = slot < 0
        # A next token is computed from the last known one; a canvas begins after it.
        slot = place(replica, request, slot, num_known + fixed.block * fields.canvases, pages)
        if new:
            placed(replica, policy, slot)
        counters.pages_held += window_pages
        replica.sequences[slot].window_pages = window_pages
        reuse(replica, policy, slot, cached)
        columns = policy.columns[slot]
        columns.computed = cached
        columns.settled = cached
        hold(replica, policy, slot, min(cached + n, num_known - fields.hash_ahead))
        let_in(replica, slot)
        columns.wanted = n
        columns.drafts = 0
        columns.rests = False
        budget, inputs = budget - n, inputs - n - int(fields.slots)
        replica.lists[target, num] = slot
        num += 1
    count_rows(replica, target, num)
    if num == 0:
        return NOTHING
    if decodes == 0:
        return PREFILL_STEP
    return DECODE_STEP


@rule
def _allowed(replica: Replica, policy: BudgetState) -> int:
    """Most tokens of a step, by its budget and its discipline."""
    fields, tokens = policy.fields, int(policy.record.most_prompt_tokens)
    row = int(replica.fixed.block) + int(fields.drafts)  # a canvas, or a token and its drafts
    if tokens < UNLIMITED:
        for slot in running_slots(replica):
            columns = policy.columns[slot]
            if not columns.rests and not prefills(columns, fields):
                tokens += row
    return min(int(fields.max_num_batched_tokens), tokens)


@rule
def _pages_to(fixed: Fixed, fields: Any, end: int) -> int:
    """Pages of the tokens up to `end` and a drafter's behind them."""
    return -(-min(end + fields.look_ahead, fixed.context_limit) // fixed.page)


@rule
def _pages_of_known(fixed: Fixed, fields: Any, num_known: int, cached: int) -> int:
    """Pages of `num_known` tokens, of which the first `cached` are in the pool."""
    at_once = fields.max_num_batched_tokens * (1 + fields.async_scheduling)
    # Windows hold only the part of a cached prefix in sight.
    window_pages = in_sight(fixed, 0, cached)
    total = -(-num_known // fixed.page) + max(most_in_sight(fixed, num_known, at_once), window_pages)
    return total - window_pages + in_sight(fixed, cached, cached)


@rule
def steady_budget(replica: Replica, policy: BudgetState) -> int:
    """A step is decided again if the step decided ahead is like it, and no waiting request can join."""
    counters, fields = replica.counters, policy.fields
    if counters.num_preempted > 0:
        return NO
    if fields.async_scheduling:
        if counters.next_kind != DECODE_STEP or counters.num_next != counters.num_rows:
            return NO
        for i in range(counters.num_rows):
            slot = replica.lists[ROWS, i]
            if slot != replica.lists[NEXT, i] or policy.columns[slot].wanted != replica.sequences[slot].num_tokens:
                return NO
    used = counters.tokens + (counters.num_rows + 1) * fields.slots
    if counters.num_running == replica.fixed.max_batch or used >= fields.max_num_batched_tokens:
        return WHATEVER
    if counters.num_waiting == 0:
        return UNTIL_A_REQUEST
    return NO


@rule
def paged_ahead_of_tokens(replica: Replica, policy: BudgetState) -> int:
    """The next token, and the one after if steps are decided ahead."""
    return 1 + int(policy.fields.async_scheduling)


@rule
def end_budget(replica: Replica, policy: BudgetState) -> None:
    """Settle the step's rows; free finished requests."""
    fields = policy.fields
    for slot in step_slots(replica):
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        columns.settled = columns.computed
        columns.unsure = 0
        if (fields.async_scheduling or fields.drafts > 0) and sequence.pages > 0 and sequence.phase != IDLE:
            # Of a finished request, only returned tokens of its last canvas.
            tokens = int(columns.computed)
            if sequence.finished and fields.canvases:
                tokens = int(sequence.stop)
            hold(replica, policy, slot, tokens)
    leave(replica, policy)


@dataclass(frozen=True)
class Tokens(Autoregressive):
    """The next token, and drafts of further ones verified in the same forward."""

    drafter: Annotated[
        str, Choice(DRAFTERS), "source of the drafts; dflash and dspark draft a block in a forward of their own"
    ] = "none"
    num_speculative_tokens: Annotated[
        int | None,
        Range(0, MOST_DRAFTS),
        "drafts per step; none: as many as acceptance has values, if several, else 15 (dflash), 7 (dspark) or 3",
    ] = None
    acceptance: Annotated[
        tuple[float, ...],
        "shares of steps that accept the first draft, the first two ...; one value: the probability that a draft is "
        "accepted if all before it are",
    ] = (0.7,)
    adaptive_verification: Annotated[
        bool, "verify the drafts that give most expected tokens a second: as many of each row, by their acceptance"
    ] = False

    rows = CHUNKED
    under_budget = True
    neutral = frozenset(("drafter", "num_speculative_tokens", "acceptance", "adaptive_verification"))

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.acceptance
        if not shares or not all(0 <= after <= before <= 1 for before, after in pairwise((1.0, *shares))):
            raise PolicyError(f"acceptance is {'/'.join(map(str, shares))}, expected shares of 0 to 1 that never rise")
        if 1 < len(shares) < self.num_drafts:
            raise PolicyError(
                f"acceptance has {len(shares)} values, expected one, or num_speculative_tokens, {self.num_drafts}"
            )

    @property
    def num_drafts(self) -> int:
        usual = USUAL_DRAFTS[self.drafter]
        if usual == 0 or self.num_speculative_tokens is not None:
            return min(usual, 1) * (self.num_speculative_tokens or 0)
        return usual if len(self.acceptance) == 1 else len(self.acceptance)

    @property
    def needs_latency(self) -> bool:  # type: ignore[override]
        return self.num_drafts > 0 and self.adaptive_verification

    @property
    def drafts_blocks(self) -> bool:  # type: ignore[override]
        return self.num_drafts > 0 and self.drafter in BLOCK_DRAFTERS

    @property
    def look_ahead(self) -> int:
        """Tokens behind a row that its drafter writes keys and values for (vllm/config/vllm.py:625 of 0.33.0)."""
        if self.drafter == "ngram":
            return 0
        return self.num_drafts + (self.drafts_blocks and self.drafter == "dflash")  # with the anchor

    @property
    def idle(self) -> frozenset[str]:
        return self.neutral - {"drafter"} if self.drafter == "none" else frozenset()

    @property
    def num_columns(self) -> int:
        return 1 + self.num_drafts

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if not isinstance(policy.batching, TokenBudget):
            kind = type(policy.batching).__name__
            raise PolicyError(f"{policy.name}: batching is {kind}, expected TokenBudget for chunks of prompts")
        if self.drafts_blocks and policy.batching.most_tokens <= self.look_ahead:
            raise PolicyError(
                f"{policy.name}: max_num_batched_tokens is {policy.batching.most_tokens}, expected more than a row's "
                f"{self.look_ahead} positions of a draft forward"
            )

    def most_rows(self, policy: Policy) -> int:
        """A draft forward has no more positions than a step (vllm/config/vllm.py:2379 of 0.33.0)."""
        if not self.drafts_blocks or policy.batching.most_tokens is None:
            return super().most_rows(policy)
        return policy.batching.most_tokens // self.look_ahead

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        drafts = self.num_drafts
        return {
            "drafts": drafts,
            "canvases": False,
            # If decided ahead, room in case all drafts are accepted.
            "scratch": drafts * policy.batching.hides_host,
            "look_ahead": self.look_ahead,
            "hash_ahead": int(drafts > 0 and self.drafter == "eagle"),  # since 0.33
            "slots": int(drafts > 0 and self.drafter == "draft_model"),  # extra budget tokens a row
            "queries": self.look_ahead * self.drafts_blocks,  # a row's positions of a draft forward
        }

    @property
    def acceptances(self) -> tuple[float, ...]:  # type: ignore[override]
        shares = (1.0, *self.acceptance[: self.num_drafts])
        if len(self.acceptance) == 1:
            return (1.0, *self.acceptance * self.num_drafts)
        return (1.0, *(after / before if before else 0.0 for before, after in pairwise(shares)))

    def record(self, policy: Policy) -> Mapping[str, Any]:
        if not self.needs_latency:
            return {}
        gains = np.zeros(MOST_DRAFTS + 1)  # of a row: accepted drafts of 0, 1, 2 ...
        gains[: self.num_columns] = np.cumsum(np.cumprod(self.acceptances)) - 1
        return {"gains": gains}

    def answers(self, policy: Policy) -> Answers:
        if self.needs_latency:
            return {verified: verified_adaptively}
        if self.num_drafts > 0:  # drafts are drawn
            return {}
        return {leap: leap_chunked, paged_ahead: paged_ahead_of_tokens}


@rule
def verified_adaptively(replica: Replica, policy: AnyPolicy) -> int:
    """Drafts a row with most expected tokens per second of the device (adaptive_verification.py:305 of vLLM 0.33.0).

    There each draft counts by its own confidence, here all rows' n-th drafts by their expected acceptance: what
    telling them apart gains is left out. Times are, as there, of a context of CURVE_CONTEXT tokens.
    """
    counters, gains = replica.counters, policy.record.gains
    undrafted = sampling = drafting = 0
    for slot in step_slots(replica):
        sampled = num_sampled(replica, slot)
        undrafted += int(replica.sequences[slot].num_tokens) - max(0, sampled - 1)
        sampling += min(1, sampled)
        drafting += int(sampled > 1)
    # The planned step's features are not set yet: these use their place.
    counters.batch = counters.num_rows
    counters.sum_kv = CURVE_CONTEXT * counters.num_rows
    counters.window_q_kv = 0
    counters.window_kv = 0
    counters.prefill_tokens = 0
    counters.num_forwards = 1
    counters.continues = True  # the device's time alone
    best = 0
    best_rate = -np.inf
    for drafts in range(int(policy.fields.drafts) + 1):
        counters.tokens = undrafted + drafts * drafting
        counters.sum_q_kv = CURVE_CONTEXT * counters.tokens
        counters.head_rows = sampling + drafts * drafting
        counters.sampled_rows = counters.head_rows
        rate = (sampling + gains[drafts] * drafting) / seconds(policy.cost.knots, policy.cost.numbers[0], counters)
        if rate > best_rate:
            best = drafts
            best_rate = rate
    return best


PAGES = PrefixMemory(page_size=16)
_DIFFUSION = TokenBudget(max_num_seqs=8)

# vLLM's flags of fields (vllm/engine/arg_utils.py).
FLAGS = {
    "gpus": "--tensor-parallel-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "page_size": "--block-size",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "enable_chunked_prefill": "--enable-chunked-prefill/--no-enable-chunked-prefill",
    "async_scheduling": "--async-scheduling/--no-async-scheduling",
    "prefix_caching": "--enable-prefix-caching/--no-enable-prefix-caching",
}
DRAFTS = {
    "num_speculative_tokens": "json:--speculative-config.num_speculative_tokens",
    "drafter": "json:--speculative-config.method",
    "adaptive_verification": "json:--speculative-config.enable_adaptive_verification",
}
CANVASES = {
    "canvas_length": "json:--diffusion-config.canvas_length",
    "denoising_steps": "json:--diffusion-config.max_denoising_steps",
}
SPACE = {
    "max_num_seqs": [32, 64, 128, 256, "none"],
    "max_num_batched_tokens": [2048, 4096, "none", 16384],
    "async_scheduling": [True, False],
}

PRESETS = {
    "vllm-ar": Preset(
        Policy("vllm-ar", batching=TokenBudget(), granularity=Tokens(), memory=PAGES),
        "max_num_seqs",
        "vLLM 0.32 and 0.33, autoregressive: chunked prefill mixed with decoding, decided a step ahead; drafts as 0.33",
        SOURCE,
        {**SPACE, "num_speculative_tokens": ["none", 0, 3, 5, 7]},
        engine="vllm",
        flags={**FLAGS, **DRAFTS},
    ),
    "vllm-diffusion": Preset(
        Policy("vllm-diffusion", batching=_DIFFUSION, granularity=Canvas(), unmasking=BY_LAW, memory=PAGES),
        "max_num_seqs",
        "DiffusionGemma on vLLM 0.32 and 0.33: canvases under the token budget, each committed by a forward of its own",
        "vLLM 0.32.0 and 0.33.0 (production-dllm-serving.md 2.2)",
        {
            "max_num_seqs": [4, 8, 12, 16, 24, 32, 48, 64],
            "max_num_batched_tokens": [4096, "none", 16384],
            "async_scheduling": [True, False],
        },
        reference=True,
        tested={"max_num_seqs": (8, "vLLM's source, which says that more exhaust the memory of one H200")},
        engine="vllm",
        # The checkpoint's generation_config.json would cap answers at 256 tokens.
        serve="--generation-config vllm --enable-auto-tool-choice --tool-call-parser gemma4 --reasoning-parser gemma4",
        flags={**FLAGS, **CANVASES},
    ),
}
