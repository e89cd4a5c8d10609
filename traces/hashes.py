"""Prefix block ids for a trace, unique by request: no prefix is shared."""

from dataclasses import replace

import numpy as np

from ..engine.errors import TraceError
from .trace import Trace

BLOCK = 16  # tokens an id, as in `vllm bench serve --dataset-name timed_trace`


def with_block_size(trace: Trace, size: int) -> Trace:
    """Say how many tokens a hash id of the trace has."""
    if "hash_ids" not in trace.extras or size < 1:
        found = "hash_ids" if "hash_ids" in trace.extras else "no hash_ids"
        raise TraceError(f"{trace.name} has {found}, --hash-block is {size}: expected hash_ids and at least 1")
    return replace(trace, extras={**trace.extras, "block_size": [size] * len(trace)})


def with_hash_ids(trace: Trace) -> Trace:
    """Replace ids by unique ones, one a BLOCK of prompt tokens.

    vLLM's replayer builds prompts from ids: without them it sends empty ones.
    """
    counts = -(-trace.input_length // BLOCK)
    ends = np.cumsum(counts)
    ids = [list(range(end - count, end)) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})
