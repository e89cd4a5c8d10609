"""Prefix block ids for traces without ids: each request gets its own, so that none share a prefix."""

from dataclasses import replace

import numpy as np

from .trace import Trace

BLOCK = 16  # tokens per id: the default of `vllm bench serve --dataset-name timed_trace`


def with_hash_ids(trace: Trace) -> Trace:
    """Give each request unique ids, one per 16 prompt tokens, replacing existing ids.

    vLLM's replayer builds prompts from ids only: without ids it sends empty prompts.
    """
    counts = -(-trace.input_length // BLOCK)
    ends = np.cumsum(counts)
    ids = [list(range(end - count, end)) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})
