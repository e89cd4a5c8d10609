"""A sweep's curves: one a setting, in the order of the load, without cells that failed."""

from dsim.planner.sweep import Sweep
from dsim.report.search_page import sweep_page

ROWS = tuple(
    {"rate": rate, "policy": policy, "output_throughput": speed, "error": None, "stable": True}
    for rate, policy, speed in ((4, "ar", 40.0), (2, "ar", 20.0), (2, "chunk", 21.0), (4, "chunk", None))
)
SWEEP = Sweep(
    title="x", varied=("rate", "policy"), num_cells=4, interrupted=False, estimated=(),
    implementations=("a script", "vLLM"), config={"base": {}}, command="", results=ROWS,
)  # fmt: skip


def test_a_curve_is_of_one_setting_and_joins_its_cells_in_order() -> None:
    page = sweep_page(SWEEP)
    figure = page.chart
    assert page.answer.endswith("; steps are priced by different implementations (a script and vLLM).")
    first, other = figure.chart.data
    assert (first["name"], first["x"], first["y"]) == ("policy ar", [2, 4], [20.0, 40.0])
    assert (other["name"], other["x"], other["y"]) == ("policy chunk", [2], [21.0])
