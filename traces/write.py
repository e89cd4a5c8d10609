"""Write a trace as canonical JSON lines: Mooncake's keys, times in whole milliseconds, and our optional ones."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..engine.errors import TraceError
from .formats import OPTIONAL
from .trace import Trace


def write(trace: Trace, path: str | Path, *, force: bool = False) -> Path:
    """Write the trace to `path` in one move; refuse to overwrite unless `force`. Arrivals round to the nearest ms."""
    path = Path(path)
    refuse_overwrite(path, force)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(lines(trace))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def refuse_overwrite(path: Path, force: bool) -> None:
    """An error when the file is there and may not be replaced."""
    if path.is_dir():
        raise TraceError(f"{path} is a directory, expected a file name")
    if path.exists() and not force:
        raise TraceError(f"{path} exists, expected a new file: --force overwrites it")


def lines(trace: Trace) -> Iterator[str]:
    """One line of JSON a request."""
    time = np.rint(trace.arrival * 1e3).astype(np.int64).tolist()
    input_length, output_length = trace.input_length.tolist(), trace.output_length.tolist()
    names = [name for name in OPTIONAL if name in trace.extras]
    for i, (t, n, m) in enumerate(zip(time, input_length, output_length, strict=True)):
        line = f'{{"timestamp": {t}, "input_length": {n}, "output_length": {m}'
        for name in names:
            if (value := trace.extras[name][i]) is not None:
                line += f', "{name}": {json.dumps(value)}'
        yield line + "}\n"
