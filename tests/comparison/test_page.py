"""A comparison and a validation, from numbers to JSON, table and page."""

import json

from dsim.comparison.bounds import DISTRIBUTIONS
from dsim.report.html import to_html

from . import examples


def test_results_are_read_as_they_were_written() -> None:
    for result in (examples.comparison(), examples.validated()):
        assert type(result).from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result
        assert result.to_frame()["metric"].tolist() == [*DISTRIBUTIONS] * 2
        assert set(result.to_frame()["error_mean"]) == {-0.02}


def test_the_page_says_the_errors_their_parts_and_what_is_not_paired() -> None:
    lines = str(examples.comparison()).splitlines()
    assert lines[0] == ("UNPAIRED ar: the weights decided the commits of runs/live, so only distributions are compared")
    assert lines[1] == (
        "A request's e2el is off by 3 % on average (MAPE). The mean e2el of unpaired policies is off by at most 2 % "
        "(ar). By mean e2el the twin's choice, chunk:8, is the best."
    )
    assert "Bounds: e2el=1%: chunk:8 has 3.00 %, missed" in lines
    assert "e2el 3 % 2 % 8 % -1.0 % 40 0 0" in [" ".join(line.split()) for line in lines]
    page = to_html(examples.comparison().page())
    assert "11.1 % of 9 steps re-run with recorded latencies were never recorded: they take the profile" in page
    assert "runs/live: live, toy on toy; the draws of profile toy decide the commits" in page
    assert len([note for note in examples.validated().page().notes if note.startswith("Noise floor")]) == 2
