"""A canvas: tokens decoded together right behind those committed, all of them computed every step (DiffusionGemma).

Any position may change until the canvas is committed whole, so that only the number of steps matters for time: a law of
the profile says how many (production-dllm-serving.md 1.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..admission import canvas_width, knows_limit
from ..draw import draw_by_law
from ..emission import set_features
from ..errors import PolicyError
from ..hooks import begin_row, block_entered, draw_rows, next_tokens, plan_prompts, plan_rows
from ..jit import rule
from ..part import Answers, Granularity, Policy, Range
from ..state import DENOISE, FLUSH, IDLE, MASKED, PENDING, PREFILL, ROWS
from ..unmasking import Unmasking

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
def whole(status: Any) -> bool:
    """Whether a canvas has been decoded: only the pass that leaves its keys and values is to come."""
    return status[0] != MASKED


@rule
def next_of_canvas(w: Any, x: Any, slot: Any) -> Any:
    """The rest of a prompt, or a canvas."""
    q, s = w.q[slot], x.s[slot]
    if s.computed < s.goal:
        return int(s.goal) - int(s.computed)
    # vLLM's guard counts the pass in flight as two tokens, whatever it is: so it computes a canvas for nothing behind
    # the last one, and holds one whose request lacks two tokens back in every other step.
    if s.unsure > 0 and q.start + 2 >= q.end and knows_limit(w, q):
        return 0
    return canvas_width(w, q)


@rule
def begin_canvas(w: Any, x: Any, slot: Any) -> None:
    """A step with this sequence begins: a chunk of its prompt, a denoising step, or the pass that commits a canvas."""
    q, s = w.q[slot], x.s[slot]
    n, before = int(s.wanted), int(s.computed)
    q.num_tokens = n
    q.num_retained = n
    q.left = 0
    computed = False
    if q.finished:
        q.phase = IDLE  # a canvas behind its last one, which was in flight as this was decided on
        q.num_keys = q.start + n + (int(q.block) if whole(w.status[slot]) else 0)
    elif before < s.goal:
        q.phase = PREFILL
        q.num_keys = before + n
        s.computed = before + n
        q.left = s.goal - s.computed
        for p in range(len(w.status[slot])):  # one that was preempted begins its canvas again
            w.status[slot, p] = MASKED
            w.evaluations[slot, p] = 0
    else:
        q.phase = FLUSH if whole(w.status[slot]) else DENOISE
        q.num_keys = q.start + n
        s.unsure = n
        computed = True
        if q.phase == FLUSH:  # where the budget cuts this pass, it commits no more than it computes
            q.block = n
            for p in range(n):
                w.status[slot, p] = PENDING
    for p in range(w.window.shape[1]):
        w.window[slot, p] = computed and p < n


@rule
def plan_canvases(w: Any, x: Any) -> None:
    """Plan a step of prompts' chunks and passes over canvases: causal but while a canvas is denoised."""
    c = w.c[0]
    tokens = 0
    qk_pairs = 0
    keys = 0
    head = 0
    sampled = 0
    prompts = 0
    for i in range(c.num_rows):
        q = w.q[w.lists[ROWS, i]]
        n = int(q.num_tokens)
        tokens += n
        keys += int(q.num_keys)
        qk_pairs += n * (int(q.num_keys) - n)
        qk_pairs += n * n if q.phase == DENOISE or q.phase == IDLE else n * (n + 1) // 2
        if q.phase == PREFILL:
            prompts += n
        elif q.phase == DENOISE or q.phase == IDLE:
            head += n
            sampled += n
        elif x.p[0].late:  # vLLM computes the logits of this pass, too, and drops them
            head += n
    set_features(w, tokens, qk_pairs, keys, head, sampled, 0 if prompts == tokens else int(w.f[0].block))
    c.prefill_tokens = prompts


@rule
def canvas_entered(w: Any, x: Any, slot: Any) -> None:
    """A canvas is committed: its keys and values are there, unless they were lost meanwhile."""
    q, s = w.q[slot], x.s[slot]
    s.goal += q.block
    if q.pages > 0:
        s.computed += q.block
    q.block = canvas_width(w, q)
