"""A search's page and text: the default's failings first, one sign for a gain, and no column without a number."""

import io
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from dsim.report.text import render
from dsim.report.tune import answer, gain_text, tune_page


def interval(value: float | None, half: float = 0.01) -> dict[str, Any]:
    ends = (None, None) if value is None else (value - half, value + half)
    return {"value": value, "low": ends[0], "high": ends[1], "confidence": 0.95}


def finalist(policy: str, cost: float, gain: float | None, **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "replicas": 2, "quality": {"relative": 1.0, "notes": []},
        "values": {"cost": interval(cost)}, "gains": {"cost": interval(gain)}, "searched": {"cost": cost},
        "meets_run_slos": 1.0, "attainment": 0.99, "untested": [], **more,
    }  # fmt: skip


def info(**more: Any) -> dict[str, Any]:
    return {
        "objectives": {"cost": "$ per 1000 good requests"}, "confirmed": True, "winner": finalist("optimus", 2.0, 0.2),
        "runner_up": None, "default": finalist("lmdeploy-bd32", 2.5, 0.0), "front": [],
        "space": {"optimus": {}}, "notes": [], "num_trials": 3, "num_replays": 9, "replications": 2, "profile": "p",
        "estimated": True, "slos": ["ttft=2s"], "seed": 0, "currency": "EUR", "gpu_hour": 2.0, "equal": 0, **more,
    }  # fmt: skip


TRIALS = pd.DataFrame(
    {"trial": [0, 1], "policy": ["optimus", "optimus"], "replicas": [2, 2], "state": ["complete"] * 2,
     "cost": [2.0, 3.0], "violation": [0.0, 0.5]}
)  # fmt: skip


def test_a_default_that_misses_the_slos_is_in_the_headline_with_what_the_best_costs() -> None:
    default = finalist("lmdeploy-bd32", 9.0, 0.0, meets_run_slos=0.0, attainment=0.712)
    assert answer(info(default=default)) == (
        "optimus on 2 replicas: a gain in cost of +20.0 % (95 %: +19.0 to +21.0) over lmdeploy-bd32 on 2 replicas, on "
        "traffic that the search never saw. The policy to beat misses an SLO on the run in 100% of replays; the best "
        "that meets them costs 2 EUR per 1000 good requests. The policy to beat meets the SLOs for 71.2 % of requests, "
        "the best for 99.0 %."
    )


def test_less_cost_is_a_gain_above_zero_in_text_table_and_plot() -> None:
    page = tune_page(info(), TRIALS)
    assert gain_text(interval(0.2)) == "+20.0 % (95 %: +19.0 to +21.0)"
    [confirmed] = [b for b in page.sections[0].blocks if b.kind == "table"]
    assert [row.cells[3] for row in confirmed.rows] == ["+20.0 % (95 %: +19.0 to +21.0)", ""]
    assert page.chart is not None
    assert page.chart.chart.data[0]["x"] == [0.2]
    assert "+20.0 %" in page.answer


@pytest.mark.parametrize("attainment", [0.99, None])
def test_a_column_in_which_nobody_has_a_number_is_left_out(attainment: float | None) -> None:
    found = info(
        winner=finalist("optimus", 2.0, 0.2, attainment=attainment),
        default=finalist("lmdeploy-bd32", 2.5, 0.0, attainment=attainment),
    )
    page = tune_page(found, TRIALS)
    [confirmed] = [b for b in page.sections[0].blocks if b.kind == "table"]
    assert ("requests that meet the SLOs" in confirmed.head) == (attainment is not None)
    for column in range(1, len(confirmed.head)):
        assert any(row.cells[column] for row in confirmed.rows)


def test_the_text_says_price_trace_and_slos() -> None:
    out = io.StringIO()
    render(tune_page(info(traffic="azure-conv, 10 requests"), TRIALS), Console(file=out))
    for line in ("Trace: azure-conv, 10 requests", "SLOs: ttft=2s", "Price: 2 EUR for a GPU's hour"):
        assert line in out.getvalue().splitlines()


def test_markers_are_explained_where_they_are() -> None:
    page = tune_page(info(), TRIALS)
    [history] = [f for f in page.figures if f.name == "history"]
    assert history.chart.data[0]["marker"]["symbol"] == ["circle", "x-thin-open"]
    assert "● meets every SLO with a statistic, ✕ misses one" in history.caption
