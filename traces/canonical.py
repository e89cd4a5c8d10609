"""Write canonical JSON lines: Mooncake's keys, whole ms, optional keys."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..files.read import FilePath
from ..files.write import check_file, writing
from .formats import OPTIONAL
from .trace import Trace

BLOCK = 16  # tokens a new hash id, as in `vllm bench serve --dataset-name timed_trace`


def with_hash_ids(trace: Trace) -> Trace:
    """With unique hash ids, one a BLOCK of prompt tokens, if the trace has none.

    vLLM's replayer builds prompts from ids: without them it sends empty ones.
    """
    if "hash_ids" in trace.extras:
        return trace
    counts = -(-trace.input_length // BLOCK)
    ids = [of_request.tolist() for of_request in np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])]
    return replace(trace, extras={**trace.extras, "hash_ids": ids, "block_size": [BLOCK] * len(trace)})


def write(trace: Trace, path: FilePath, *, force: bool = False) -> Path:
    """Write atomically, overwriting only with `force`. Arrivals are rounded to ms."""
    path = check_file(path, force=force)
    with writing(path) as file:
        file.writelines(line.encode() for line in lines(trace))
    return path


def lines(trace: Trace) -> Iterator[str]:
    """One line per request."""
    time = np.rint(trace.arrival * 1e3).astype(np.int64).tolist()
    input_length, output_length = trace.input_length.tolist(), trace.output_length.tolist()
    names = [name for name in OPTIONAL if name in trace.extras]
    for i, (timestamp, num_input, num_output) in enumerate(zip(time, input_length, output_length, strict=True)):
        row = {"timestamp": timestamp, "input_length": num_input, "output_length": num_output}
        row |= {name: trace.extras[name][i] for name in names if trace.extras[name][i] is not None}
        yield json.dumps(row, default=str) + "\n"
