"""A compiled rule: the more requests wait or run, the smaller the chunk."""

from dataclasses import dataclass
from typing import Annotated, Any

from dsim.policy import CACHED, EVERY_STEP, Answers, DelayedCache, Granularity, Policy, Preset, Range, View, rule
from dsim.policy import hooks as ask


@dataclass(frozen=True)
class QueueChunk(Granularity):
    """The largest chunk for up to `calm` requests; beyond, the same number of positions a step shared among all."""

    max_chunk: Annotated[int, Range(2, 32), "the largest chunk, at most the block"] = 32
    calm: Annotated[int, Range(1, 64), "requests, waiting or running, that get the largest chunk"] = 8
    block_length: Annotated[int, Range(2, 64), "tokens of a block, as the checkpoint was trained"] = 32

    sized_by_block = "max_chunk"

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), ask.choose: by_queue, ask.select: leftmost}


@rule
def by_queue(view: View) -> int:
    """The chunk of the coming step."""
    load = view.num_waiting + view.num_rows
    return int(max(2, view.fields.max_chunk * view.fields.calm // max(load, view.fields.calm)))


@rule
def leftmost(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    """Compute the leftmost positions that are not cached yet; `window` is all False."""
    for k in range(reach):
        if chunk > 0 and status[k] != CACHED:
            window[k] = True
            chunk -= 1


POLICY = Preset(
    Policy("queue-chunk", EVERY_STEP, QueueChunk(), DelayedCache()),
    main="calm",
    summary="a chunk sized by the queue's length",
    citation="docs/policy-of-your-own.md",
)
