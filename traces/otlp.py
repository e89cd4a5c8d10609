"""Requests from OpenTelemetry spans: OTLP JSON, one document or one export per line.

A request's span has token counts as attributes, named by the conventions for generative AI or as in vLLM 0.32
(vllm/tracing/utils.py); it starts at the arrival. Other spans are left out.
"""

from collections.abc import Iterator
from typing import Any

from ..files.read import float_of
from .formats import FORMATS
from .rows import Row, Rows

OTLP = FORMATS["otlp"]
INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
# s from the span's start to the first token: by the client (conventions), by the server (vLLM).
FIRST = ("gen_ai.response.time_to_first_chunk", "gen_ai.latency.time_to_first_token")
MODEL = ("gen_ai.response.model", "gen_ai.request.model")
ID = ("gen_ai.request.id", "gen_ai.response.id")
ERROR = 2  # STATUS_CODE_ERROR


def is_otlp(row: Row) -> bool:
    """Whether it is an export of spans."""
    return isinstance(row.get("resourceSpans"), list)


def rows_of_spans(found: Rows) -> tuple[Rows, list[str]]:
    """One row per request, numbered by export; a warning of other spans."""
    numbers: list[int] = []
    rows: list[Row | str] = []
    others = 0
    for number, export in zip(found.numbers, found.rows, strict=True):
        for row in [export] if isinstance(export, str) else map(_request, _spans(export)):
            others += row is None
            if row is not None:
                numbers.append(number)
                rows.append(row)
    warnings = [f"{others} spans without token counts are left out"] if others else []
    return Rows(found.path, numbers, rows, found.form), warnings


def _spans(export: Row) -> Iterator[Row]:
    for resource in _dicts(export.get("resourceSpans")):
        for scope in _dicts(resource.get("scopeSpans")):
            yield from _dicts(scope.get("spans"))


def _dicts(value: Any) -> Iterator[Row]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _request(span: Row) -> Row | None:
    """None for another span."""
    about = {}
    for attribute in _dicts(span.get("attributes")):
        value = attribute.get("value")
        if isinstance(value, dict) and len(value) == 1:
            about[str(attribute.get("key"))] = next(iter(value.values()))

    def first_of(names: tuple[str, ...]) -> Any:
        return next((about[name] for name in names if name in about), None)

    if first_of(INPUT) is None:
        return None
    start, waited = span.get("startTimeUnixNano"), float_of(str(first_of(FIRST)))
    status = span.get("status")
    failed = isinstance(status, dict) and status.get("code") in (ERROR, "STATUS_CODE_ERROR")
    row = {
        OTLP.time: start, OTLP.input: first_of(INPUT), OTLP.output: first_of(OUTPUT) or 0,
        OTLP.end: span.get("endTimeUnixNano"), "model": first_of(MODEL), "id": first_of(ID),
        "status": "error" if failed else None,
    }  # fmt: skip
    begin = float_of(str(start))
    if 0 <= waited < 1e9 and 0 <= begin < 1e19:
        row[OTLP.first] = int(begin_of(start)) + round(waited * 1e9)
    return row


def begin_of(start: Any) -> int:
    """Integer ns; a float would be off by about a hundred."""
    text = str(start)
    return int(text) if text.isdigit() else int(float(text))
