"""A compiled rule, which the twin runs many steps at a time: the more requests wait or run, the smaller the chunk."""

from dataclasses import dataclass
from typing import Annotated, Any

from dsim.engine.hooks import choose, select
from dsim.engine.jit import rule
from dsim.engine.part import Answers, Granularity, Policy, Preset, Range
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.lmdeploy import EVERY_STEP
from dsim.engine.state import CACHED


@dataclass(frozen=True)
class QueueChunk(Granularity):
    """The largest chunk while few requests are here; beyond that, so many positions a step as those few computed."""

    max_chunk: Annotated[int, Range(2, 32), "the largest chunk, at most the block"] = 32
    calm: Annotated[int, Range(1, 64), "requests, waiting or running, that get the largest chunk"] = 8
    block_length: Annotated[int, Range(2, 64), "tokens of a block, as the checkpoint was trained"] = 32

    sized_by_block = "max_chunk"

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), choose: by_queue, select: leftmost}


@rule
def by_queue(w: Any, x: Any) -> int:
    """The chunk of the coming step: w.c[0] counts the replica's requests, x.p[0] has the fields above."""
    load = w.c[0].num_waiting + w.c[0].num_rows
    p = x.p[0]
    return int(max(2, p.max_chunk * p.calm // max(load, p.calm)))


@rule
def leftmost(status: Any, reach: int, chunk: int, p: Any, window: Any) -> None:
    """Compute the leftmost positions that are not cached yet; window is all False, status and window have a width."""
    for k in range(reach):
        if chunk > 0 and status[k] != CACHED:
            window[k] = True
            chunk -= 1


POLICY = Preset(
    Policy("queue-chunk", EVERY_STEP, QueueChunk(), DelayedCache()),
    main="calm",
    summary="a chunk that goes by the queue's length",
    citation="docs/policy-of-your-own.md",
)
