"""A gateway's log with start, first token and end is a measured run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dsim.api.measured import import_run
from dsim.comparison.clients.gateway import read_measured
from dsim.engine.errors import DsimError

OWN = "arrival=at,first=first,end=end,input=in,output=out"
CSV = "at,first,end,in,out\n10,10.25,11.25,20,11\n12,12.5,13,30,6\n"


def row(start: str, first: str | None, end: str, tokens: int, **more: Any) -> dict[str, Any]:
    """As LiteLLM's /spend/logs answers."""
    day = "2026-03-01T10:00:{}Z"
    return {
        "call_type": "acompletion", "prompt_tokens": 20, "completion_tokens": tokens, "startTime": day.format(start),
        "completionStartTime": first and day.format(first), "endTime": day.format(end), "model": "sdar-8b",
        "status": "success", "metadata": {},
    } | more  # fmt: skip


SPEND = [
    row("00.000", "00.300", "01.300", 11),
    row("00.500", None, "00.600", 0, status="failure"),
    row("00.700", None, "00.800", 0, call_type="aembedding", model="embed"),
    row("02.000", "03.900", "03.900", 40, model="other"),
    row("03.000", "03.500", "04.500", 11),
]


def spend(folder: Path) -> Path:
    path = folder / "spend.json"
    path.write_text(json.dumps(SPEND))
    return path


def test_litellms_log_gives_the_times_of_one_model(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^1 of 5 rows are embeddings, and left out$"):
        run = import_run(spend(tmp_path), only="model=sdar-8b").run
    (summary,) = run.info["policies"]
    assert (summary["completed"], summary["rejected"], run.info["client"]["errors"]) == (2, 1, {"failure": 1})
    assert summary["ttft_ms"]["p50"] == pytest.approx(400.0)
    assert summary["tpot_ms"]["p50"] == pytest.approx(100.0)
    assert summary["e2el_ms"]["p50"] == pytest.approx(1400.0)


def test_mixed_models_and_answers_that_were_not_streamed_are_warned_of(tmp_path: Path) -> None:
    log, warnings = read_measured(spend(tmp_path))
    assert warnings[1:] == [
        "the log mixes 2 models (sdar-8b: 3, other: 1): --only model=NAME takes one",
        "1 of 4 answers have no time of their first token: their ttft and tpot are missing",
    ]
    assert [math.isnan(sent.first) for sent in log.requests] == [False, True, True, False]


def test_any_log_is_read_by_its_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "access.csv"
    path.write_text(CSV)
    log, _ = read_measured(path, OWN)
    assert [(s.first - s.sent, s.last - s.sent, s.input_length, s.output_length) for s in log.requests] == [
        (0.25, 1.25, 20, 11), (0.5, 1.0, 30, 6),
    ]  # fmt: skip
    assert read_measured(path, OWN, time_unit="ms")[0].requests[0].first == 0.01025


@pytest.mark.parametrize(
    ("text", "columns", "only", "says"),
    [
        (CSV, None, None, "keys at, first, end, in, out are of no known trace, expected one of: "),
        (CSV, "arrival=at,first=first", None, "lacks end, expected arrival=START,first=FIRST_TOKEN,end=END"),
        (CSV.replace("12.5", "9"), OWN, None, "csv:3: first is -3 s and end is 1 s after at, expected the first"),
        (CSV.replace("12.5", "nan"), OWN, None, 'csv:3: first is "nan", expected a finite number'),
        (CSV.replace(",30,6", ",-1,6"), OWN, None, 'csv:3: in is "-1", expected at least 0'),
        (CSV, OWN, "model=a", "no column model (--only), expected one of: at, first, end, in, out"),
        (CSV, OWN, "in=21", "no row is of in 21, expected one of 20: 1, 30: 1"),
    ],
)
def test_a_wrong_log_is_told_what_was_expected(
    tmp_path: Path, text: str, columns: str | None, only: str | None, says: str
) -> None:
    path = tmp_path / "access.csv"
    path.write_text(text)
    with pytest.raises(DsimError) as error:
        read_measured(path, columns, only)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["startTime", "prompt_tokens"])
def test_a_number_of_hundreds_of_digits_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "spend.json"
    path.write_text(json.dumps([SPEND[0] | {name: 10**400}]))
    with pytest.raises(DsimError, match=f"{name} is 1000"):
        read_measured(path, None, None)
