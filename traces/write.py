"""Write canonical JSON lines: Mooncake's keys, whole ms, optional keys."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..files.write import check_file, writing
from .formats import OPTIONAL
from .trace import Trace


def write(trace: Trace, path: str | Path, *, force: bool = False) -> Path:
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
    for i, (t, n, m) in enumerate(zip(time, input_length, output_length, strict=True)):
        line = f'{{"timestamp": {t}, "input_length": {n}, "output_length": {m}'
        for name in names:
            if (value := trace.extras[name][i]) is not None:
                line += f', "{name}": {json.dumps(value, default=str)}'
        yield line + "}\n"
