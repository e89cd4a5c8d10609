"""A search's page: the default's failings first, one sign for a gain, and no column without a number."""

from dataclasses import replace
from typing import Any

from dsim.planner.quality import Quality
from dsim.planner.replicate import Interval
from dsim.planner.search import Trial
from dsim.planner.tune import Finalist, Tuned
from dsim.report.page import Table
from dsim.report.search_page import gain_text, tune_page
from dsim.results.world import World, setup_of

GAIN = Interval(0.2, 0.19, 0.21)


def finalist(policy: str, cost: float, **more: Any) -> Finalist:
    values: dict[str, Any] = {
        "policy": policy, "replicas": 2, "untested": (), "quality": Quality(1.0, ""),
        "value": Interval(cost, cost - 0.01, cost + 0.01), "gain": GAIN, "meets_run_slos": 1.0, "attainment": 0.99,
    }  # fmt: skip
    return Finalist(**{**values, **more})


def trial(index: int, cost: float, violation: float) -> Trial:
    return Trial(
        trial=index, policy="optimus", replicas=2, state="complete", value=cost,
        violation=violation, reason="", fields={"optimus.max_batch": "none"},
    )  # fmt: skip


TUNED = Tuned(
    objective="cost", unit="$ per 1000 good requests", confirmed=True, winner=finalist("optimus", 2.0),
    default=finalist("lmdeploy-bd32", 2.5), search_gain=0.3, equal=0, num_replays=9, replications=2,
    space={"policy": ("optimus",)}, trials=(trial(0, 2.0, 0.0), trial(1, 3.0, 0.5)), notes=("a note",),
    setup=setup_of(World("azure-conv", slos=("ttft=2s",)), "dsim tune", 2.0, "EUR"), implementations=("dsim",),
    doubted=(), run="dsim replay azure-conv", launch=("vllm serve M --port 8000",),
)  # fmt: skip


def confirmed(tuned: Tuned) -> Table:
    [rows] = [block for block in tune_page(tuned).sections[0].blocks if isinstance(block, Table)]
    return rows


def test_a_default_that_misses_the_slos_is_in_the_headline_with_what_the_best_costs() -> None:
    default = finalist("lmdeploy-bd32", 9.0, meets_run_slos=0.0, attainment=0.712)
    assert tune_page(replace(TUNED, default=default)).answer == (
        "optimus on 2 replicas: a gain in cost of +20.0 % (95 %: +19.0 to +21.0) over lmdeploy-bd32 on 2 replicas, on "
        "traffic that the search never saw. The policy to beat misses an SLO on the run in 100% of replays; the best "
        "that meets them has a cost of 2 EUR per 1000 good requests. The policy to beat meets the SLOs for 71.2 % of "
        "requests, the best for 99.0 %."
    )


def test_less_cost_is_a_gain_above_zero_in_text_table_and_plot() -> None:
    page = tune_page(TUNED)
    assert gain_text(GAIN) == "+20.0 % (95 %: +19.0 to +21.0)"
    assert [row.cells[3] for row in confirmed(TUNED).rows] == ["+20.0 % (95 %: +19.0 to +21.0)", ""]
    history = page.chart
    assert history.chart.data[0]["marker"]["symbol"] == ["circle", "x-thin-open"]
    assert history.chart.data[1]["y"] == [2.0, 2.0]  # the best so far


def test_a_column_in_which_nobody_has_a_number_is_left_out() -> None:
    winner, default = finalist("optimus", 2.0, attainment=None), finalist("ar", 2.5, attainment=None)
    without = replace(TUNED, winner=winner, default=default)
    for tuned in (TUNED, without):
        rows = confirmed(tuned)
        assert ("requests that meet the SLOs" in rows.head) == (tuned is TUNED)
        for column in range(1, len(rows.head)):
            assert any(row.cells[column] for row in rows.rows)


def test_the_text_says_price_trace_and_slos() -> None:
    text = str(TUNED)
    for line in ("Trace: azure-conv, ", "SLOs: ttft=2s", "Price: 2 EUR for a GPU's hour", "Note: a note"):
        assert line in text
