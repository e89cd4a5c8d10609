"""The page of a fitted profile shows the verdict, the points and what was held out, without a network."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import dsim
from dsim.profiler.profile import Profile
from dsim.profiler.steplog import StepLog, profile_of_log, read_log
from dsim.report.html import to_html
from dsim.report.profile_page import Profiled

EXAMPLE = Path(dsim.__file__).parent / "examples" / "steplog.jsonl"


@pytest.fixture(scope="module")
def log() -> StepLog:
    return read_log(EXAMPLE)


@pytest.fixture(scope="module")
def profile(log: StepLog) -> Profile:
    return profile_of_log(log, "mine", "examples/steplog.jsonl")


def drawn(profile: Profile, log: StepLog) -> str:
    return to_html(Profiled(profile, evidence=log.steps).page())


@pytest.fixture(scope="module")
def html(profile: Profile, log: StepLog) -> str:
    return drawn(profile, log)


def test_a_page_shows_fit_residuals_and_yields(profile: Profile, log: StepLog, html: str) -> None:
    assert html == drawn(profile, log)
    assert re.findall(r'class="plot" id="(\w+)"', html) == ["curve"]
    assert "Valid: 119 step shapes fitted; 30 held out are predicted to" in html
    assert "Estimated, not measured." in html
    assert "decode, held out" in html
    assert '"500","1,000","2,000"' in html  # an axis of decades spells its numbers out
    for p in profile.commit_fits[0].predictions:
        assert f'<th scope="row" class="words">{p.name}</th><td>{p.measured:.3g}</td><td>{p.predicted:.3g}</td>' in html
    assert 'src="http' not in html


def traces(html: str) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of what the figure of latencies shows, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*)</script>', html)
    return {t["name"]: (t["x"], t["y"]) for t in json.loads(found[1])["curve"]["data"]}


def test_a_fit_that_is_not_valid_says_so_first(profile: Profile, log: StepLog) -> None:
    bad = replace(
        profile,
        origin="measured",
        fit=replace(profile.fit, doubts=("noise: a < b",)),
        commit_fits=(replace(profile.commit_fits[0], doubts=("too few",)),),
    )
    assert bad.doubts == ["noise: a < b", "sharegpt-focus at threshold 0.9: too few"]
    html = drawn(bad, log)
    assert "DOUBTED noise: a &lt; b" in html
    assert "Not valid: 119 step shapes fitted" in html
    assert "Estimated, not measured." not in html


def test_a_result_survives_json_without_its_evidence(profile: Profile, log: StepLog) -> None:
    result = Profiled(profile, command="dsim profile", evidence=log.steps)
    again = Profiled.from_json(result.to_json())
    assert again == replace(result, evidence=None)
    assert (len(result.to_frame()), len(again.to_frame())) == (len(log.steps), 0)
