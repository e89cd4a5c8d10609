"""Traces of gateways and servers: columns of one's own, LiteLLM's and OpenAI's exports."""

import json
from pathlib import Path

import pytest

from dsim.traces import load

from .files import refusal, rows_of, save

MINE = "arrival=created_at,input=prompt_tokens,output=completion_tokens"
OWN = b"""\
created_at,prompt_tokens,completion_tokens,tenant
2026-03-01T10:00:00Z,374,44,a
2026-03-01T10:00:02.500Z,396,109,b
"""
# As /spend/logs answers, with a request that failed.
LITELLM = b"""\
[{"request_id": "chatcmpl-1", "call_type": "acompletion", "spend": 0.002, "total_tokens": 30, "prompt_tokens": 20,
  "completion_tokens": 10, "startTime": "2026-03-01T10:00:00.000Z", "endTime": "2026-03-01T10:00:01.200Z",
  "model": "sdar-8b", "status": "success", "metadata": {"user_api_key": "88dc"}},
 {"request_id": "chatcmpl-2", "call_type": "acompletion", "spend": 0.0, "total_tokens": 0, "prompt_tokens": 0,
  "completion_tokens": 0, "startTime": "2026-03-01T10:00:00.500Z", "endTime": "2026-03-01T10:00:00.600Z",
  "model": "sdar-8b", "status": "failure", "metadata": {}},
 {"request_id": "chatcmpl-3", "call_type": "acompletion", "spend": 0.004, "total_tokens": 90, "prompt_tokens": 50,
  "completion_tokens": 40, "startTime": "2026-03-01T10:00:02.000Z", "endTime": "2026-03-01T10:00:03.900Z",
  "model": "sdar-8b", "status": "success", "metadata": {}}]
"""
RESPONSES = b"""\
{"id": "chatcmpl-1", "object": "chat.completion", "created": 1772359200, "model": "m", "usage": \
{"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}}
{"id": "chatcmpl-2", "object": "chat.completion", "created": 1772359203, "model": "m", "usage": \
{"prompt_tokens": 50, "completion_tokens": 40, "total_tokens": 90}}
"""


def test_a_trace_with_columns_of_its_own_is_read_by_their_names(tmp_path: Path) -> None:
    found = load(save(tmp_path, OWN), columns=f"{MINE}, slo_class=tenant")
    assert rows_of(found) == [(0, 374, 44), (2.5, 396, 109)]
    assert found.extras == {"slo_class": ["a", "b"]}
    assert found.notes.warnings == ()


def test_numbers_in_a_column_of_times_are_seconds_unless_they_are_dates_of_another_unit(tmp_path: Path) -> None:
    times = (1_772_359_200_000, 1_772_362_800_000)
    path = save(tmp_path, [{"created_at": t, "prompt_tokens": 5, "completion_tokens": 6} for t in times])
    dated = load(path, columns=MINE)
    assert (dated.arrival.tolist(), "read as ms since 1970 (from 2026-03-01)" in dated.notes.warnings[0]) == (
        [0, 3600], True,
    )  # fmt: skip
    assert load(path, columns=MINE, time_unit="s").arrival.tolist() == [0, 3_600_000]


def test_a_column_may_lie_within_an_object(tmp_path: Path) -> None:
    path = save(tmp_path, [{"at": at, "usage": {"in": 3, "out": 4}} for at in (5, 7)])
    assert rows_of(load(path, columns="arrival=at,input=usage.in,output=usage.out")) == [(0, 3, 4), (2, 3, 4)]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ("arrival=created,input=prompt_tokens,output=completion_tokens",
         "{path}:1: no column created (--columns arrival=created) (did you mean created_at?), expected one of: "
         "created_at, prompt_tokens, completion_tokens, tenant"),
        ("arrival=created_at,input=prompt_tokens",
         "--columns arrival=created_at,input=prompt_tokens lacks output, expected "
         "arrival=COLUMN,input=COLUMN,output=COLUMN"),
        ("arrivals=created_at",
         "--columns has 'arrivals=created_at', expected arrival=COLUMN,input=COLUMN,output=COLUMN and, where there "
         "are, id, session_id, slo_class, model, max_tokens, first, end, status, kind"),
        ("arrival=created_at,input=tenant,output=completion_tokens",
         "{path}:2: tenant is \"a\", expected a number of at least 0 (--skip-bad leaves bad rows out)"),
        ("arrival=tenant,input=prompt_tokens,output=completion_tokens",
         "{path}:2: tenant is \"a\", expected a date and time such as 2026-03-01T10:00:00Z (--skip-bad "
         "leaves bad rows out)"),
    ],
)  # fmt: skip
def test_a_column_that_is_not_there_or_not_numbers_is_told_in_one_line(
    tmp_path: Path, columns: str, complaint: str
) -> None:
    path = save(tmp_path, OWN)
    assert refusal(path, columns=columns) == complaint.format(path=path)
    assert "and --format is azure, expected one of them" in refusal(path, columns=columns, format="azure")


def test_litellms_spend_logs_load_and_their_failures_are_counted(tmp_path: Path) -> None:
    page = {"data": json.loads(LITELLM), "total": 3, "page": 1}
    for text in (LITELLM, json.dumps(page), json.dumps(page, indent=2)):
        found = load(save(tmp_path, text))
        assert (found.notes.format, found.notes.failed_in_trace) == ("litellm", 1)
        assert rows_of(found) == [(0, 20, 10), (2, 50, 40)]
        assert found.extras["id"] == ["chatcmpl-1", "chatcmpl-3"]


def test_logged_responses_of_openais_api_load(tmp_path: Path) -> None:
    found = load(save(tmp_path, RESPONSES))
    assert (found.notes.format, rows_of(found)) == ("openai", [(0, 20, 10), (3, 50, 40)])
