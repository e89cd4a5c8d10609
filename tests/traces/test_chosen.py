"""A team's own log: rows of other models, embeddings, failures, cached answers, and what its clients waited."""

import json
from pathlib import Path
from typing import Any

from dsim.traces import load

from ..checks import cases
from .files import refusal, save, spend

ROWS = [
    spend("00.000", "00.300", "01.300"),
    spend("00.500", "00.500", "00.501", cache_hit="True"),
    spend("00.700", "00.800", "00.800", call_type="aembedding", model="embed", completion_tokens=0),
    spend("01.000", "01.200", "01.400", status="failure", completion_tokens=3),
    spend("02.000", "03.900", "03.900", model="other"),
    spend("03.000", "03.500", "04.500"),
]


def of(rows: list[dict[str, Any]], lines: bool) -> Path:
    path = Path("spend.json")
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return path


@cases("lines", False, True)
def test_a_log_is_of_the_requests_that_its_server_answered(lines: bool) -> None:
    found = load(of(ROWS, lines))
    assert (found.name, found.arrival.tolist(), found.notes.failed_in_trace) == ("spend", [0, 2, 3], 1)
    assert found.notes.warnings == (
        "1 of 6 rows are no requests for text (embeddings, images or others), and left out",
        "1 of 6 rows were answered from the gateway's cache, and not by the server, and left out",
        "the log mixes 2 models (sdar-8b: 3, other: 1): --only model=NAME takes one",
    )
    waits = zip(found.extras["measured_ttft"], found.extras["measured_e2el"], strict=True)
    assert list(waits) == [(0.3, 1.3), (None, 1.9), (0.5, 1.5)]


@cases("only arrivals", ("model=sdar-8b", [0, 3]), ("model = other", [0]), ("status=success", [0, 2, 3]))
def test_rows_are_taken_by_any_column(only: str, arrivals: list[float]) -> None:
    assert load(of(ROWS, True), only=only).arrival.tolist() == arrivals


@cases(
    "only says",
    ("model=SDAR-8", "no row is of model SDAR-8 (did you mean sdar-8b?), expected one of sdar-8b: 3, other: 1"),
    ("modle=other", "no column modle (--only) (did you mean model?), expected one of: "),
    ("model", "--only is 'model', expected model=NAME or COLUMN=VALUE"),
)
def test_rows_that_are_not_there_are_told_with_those_that_are(only: str, says: str) -> None:
    assert says in refusal(of(ROWS, False), only=only)


def test_a_published_trace_keeps_its_models_unless_one_is_asked_for() -> None:
    path = save("Timestamp,Model,Request tokens,Response tokens\n0,ChatGPT,4,5\n1,GPT-4,6,7\n")
    assert (len(load(path)), load(path).notes.warnings) == (2, ())
    assert load(path, only="model=GPT-4").input_length.tolist() == [6]
