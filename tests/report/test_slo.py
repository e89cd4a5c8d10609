"""SLO specs: what they mean, and what a wrong one is told."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine.errors import DsimError
from dsim.report.slo import METRIC_KEYS, STATS, UNITS, Slo


@pytest.mark.parametrize(
    ("text", "metric", "bound", "stat"),
    [
        ("ttft=2s", "ttft", 2.0, None),
        ("norm_latency=50ms", "norm_latency", 0.05, None),
        ("p90:tpot_chunk=50ms", "tpot_chunk", 0.05, "p90"),
        ("mean:e2el=3s", "e2el", 3.0, "mean"),
        ("p99:itl=800us", "itl", 0.0008, "p99"),
        (" p50 : ttfb = 1.5 s ", "ttfb", 1.5, "p50"),
    ],
)
def test_an_slo_says_metric_bound_and_statistic(text: str, metric: str, bound: float, stat: str | None) -> None:
    slo = Slo.parse(text)
    assert (slo.metric, slo.stat) == (metric, stat)
    assert slo.bound == pytest.approx(bound, rel=1e-12)
    assert str(slo) == text.strip()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft=2", "bound '2' has no unit, expected s, ms or us"),
        ("ttft=2min", "unit 'min' is unknown, expected s, ms or us"),
        ("ttft=", "bound '' is not a time above zero"),
        ("ttft=0s", "bound is 0s, expected a time above zero"),
        ("ttft=-1s", "bound '-1s' is not a time above zero"),
        ("ttft=nans", "bound 'nans' is not a time above zero"),
        ("ttft", "expected [stat:]metric=bound"),
        ("ttft=1s=2s", "expected [stat:]metric=bound"),
        ("latency=2s", "unknown metric 'latency', expected one of " + ", ".join(METRIC_KEYS)),
        ("p42:ttft=2s", "unknown statistic 'p42', expected one of " + ", ".join(STATS)),
        (":ttft=2s", "unknown statistic '', expected one of"),
        ("itl=20ms", "needs a statistic, such as p99:itl=20ms"),
    ],
)
def test_a_wrong_slo_is_told_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(DsimError) as error:
        Slo.parse(text)
    assert str(error.value).startswith(f"SLO '{text}': ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_an_slo_or_a_dsim_error(text: str) -> None:
    with contextlib.suppress(DsimError):
        assert Slo.parse(text).bound > 0


@given(st.sampled_from(METRIC_KEYS), st.sampled_from(STATS), st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_an_slo_reads_back_from_its_text(metric: str, stat: str, number: int, unit: str) -> None:
    slo = Slo.parse(f"{stat}:{metric}={number}{unit}")
    assert Slo.parse(str(slo)) == slo
    assert slo.bound == pytest.approx(number * UNITS[unit])
