"""A canvas: tokens decoded together right behind those committed, all of them computed every step (DiffusionGemma).

Any position may change until the canvas is committed whole, so that only the number of steps matters for time: a law of
the profile says how many (production-dllm-serving.md 1.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..admission import canvas_width, knows_limit
from ..draw import draw_by_law
from ..emission import set_features
from ..errors import PolicyError
from ..hooks import begin_row, block_entered, draw_rows, next_tokens, plan_prompts, plan_rows
from ..jit import rule
from ..part import Answers, Granularity, Policy, Range
from ..state import DENOISE, FLUSH, IDLE, MASKED, PENDING, PREFILL, ROWS, PolicyState, Replica, Status
from ..unmasking import Unmasking


class CanvasFields(Protocol):
    """The fields that its rules read."""

    late: bool


CanvasState = PolicyState[CanvasFields, Any, Any]


MAX_CANVAS = 1024
BY_LAW = Unmasking(strategy="law")


@dataclass(frozen=True)
class Canvas(Granularity):
    """A canvas behind the committed text, all of it every step, then a causal pass that leaves its keys and values."""

    canvas_length: Annotated[int, Range(1, MAX_CANVAS), "tokens of a canvas"] = 256
    late: Annotated[bool, "tokens leave with the pass that leaves their keys and values, not before it"] = True

    whole_block = True
    under_budget = True
    on_a_grid = False
    neutral = frozenset({"late"})

    def __post_init__(self) -> None:
        if not 1 <= self.canvas_length <= MAX_CANVAS:
            raise PolicyError(f"canvas_length is {self.canvas_length}, expected 1 to {MAX_CANVAS}")

    @property
    def block_length(self) -> int:  # type: ignore[override]
        return self.canvas_length

    def check(self, policy: Policy) -> None:
        if policy.unmasking.strategy != "law":
            raise PolicyError(f"{policy.name}: strategy is {policy.unmasking.strategy}, and a canvas commits by law")
        if policy.eviction.evicts:
            raise PolicyError(f"{policy.name}: a canvas is computed whole, without eviction inside it")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        # A step decided on ahead has room for the canvas behind the one in flight.
        scratch = self.canvas_length if policy.batching.hides_host else 0
        return {"drafts": 0, "canvases": True, "scratch": scratch, "look_ahead": 0, "slots": 0, "drops_page": False}

    def answers(self, policy: Policy) -> Answers:
        own = {**super().answers(policy), draw_rows: draw_by_law}
        if policy.batching.plans_rows:
            return own
        return {
            **own, plan_prompts: plan_canvases, plan_rows: plan_canvases, next_tokens: next_of_canvas,
            begin_row: begin_canvas, block_entered: canvas_entered,
        }  # fmt: skip


@rule
def whole(status: Status) -> bool:
    """Whether a canvas has been decoded: only the pass that leaves its keys and values is to come."""
    return status[0] != MASKED


@rule
def next_of_canvas(replica: Replica, policy: CanvasState, slot: int) -> int:
    """The rest of a prompt, or a canvas."""
    sequence, own = replica.sequences[slot], policy.columns[slot]
    if own.computed < own.goal:
        return int(own.goal) - int(own.computed)
    # vLLM's guard counts the pass in flight as two tokens, whatever it is: so it computes a canvas for nothing behind
    # the last one, and holds one whose request lacks two tokens back in every other step.
    if own.unsure > 0 and sequence.start + 2 >= sequence.end and knows_limit(replica, sequence):
        return 0
    return canvas_width(replica, sequence)


@rule
def begin_canvas(replica: Replica, policy: CanvasState, slot: int) -> None:
    """A step with this sequence begins: a chunk of its prompt, a denoising step, or the pass that commits a canvas."""
    sequence, own = replica.sequences[slot], policy.columns[slot]
    n, before = int(own.wanted), int(own.computed)
    sequence.num_tokens = n
    sequence.num_retained = n
    sequence.left = 0
    computed = False
    if sequence.finished:
        sequence.phase = IDLE  # a canvas behind its last one, which was in flight as this was decided on
        sequence.num_keys = sequence.start + n + (int(sequence.block) if whole(replica.status[slot]) else 0)
    elif before < own.goal:
        sequence.phase = PREFILL
        sequence.num_keys = before + n
        own.computed = before + n
        sequence.left = own.goal - own.computed
        for p in range(len(replica.status[slot])):  # one that was preempted begins its canvas again
            replica.status[slot, p] = MASKED
            replica.evaluations[slot, p] = 0
    else:
        sequence.phase = FLUSH if whole(replica.status[slot]) else DENOISE
        sequence.num_keys = sequence.start + n
        own.unsure = n
        computed = True
        if sequence.phase == FLUSH:  # where the budget cuts this pass, it commits no more than it computes
            sequence.block = n
            for p in range(n):
                replica.status[slot, p] = PENDING
    for p in range(replica.window.shape[1]):
        replica.window[slot, p] = computed and p < n


@rule
def plan_canvases(replica: Replica, policy: CanvasState) -> None:
    """Plan a step of prompts' chunks and passes over canvases: causal but while a canvas is denoised."""
    counters = replica.counters
    tokens = 0
    qk_pairs = 0
    keys = 0
    head = 0
    sampled = 0
    prompts = 0
    for i in range(counters.num_rows):
        sequence = replica.sequences[replica.lists[ROWS, i]]
        n = int(sequence.num_tokens)
        tokens += n
        keys += int(sequence.num_keys)
        qk_pairs += n * (int(sequence.num_keys) - n)
        qk_pairs += n * n if sequence.phase == DENOISE or sequence.phase == IDLE else n * (n + 1) // 2
        if sequence.phase == PREFILL:
            prompts += n
        elif sequence.phase == DENOISE or sequence.phase == IDLE:
            head += n
            sampled += n
        elif policy.fields.late:  # vLLM computes the logits of this pass, too, and drops them
            head += n
    set_features(replica, tokens, qk_pairs, keys, head, sampled, 0 if prompts == tokens else int(replica.fixed.block))
    counters.prefill_tokens = prompts


@rule
def canvas_entered(replica: Replica, policy: CanvasState, slot: int) -> None:
    """A canvas is committed: its keys and values are there, unless they were lost meanwhile."""
    sequence, own = replica.sequences[slot], policy.columns[slot]
    own.goal += sequence.block
    if sequence.pages > 0:
        own.computed += sequence.block
    sequence.block = canvas_width(replica, sequence)
