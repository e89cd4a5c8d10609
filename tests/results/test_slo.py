"""SLO specs: what they mean, and what a wrong one is told."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine.errors import DsimError
from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, StepTotals
from dsim.results.metrics import STATS, summarize
from dsim.results.slo import METRIC_KEYS, UNITS, Slo

from ..checks import cases, refused


@cases(
    "text metric bound stat",
    ("ttft=2s", "ttft", 2.0, None),
    ("mean:e2el=3s", "e2el", 3.0, "mean"),
    ("p99:itl=800us", "itl", 0.0008, "p99"),
    (" p50 : tpot = 1.5 s ", "tpot", 1.5, "p50"),
    ("99.5 %:ttft=2s", "ttft", 2.0, "99.5%"),
)
def test_an_slo_says_metric_bound_and_statistic(text: str, metric: str, bound: float, stat: str | None) -> None:
    slo = Slo.parse(text)
    assert (slo.metric, slo.stat, slo.bound) == (metric, stat, pytest.approx(bound, rel=1e-12))
    assert str(slo) == text.strip()


@cases(
    "text means",
    (" 50 ms / token ", "norm_latency=50 ms"),
    ("95%:0.05s/token", "95%:norm_latency=0.05s"),
    ("chat/p90:50ms/token", "chat/p90:norm_latency=50ms"),
)
def test_a_plain_target_is_a_bound_on_norm_latency(text: str, means: str) -> None:
    assert Slo.parse(text) == Slo.parse(means)
    assert str(Slo.parse(text)) == means


@cases(
    "text says",
    ("ttft=2", "bound is '2', expected a time above zero in s, ms or us"),
    ("ttft=0s", "bound is '0s', expected a time above zero in s, ms or us"),
    ("latency=2s", "unknown metric 'latency' (did you mean norm_latency?), expected one of " + ", ".join(METRIC_KEYS)),
    ("0%:ttft=2s", "statistic is '0%', expected one of mean, p50, p90, p95, p99, or a share above 0% and up to 100%"),
    ("p42:ttft=2s", "statistic is 'p42', expected one of " + ", ".join(STATS)),
    ("itl=20ms", "expected a statistic and no class: p99:itl"),
)
def test_a_wrong_slo_is_told_what_was_expected(text: str, says: str) -> None:
    with refused(says=says) as error:
        Slo.parse(text)
    assert str(error.value).startswith(f"SLO '{text}': ")


@given(st.text(max_size=30))
def test_any_text_is_an_slo_or_a_dsim_error(text: str) -> None:
    with contextlib.suppress(DsimError):
        assert Slo.parse(text).bound > 0


@given(st.sampled_from(METRIC_KEYS), st.sampled_from(STATS), st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_an_slo_reads_back_from_its_text(metric: str, stat: str, number: int, unit: str) -> None:
    slo = Slo.parse(f"{stat}:{metric}={number}{unit}")
    assert Slo.parse(str(slo)) == slo
    assert slo.bound == pytest.approx(number * UNITS[unit])


def test_an_slo_may_name_a_class_of_the_trace() -> None:
    assert (Slo.parse("chat/p90:ttft=1s").slo_class, Slo.parse("batch/ttft=9s").slo_class) == ("chat", "batch")
    assert Slo.parse("ttft=9s").slo_class is None
    classes = {"chat", "batch"}
    for text, known, says in (
        ("video/ttft=1s", classes, "no request is of class 'video': the trace holds batch, chat"),
        ("chat/ttft=1s", set(), "no request is of class 'chat': the trace holds no column slo_class"),
        ("chat/p99:itl=1s", classes, "itl is pooled over all requests, expected a statistic and no class: p99:itl"),
        ("/ttft=1s", classes, "expected [class/][stat:]metric=bound, such as ttft=2s or 50ms/token"),
    ):
        with refused() as error:
            Slo.parse(text).check_class(known)
        assert str(error.value) == f"SLO '{text}': {says}"


def twenty() -> dict[str, Any]:
    """Completed requests with a ttft of 1 to 20 s."""
    columns: dict[str, Any] = {name: np.zeros(20, dtype) for name, dtype in REQUEST_COLUMNS.items()}
    columns["status"][:] = STATUSES.index("completed")
    return columns | {"first_emission": np.arange(1.0, 21.0), "num_tokens": np.ones(20, np.int32)}


def test_an_slo_of_a_class_judges_no_other() -> None:
    columns = twenty()
    # The even ones are chat's, and the last one is of no class.
    columns["slo_class"] = np.array(["batch", "chat"] * 9 + ["batch", None], dtype=object)
    texts = ("chat/ttft=8s", "batch/ttft=13s", "chat/mean:ttft=9s", "batch/90%:ttft=17s", "95%:ttft=19s")
    run = summarize("any", columns, StepTotals(), [Slo.parse(text) for text in texts])
    # chat: 2 to 18 s, four of nine within 8 s. batch: 1 to 19 s, seven of ten within 13 s.
    assert [v.attainment for v in run.slos if v.slo != "chat/mean:ttft=9s"] == [pytest.approx(4 / 9), 0.7, 0.9, 0.95]
    assert (run.slos[2].observed_ms, run.slos[2].met) == (10_000.0, False)
    assert [v.met for v in run.slos] == [None, None, False, True, True]
    # Good: four of chat's, seven of batch's, and the one that no SLO judges.
    assert run.slo_attainment == 12 / 20


def test_a_run_meets_a_share_when_enough_arrivals_meet_the_bound() -> None:
    run = summarize("any", twenty(), StepTotals(), [Slo.parse(f"{share}%:ttft=19s") for share in (90, 95, 96)])
    assert [verdict.attainment for verdict in run.slos] == [0.95] * 3
    assert [verdict.met for verdict in run.slos] == [True, True, False]
    # It judges the run: no request is good or bad by it.
    assert run.goodput is None
