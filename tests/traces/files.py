"""Trace files for tests: written, and read back as rows."""

import json
from pathlib import Path
from typing import Any

from dsim.traces import Trace, load

from ..checks import refused


def save(data: bytes | str | list[Any], name: str = "trace") -> Path:
    """A file of these bytes, this text, or a line of JSON per row."""
    if isinstance(data, list):
        data = "".join(json.dumps(row) + "\n" for row in data)
    path = Path(name)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def spend(start: str, first: str | None, end: str, tokens: int = 11, **more: Any) -> dict[str, Any]:
    """A row of LiteLLM's /spend/logs."""
    day = "2026-03-01T10:00:{}Z"
    return {
        "call_type": "acompletion", "prompt_tokens": 20, "completion_tokens": tokens, "startTime": day.format(start),
        "completionStartTime": first and day.format(first), "endTime": day.format(end), "model": "sdar-8b",
        "status": "success", "cache_hit": "False", "metadata": {},
    } | more  # fmt: skip


def rows_of(trace: Trace) -> list[tuple[float, int, int]]:
    """Arrival (s), input length and output length of each request."""
    columns = trace.arrival.round(9), trace.input_length, trace.output_length
    return list(zip(*(column.tolist() for column in columns), strict=True))


def refusal(given: Any, **how: Any) -> str:
    """The one line with which a trace is refused."""
    with refused() as error:
        load(given, **how)
    return str(error.value)
