"""Requests from OpenTelemetry spans: OTLP JSON, one document or one export per line, or Tempo's answer.

A request's span has token counts as attributes, named by the conventions for generative AI or as in vLLM 0.32
(vllm/tracing/utils.py); it starts at the arrival. Other spans are left out. Of spans inside one another (an agent's,
its client's, the server's) the innermost is the request.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .chosen import NO_TEXT
from .formats import FORMATS
from .rows import Row, Rows

OTLP = FORMATS["otlp"]
# Names over releases and of snake-case exporters.
RESOURCES = ("resourceSpans", "resource_spans", "batches")
SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")
SPAN = ("traceId", "spanId", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano")
SNAKE = {name: re.sub("([A-Z])", r"_\1", name).lower() for name in SPAN}
INPUT, OUTPUT = (keys.split(" or ") for keys in (OTLP.input, OTLP.output))
FINISH = ("gen_ai.response.finish_reasons", "gen_ai.response.finish_reason")
ERROR = (2, "STATUS_CODE_ERROR")


def is_otlp(keys: Iterable[str]) -> bool:
    """Whether they are of an export of spans."""
    return not set(RESOURCES).isdisjoint(keys)


def rows_of_spans(exports: Rows) -> Rows:
    """One row per request, numbered by export, with all attributes; warnings of spans left out."""
    rows = Rows(exports.path, [], [], form=exports.form)
    spans: dict[Any, Row] = {}  # in order of the rows
    num_again = 0
    for i, export in enumerate(exports.rows):
        for span in [exports.bad[i]] if i in exports.bad else _spans(export):
            key = len(spans) if isinstance(span, str) or span["spanId"] is None else _key(span, "spanId")
            if key in spans:
                num_again += 1
                continue
            rows.add(exports.numbers[i], span)
            spans[key] = rows.rows[-1]
    counted = {key for key, span in spans.items() if not set(INPUT).isdisjoint(span)}
    outer = set()
    for key in counted:
        if not NO_TEXT.search(str(spans[key].get("gen_ai.operation.name"))):
            above = _key(spans[key], "parentSpanId")
            while above in spans and above not in outer:
                outer.add(above)
                above = _key(spans[above], "parentSpanId")
    left_out = {
        "spans without token counts": len(spans) - len(counted) - len(rows.bad),
        "spans around the span of a request": len(counted & outer),
        "spans exported again": num_again,
    }
    requests = rows.take([i for i, key in enumerate(spans) if i in rows.bad or (key in counted and key not in outer)])
    return replace(
        requests, warnings=tuple(f"{count} {kind} are left out" for kind, count in left_out.items() if count)
    )


def _key(span: Row, name: str) -> tuple[str, str]:
    return str(span["traceId"]), str(span[name])


def _spans(export: Row) -> Iterator[Row]:
    for resources in RESOURCES:
        for resource in _dicts(export.get(resources)):
            for scopes in SCOPES:
                for scope in _dicts(resource.get(scopes)):
                    yield from map(_row, _dicts(scope.get("spans")))


def _dicts(value: Any) -> Iterator[Row]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _row(span: Row) -> Row:
    """A span's times, attributes and status."""
    row: Row = {}
    for attribute in _dicts(span.get("attributes")):
        value = attribute.get("value")
        if isinstance(value, dict) and len(value) == 1:
            row[str(attribute.get("key"))] = next(iter(value.values()))
    if set(OUTPUT).isdisjoint(row):
        row[OUTPUT[0]] = 0
    status = span.get("status")
    ended = next((row[name] for name in FINISH if name in row), None)
    if isinstance(ended, dict):  # a list of one answer's reason
        ended = next((next(iter(entry.values()), None) for entry in _dicts(ended.get("values"))), None)
    row["status"] = "error" if isinstance(status, dict) and status.get("code") in ERROR else ended
    return row | {name: span.get(name, span.get(SNAKE[name])) for name in SPAN}
