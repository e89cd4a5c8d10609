"""Traces of gateways and servers: columns of one's own, LiteLLM's and OpenAI's exports, and vLLM's log."""

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
USAGE = {
    "object": "page",
    "data": [
        {
            "object": "bucket", "start_time": 1000, "end_time": 1060,
            "results": [
                {"object": "organization.usage.completions.result", "input_tokens": 10, "output_tokens": 5,
                 "num_model_requests": 3, "model": None, "input_cached_tokens": 0},
            ],
        },
        {"object": "bucket", "start_time": 1060, "end_time": 1120, "results": []},
        {
            "object": "bucket", "start_time": 1120, "end_time": 1180,
            "results": [{"input_tokens": 8, "output_tokens": 4, "num_model_requests": 2}],
        },
    ],
    "has_more": False,
}  # fmt: skip
USAGE_CSV = b"""\
start_time,end_time,start_time_iso,end_time_iso,num_model_requests,model,input_tokens,output_tokens
1000,1060,1970-01-01T00:16:40+00:00,1970-01-01T00:17:40+00:00,3,m,10,5
1060,1120,1970-01-01T00:17:40+00:00,1970-01-01T00:18:40+00:00,,,,
1120,1180,1970-01-01T00:18:40+00:00,1970-01-01T00:19:40+00:00,2,m,8,4
"""
SPREAD = [(0, 4, 2), (20, 3, 2), (40, 3, 1), (125 - 0, 4, 2), (155, 4, 2)]
RESPONSES = b"""\
{"id": "chatcmpl-1", "object": "chat.completion", "created": 1772359200, "model": "m", "usage": \
{"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}}
{"id": "chatcmpl-2", "object": "chat.completion", "created": 1772359203, "model": "m", "usage": \
{"prompt_tokens": 50, "completion_tokens": 40, "total_tokens": 90}}
"""
SERVER = "(APIServer pid=7) INFO:     Started server process [7]\n"
ACCESS = '(APIServer pid=7) INFO:     10.80.23.18:51408 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
OLD_VLLM = (
    "INFO 10-01 18:43:27 [logger.py:36] Received request cmpl-1-0: prompt: 'How, to make: pizza', params: "
    "SamplingParams(n=1, max_tokens=16, min_tokens=0), prompt_token_ids: [4340, 311, 1304, 22502], "
    "lora_request: None.\n"
    "INFO 10-01 18:43:29 logger.py:36] Received request cmpl-2-0: prompt: None, params: "
    "SamplingParams(n=1, max_tokens=64), prompt_token_ids: [1, 2, 3], lora_request: None.\n"
    "INFO 10-01 18:43:31 [logger.py:70] Generated response cmpl-1-0 (streaming complete): output: 'Knead', "
    "output_token_ids: [5, 6], finish_reason: stop\n"
)
NEW_VLLM = (
    "(APIServer pid=7) DEBUG 12-31 23:59:58 [logger.py:39] Request chatcmpl-a details: prompt: 'sixteen bytes ok', "
    "prompt_token_ids: None, prompt_embeds shape: None.\n"
    "(APIServer pid=7) INFO 12-31 23:59:58 [logger.py:49] Received request chatcmpl-a: params: "
    "SamplingParams(n=1, max_tokens=100), lora_request: None.\n"
    "(APIServer pid=7) DEBUG 01-01 00:00:01 [logger.py:39] Request chatcmpl-b details: prompt: None, "
    "prompt_token_ids: [7, 8], prompt_embeds shape: None.\n"
    "(APIServer pid=7) INFO 01-01 00:00:01 [logger.py:49] Received request chatcmpl-b: params: "
    "SamplingParams(n=1, max_tokens=100), lora_request: None.\n"
    "(APIServer pid=7) INFO 01-01 00:00:02 [logger.py:80] Generated response chatcmpl-b: output: 'x', "
    "output_token_ids: [9], finish_reason: stop\n"
)


def test_a_trace_with_columns_of_its_own_is_read_by_their_names(tmp_path: Path) -> None:
    found = load(save(tmp_path, OWN), columns=f"{MINE}, slo_class=tenant")
    assert rows_of(found) == [(0, 374, 44), (2.5, 396, 109)]
    assert found.extras == {"slo_class": ["a", "b"]}
    assert found.notes.warnings == ()


def test_numbers_in_a_column_of_times_are_seconds_unless_said_and_doubted(tmp_path: Path) -> None:
    times = (1_772_359_200_000, 1_772_362_800_000)
    path = save(tmp_path, [{"created_at": t, "prompt_tokens": 5, "completion_tokens": 6} for t in times])
    doubted = load(path, columns=MINE)
    assert doubted.arrival.tolist() == [0, 3_600_000]
    assert "another --time-unit may be meant" in doubted.notes.warnings[0]
    assert load(path, columns=MINE, time_unit="ms").arrival.tolist() == [0, 3600]


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
         "are, id, session_id, slo_class, model, max_tokens, first, end, status"),
        ("arrival=created_at,input=tenant,output=completion_tokens",
         "{path}:2: tenant is \"a\", expected a number of at least 0 (--skip-bad leaves bad rows out)"),
        ("arrival=tenant,input=prompt_tokens,output=completion_tokens",
         "{path}:2: tenant is \"a\", expected a date and time (--skip-bad leaves bad rows out)"),
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


@pytest.mark.parametrize("text", [json.dumps(USAGE), json.dumps(USAGE, indent=1), json.dumps(USAGE["data"]), USAGE_CSV])
def test_sums_of_openais_usage_become_requests_and_say_so(tmp_path: Path, text: str | bytes) -> None:
    found = load(save(tmp_path, text))
    assert (found.notes.format, rows_of(found)) == ("openai-usage", SPREAD)
    assert "rows are sums: the 5 requests arrive at equal distances with mean lengths" in found.notes.warnings[0]


def test_a_sum_without_an_end_or_of_too_many_is_a_bad_row(tmp_path: Path) -> None:
    bad = save(tmp_path, USAGE_CSV.replace(b"1120,1180,", b"1120,1120,"))
    assert refusal(bad).startswith(f"{bad}:4: end_time is 1120, expected more than start_time, which is 1120")
    huge = save(tmp_path, USAGE_CSV.replace(b"+00:00,3,m", b"+00:00,9999999999,m"))
    assert 'num_model_requests is "9999999999", expected at most 10000000 ' in refusal(huge)


def test_logged_responses_of_openais_api_load(tmp_path: Path) -> None:
    found = load(save(tmp_path, RESPONSES))
    assert (found.notes.format, rows_of(found)) == ("openai", [(0, 20, 10), (3, 50, 40)])


def test_vllms_log_gives_its_requests_and_says_what_it_guessed(tmp_path: Path) -> None:
    found = load(save(tmp_path, SERVER + OLD_VLLM + ACCESS))
    assert (found.notes.format, found.extras["id"]) == ("vllm-log", ["cmpl-1-0", "cmpl-2-0"])
    assert rows_of(found) == [(0, 4, 2), (2, 3, 64)]
    assert found.notes.warnings == (
        "times of a vLLM log are whole seconds: a replay may want --jitter 1",
        "1 requests have no response line: max_tokens, the upper limit, is used",
    )
    newer = load(save(tmp_path, SERVER + ACCESS + NEW_VLLM))  # over new year
    assert rows_of(newer) == [(0, 4, 100), (3, 2, 1)]
    assert "1 lengths are estimates from the text (4 bytes a token)" in newer.notes.warnings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SERVER + ACCESS * 3, " holds 3 access lines and no `Received request` lines: neither times nor lengths, exp"),
        ("".join(line + "\n" for line in NEW_VLLM.splitlines() if " INFO " in line),
         ":1: request chatcmpl-a has no prompt length, expected the log of vllm serve --enable-log-requests"),
        ("INFO 10-01 18:43:27 [logger.py:36] Received request a: prompt: 'hi', params: (max_tokens=" + "9" * 5000,
         f":1: max_tokens is {'9' * 77}..., expected at most 10000000"),
    ],
)  # fmt: skip
def test_a_server_s_log_without_lengths_is_no_trace(tmp_path: Path, text: str, says: str) -> None:
    path = save(tmp_path, text)
    assert refusal(path).startswith(f"{path}{says}")
