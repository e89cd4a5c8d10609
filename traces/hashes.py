"""Prefix block ids for traces without: each request gets its own ids, so that no two share a prefix."""

from dataclasses import replace

import numpy as np

from .trace import Trace

BLOCK = 16  # tokens per id: the default of `vllm bench serve --dataset-name timed_trace`


def with_hash_ids(trace: Trace) -> Trace:
    """Give each request unique ids, one per 16 tokens of its prompt, in place of any it has.

    vLLM's replayer builds prompts from ids alone: without ids it sends empty prompts.
    """
    counts = -(-trace.input_length // BLOCK)
    ends = np.cumsum(counts)
    ids = [list(range(end - count, end)) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})
