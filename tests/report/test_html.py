"""The page: whole, small, closed to the network, and honest before it is pretty."""

import json
import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.journal import STATUSES, STEP_COLUMNS, StepTotals
from dsim.report.chart import script_json
from dsim.report.run_page import run_html
from dsim.results import curves
from dsim.results.metrics import summarize
from dsim.results.run import read_run
from dsim.results.run_folder import RunWriter
from dsim.results.run_info import RunInfo, TraceInfo

from .fabricate import write_run
from .fixtures import request, request_columns

SPOILED = {"lmdeploy-bd32": "</script><b>&'\""}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report") / "run"
    write_run(folder, num_requests=200, rate=12.0, policies=("optimus", "lmdeploy-bd32"), names=SPOILED)
    text = (folder / "report.html").read_text()
    assert len(text.encode()) < 1_500_000
    assert bundle() in text
    return text.replace(bundle(), "")


def bundle() -> str:
    """Plotly's script, compressed, as each page holds it."""
    return b64encode((files("dsim.report") / "templates" / "plotly-basic.min.js.gz").read_bytes()).decode()


def figures_of(page: str) -> dict[str, Any]:
    """What the page's script draws, by name."""
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*)</script>', page)[1])


def test_every_figure_is_on_the_page(page: str) -> None:
    names = re.findall(r'<div class="plot(?: time)?" id="([^"]+)"', page)
    assert names[:3] == ["slo-time", "cdf-ttft", "cdf-e2el"]
    assert names[names.index("queue") :] == ["queue", "batch", "chunk", "kv"]
    assert list(figures_of(page)) == names


def test_the_first_screen_is_the_answer_four_numbers_and_a_chart(page: str) -> None:
    order = ['class="answer"', 'class="numbers"', 'id="slo-time"', "The question", "Every number</summary>"]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)
    assert page.count('class="card number"') == 4


def test_every_row_of_the_folded_table_says_what_it_is(page: str) -> None:
    folded = page[page.index("Every number</summary>") : page.index("<footer>")]
    rows = re.findall(r'<tr><th scope="row".*?</tr>', folded, re.S)
    assert len(rows) > 20
    for row in rows:
        assert re.search(r'<td class="about">[^<]{5,}</td></tr>', row), row


def test_the_page_says_estimated_and_needs_no_network(page: str) -> None:
    assert "Estimated, not measured." in page
    assert not re.search(r"(?:src|href)=|https?://|@import", page)


def test_a_policy_cannot_write_into_the_page(page: str) -> None:
    assert page.count("</script>") == 3  # Plotly's, the figures and the page's own
    assert "<b>" not in page
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in page


def test_figures_are_json(page: str) -> None:
    cdf = figures_of(page)["cdf-ttft"]
    assert [line["name"] for line in cdf["data"]] == ["optimus", "</script><b>&'\""]
    assert cdf["layout"]["shapes"][0]["x0"] == 5  # ttft=5s


def test_numbers_are_as_short_as_a_screen_shows() -> None:
    values = np.array([1.0, 1 / 3, np.nan, 1e9])
    assert script_json({"x": values, "n": np.int64(3), "t": "</script>"}) == (
        '{"x":[1,0.3333333,null,1000000000],"n":3,"t":"\\u003c/script>"}'
    )


def test_a_run_without_slos_or_requests_still_has_a_page() -> None:
    write_run(Path("run"), num_requests=5, rate=1.0, slos=(), policies=("lmdeploy-bd32",))
    names = set(figures_of(Path("run/report.html").read_text()))
    assert "cdf-e2el" in names
    assert "slo-time" not in names
    with RunWriter("none") as writer:
        writer.requests("ar", request_columns([]))
        empty = summarize("ar", request_columns([]), StepTotals())
        writer.finish(RunInfo(trace=TraceInfo("none"), policies=(empty,)), run_html)
    assert "cdf-ttft" not in Path("none/report.html").read_text()


def test_a_distribution_keeps_its_ends_and_few_points() -> None:
    x, y = curves.distribution(np.array([3.0, np.nan, 1.0, 2.0]))
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0, 3.0], [1 / 3, 2 / 3, 1.0])
    x, y = curves.distribution(np.arange(100_001.0))
    assert len(x) == curves.MAX_POINTS
    assert (x[0], x[-1], y[-1]) == (0.0, 100_000.0, 1.0)
    np.testing.assert_allclose(x, 100_000 * y)


def test_waiting_counts_who_has_arrived_and_not_begun() -> None:
    rows = [
        request([(9.0, 1)], arrival=0.0, scheduled=0.0),
        request([(9.0, 1)], arrival=1.0, scheduled=4.0),
        {"arrival": 2.0, "status": STATUSES.index("unfinished")},
        {"arrival": 2.0, "status": STATUSES.index("rejected")},
    ]
    assert curves.waiting(request_columns(rows), np.array([0.0, 1.0, 2.0, 4.0, 9.0])).tolist() == [0, 1, 2, 1]
    assert curves.waiting(request_columns(rows), np.array([0.0, 8.0])).tolist() == [(3 + 6) / 8]


def test_attainment_over_time_is_by_arrival() -> None:
    arrival = np.arange(40.0)
    middle, share = curves.share_by_arrival(arrival, arrival < 20)
    assert share.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert middle.tolist() == [4.5, 14.5, 24.5, 34.5]


def test_a_step_belongs_to_the_bin_of_its_middle() -> None:
    columns = {name: np.zeros(2, dtype) for name, dtype in STEP_COLUMNS.items()}
    columns |= {"start": np.array([0.0, 10.0]), "latency": np.array([10.0, 2.0]), "batch": np.array([3, 5])}
    with RunWriter("run") as writer:
        writer.append("p", columns)
        writer.finish(RunInfo(trace=TraceInfo("none")))
    found = curves.step_means(read_run("run"), "p", np.array([0.0, 8.0, 20.0]), 1.0)
    assert found["batch"].tolist() == [3.0, 5.0]


def test_steps_average_by_time() -> None:
    write_run(Path("run"), num_requests=30, rate=8.0)
    run = read_run("run")
    raw = run.steps("optimus")
    decode = ~raw["prefill"]
    found = curves.step_means(run, "optimus", np.array([0.0, 1e9]), 4000.0)
    weight = raw["latency"][decode]
    assert found["batch"][0] == pytest.approx((raw["batch"][decode] * weight).sum() / weight.sum())
    assert found["kv"][0] == pytest.approx((raw["pages"] * raw["latency"]).sum() / raw["latency"].sum() / 4000)
