"""The page of a fitted profile shows the verdict, the points and what was held out, without a network."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import dsim
from dsim.engine.latency import CacheOverhead
from dsim.profiler.profile import Profile
from dsim.profiler.steplog import StepLog, profile_of_log, read_log
from dsim.report.html import to_html
from dsim.report.profile import Profiled

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
    assert re.findall(r'class="plot" id="(\w+)"', html) == ["curve", "residuals"]
    assert "Valid: 119 step shapes fitted; 30 held out are predicted to" in html
    assert "Estimated, not measured." in html
    assert "decode, held out" in html
    assert '"500","1,000","2,000"' in html  # an axis of decades spells its numbers out
    for p in profile.commit_fits[0].predictions:
        assert f'<th scope="row" class="words">{p.name}</th><td>{p.measured:.3g}</td><td>{p.predicted:.3g}</td>' in html
    assert 'src="http' not in html


def test_a_page_shows_the_overhead_of_caches_where_there_is_one(profile: Profile, log: StepLog, html: str) -> None:
    cache_overhead = (CacheOverhead("MaskKV", "full", 0.00125, 2e-6),)
    own = drawn(replace(profile, latency=replace(profile.latency, cache_overhead=cache_overhead)), log)
    assert '<tr><th scope="row" class="words">MaskKV</th><td class="words">full</td><td>1.25</td><td>2</td></tr>' in own
    assert "Overhead of full-sequence caches" in own
    assert "Overhead of" not in html


def traces(html: str) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of what the figure of latencies shows, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*)</script>', html)
    assert found is not None
    return {t["name"]: (t["x"], t["y"]) for t in json.loads(found[1])["curve"]["data"]}


def test_captured_steps_are_drawn_as_a_staircase(profile: Profile, log: StepLog, html: str) -> None:
    # Of rows that cost nothing, so that a stair is level: 300 tokens cost what 512 do.
    level = replace(profile.latency, attention=0.0, kv_read=0.0, host_request=0.0)
    latency = replace(level, knots=((1.0, 1e-3),), slope=1e-4, launch=0.2, graph_tokens=700)
    own = drawn(replace(profile, latency=latency), log)
    assert "decode steps of at most 700 tokens are padded to 1, 2, 4" in own
    shown = traces(own)
    x, y = next(values for name, values in shown.items() if name.startswith("fit, "))
    curve = dict(zip(x, y, strict=True))
    for edge, last in ((64, 128), (128, 256), (256, 512), (512, 700)):
        assert curve[edge] < curve[edge + 1] == pytest.approx(curve[last])
    assert curve[701] >= 0.2 * 1e3 > 2 * curve[700]  # launched, and not padded
    # Beside the same points, at the tokens that they were planned with.
    plain = traces(html)
    for name in ("decode", "prefill"):
        assert shown[name] == plain[name]
    assert "tokens are padded" not in html


def test_a_fit_that_is_not_valid_says_so_first(profile: Profile, log: StepLog) -> None:
    bad = replace(
        profile,
        origin="measured",
        fit=replace(profile.fit, doubts=("noise: a < b",)),
        commit_fits=(replace(profile.commit_fits[0], doubts=("too few",)),),
    )
    assert bad.doubts == ["noise: a < b", "sharegpt-focus at threshold 0.9: too few"]
    html = drawn(bad, log)
    assert "<strong>DOUBTED</strong> noise: a &lt; b" in html
    assert "Not valid: 119 step shapes fitted" in html
    assert "Estimated, not measured." not in html


def test_a_result_survives_json_without_its_evidence(profile: Profile, log: StepLog) -> None:
    result = Profiled(profile, command="dsim profile", evidence=log.steps)
    again = Profiled.from_json(result.to_json())
    assert again == replace(result, evidence=None)
    assert (len(result.to_frame()), len(again.to_frame())) == (len(log.steps), 0)
