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
    ids = [of_request.tolist() for of_request in np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})
