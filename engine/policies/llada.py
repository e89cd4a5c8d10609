"""LLaDA's and Dream's own loop as a script: the whole sequence every step, in static batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..admission import copy_list
from ..hooks import decide, head_rows, held, work
from ..jit import rule
from ..part import Answers, Choice, PagedMemory, Policy, Preset, Range
from ..rows.passes import LOGITS, ApproximateCache, PassScheduler, can_let_in, let_head_in
from ..state import DECODE_STEP, FULL, GROUP, NOTHING, ROWS, RUNNING, AnyPolicy, Replica
from ..unmasking import Unmasking


@dataclass(frozen=True)
class Static(PassScheduler):
    """A research script's server: a batch is padded to its longest, runs in lock-step, ends together."""

    max_batch: Annotated[
        int | None, Range(1), "running requests; none: the device's default; published cached loops take one"
    ] = 1
    max_num_logits: Annotated[int, Range(1), "most rows of logits at once"] = 4096

    pads = True

    def answers(self, policy: Policy) -> Answers:
        return {decide: decide_static}


@rule
def decide_static(replica: Replica, policy: AnyPolicy) -> int:
    """Continue the batch, or start one with the first waiting requests."""
    counters = replica.counters
    if counters.num_group < 0:
        counters.num_running = 0
        while (
            counters.num_waiting > 0 and counters.num_running < replica.fixed.max_batch and can_let_in(replica, policy)
        ):
            replica.lists[RUNNING, counters.num_running] = let_head_in(replica, policy)
            counters.num_running += 1
        if counters.num_running == 0:
            return NOTHING
        counters.num_group = counters.num_running
        copy_list(replica, RUNNING, GROUP, counters.num_running)
    copy_list(replica, RUNNING, ROWS, counters.num_running)
    counters.num_rows = counters.num_running
    return DECODE_STEP


@rule
def whole_sequence(
    prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any
) -> tuple[int, int, int]:
    return FULL, length, length


@rule
def rows_of_logits(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> int:
    """All computed positions, or at most a block."""
    if fields.all_logits:
        return tokens
    return min(tokens, block)


@rule
def nothing_held(prompt: int, length: int, state: int, fields: Any) -> int:
    """No keys outlive a step."""
    return 0


@dataclass(frozen=True)
class NoCache(ApproximateCache):
    """The whole sequence, every step (LLaDA's and Dream's own loop, 1.1)."""

    logits: Annotated[str, Choice(LOGITS), "rows through the LM head in a pass over more than the block"] = "all"

    neutral = frozenset({"logits"})
    rules: ClassVar[dict[Any, Any]] = {work: whole_sequence, head_rows: rows_of_logits, held: nothing_held}

    @property
    def all_logits(self) -> bool:
        return self.logits == "all"

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"all_logits": self.all_logits}


# One token a step, dLLM-Serve's page size. Published loops ignore EOS (full-sequence-diffusion.md 1).
ONE_A_STEP = Unmasking(strategy="low_confidence_static", eos="ignored")
PAGES = PagedMemory(page_size=256)


def script(name: str, cache: NoCache, implementation: str = "") -> Policy:
    """A research script: one request at a time."""
    return Policy(
        name, batching=Static(), cache=cache, unmasking=ONE_A_STEP, memory=PAGES, implementation=implementation
    )


PRESETS = {
    "vanilla": Preset(
        script("vanilla", NoCache()),
        "max_batch",
        "full-sequence: LLaDA's own loop, the whole sequence every step",
        "LLaDA's and Dream's generate (full-sequence-diffusion.md 1.1)",
        probe="vanilla,logits=block",
        reference=True,
    )
}
