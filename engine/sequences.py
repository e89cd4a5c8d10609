"""The state of running sequences, a struct of arrays: one row a slot, kept by the engine alone."""

from typing import Any, NamedTuple

import numpy as np


class Sequences(NamedTuple):
    """One array a property. A position is absolute unless it is a column of the current block."""

    request: Any  # index in the trace
    prompt: Any  # prompt tokens
    end: Any  # prompt + output tokens
    start: Any  # first position of the current block: all before it has its KV
    status: Any  # [slots, width] MASKED, PENDING or CACHED, of the current block (and the next, when streaming)
    evaluations: Any  # [slots, width] steps that computed the position as a mask
    pages: Any  # KV pages held
    emitted: Any  # tokens handed out
    seen_commit: Any  # a position was committed
    unpublished: Any  # the current block's tokens are not handed out yet
    finished: Any
    prefilled: Any  # at least once
    decoded: Any  # tokens decoded, in the scope of FOCUS's mean
    decode_steps: Any  # steps that decoded any
    carried: Any  # those two are the block's before, until this one decodes
    progress: Any  # rightmost column of the block that went through all layers, or -1
    steps: Any  # of a full-sequence model: steps taken, and of those in the current block
    block_steps: Any


KINDS: dict[str, Any] = {
    "status": np.uint8, "evaluations": np.uint16, "seen_commit": np.bool_, "unpublished": np.bool_,
    "finished": np.bool_, "prefilled": np.bool_, "carried": np.bool_,
}  # fmt: skip


def sequences(capacity: int, width: int, old: Sequences | None = None) -> Sequences:
    """Room for `capacity` sequences whose window of blocks has `width` columns; those of `old` keep their slots."""
    arrays = {}
    for name in Sequences._fields:
        shape = (capacity, width) if name in ("status", "evaluations") else (capacity,)
        arrays[name] = np.zeros(shape, KINDS.get(name, np.int32))
        if old is not None:
            arrays[name][: len(old.request)] = getattr(old, name)
    return Sequences(**arrays)
