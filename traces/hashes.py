"""How many prompt tokens a trace's prefix block ids have; and new ids, unique by request."""

from dataclasses import replace
from typing import Any

import numpy as np

from .trace import Ints, Trace

HASHED = 512  # tokens an id if the trace does not say: Mooncake's
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK = 16  # tokens an id, as in `vllm bench serve --dataset-name timed_trace`


def implied_block(input_length: Ints, hash_ids: list[Any]) -> int:
    """HASHED, unless a prompt has more ids and all have those of a smaller power of two, with or without a partial
    block."""
    counts = np.array([len(ids or ()) for ids in hash_ids])
    for size in SIZES if (counts > -(-input_length // HASHED)).any() else ():
        whole, rest = np.divmod(input_length, size)
        if ((counts == whole) | (counts == whole + (rest > 0)) | (counts == 0)).all():
            return size
    return HASHED


def with_hash_ids(trace: Trace) -> Trace:
    """With unique ids, one a BLOCK of prompt tokens, if the trace has none.

    vLLM's replayer builds prompts from ids: without them it sends empty ones.
    """
    if "hash_ids" in trace.extras:
        return trace
    counts = -(-trace.input_length // BLOCK)
    ends = np.cumsum(counts)
    ids = [list(range(end - count, end)) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})
