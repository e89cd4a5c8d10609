"""Trace files for tests: written, and read back as rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import DsimError
from dsim.traces import Trace, load


def save(folder: Path, data: bytes | str | list[Any], name: str = "trace") -> Path:
    """A file of these bytes, this text, or a line of JSON per row."""
    if isinstance(data, list):
        data = "".join(json.dumps(row) + "\n" for row in data)
    path = folder / name
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
    return list(
        zip(trace.arrival.round(9).tolist(), trace.input_length.tolist(), trace.output_length.tolist(), strict=True)
    )


def refusal(given: Any, **how: Any) -> str:
    """The one line with which a trace is refused."""
    with pytest.raises(DsimError) as error:
        load(given, **how)
    assert "\n" not in str(error.value)
    return str(error.value)
