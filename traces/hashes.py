"""New prefix block ids for a trace without any, unique by request."""

from dataclasses import replace

import numpy as np

from .trace import Trace

HASHED = 512  # tokens an id if the trace does not say: Mooncake's
BLOCK = 16  # tokens an id, as in `vllm bench serve --dataset-name timed_trace`


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
