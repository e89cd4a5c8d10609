"""Every kind of result: its JSON read back, a key of another shape, its table, and its page as text and HTML."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import dsim
from dsim.planner.capacity import Point
from dsim.profiler.profile import DEFAULT, load
from dsim.report.html import result_files, to_html
from dsim.report.profile_page import Profiled
from dsim.report.result import Result

from .checks import refused
from .comparison.examples import comparison, validated
from .report.fabricate import write_run
from .report.test_capacity import CAPACITY, NAME
from .report.test_curves import SWEEP
from .report.test_plan import fleet, info, lost
from .report.test_tune import TUNED


def run(folder: Path) -> Result:
    write_run(folder / "run", num_requests=12, rate=8.0, policies=("lmdeploy-bd32",))
    return dsim.load_run(folder / "run")


MADE: dict[str, Callable[[Path], Result]] = {
    "run": run,
    "capacity": lambda _: replace(CAPACITY, curve=(Point(1.0, {NAME: None}, True, True),)),
    "plan": lambda _: info(fleet("vllm-diffusion", 4, 0.994), fleet("ar", 5, 0.99), left_out=(lost("chunk"),)),
    "tune": lambda _: TUNED,
    "sweep": lambda _: SWEEP,
    "compare": lambda _: comparison(),
    "validation": lambda _: validated(),
    "profiled": lambda _: Profiled(load(DEFAULT), command="dsim profile"),
}  # fmt: skip


@pytest.fixture(params=MADE)
def result(request: pytest.FixtureRequest, tmp_path: Path) -> Result:
    return MADE[request.param](tmp_path)


def test_every_kind_of_result_has_a_row() -> None:
    assert {kind.schema for kind in Result.__subclasses__()} == {f"dsim-{name}" for name in MADE}


def test_a_result_is_read_as_it_was_written(result: Result) -> None:
    data = result.to_json()
    assert type(result).from_json(data).to_json() == data
    assert result_files(result).keys() == {"report.html", f"{result.schema.removeprefix('dsim-')}.json"}


def test_a_result_of_another_shape_is_one_line(result: Result) -> None:
    data = result.to_json()
    field = next(name for name in data if name not in ("schema", "version"))
    missing = {name: value for name, value in data.items() if name != field}
    for spoiled, line in (
        ({**data, "schema": "x"}, "r.json: schema is 'x', expected"),
        ({**data, "more": 1}, "r.json: more is unknown"),
        ({**data, field: None}, rf"r.json: {field} is null, expected a valid|r.json: {field} is null, expected an obj"),
        (missing, f"r.json: {field} is missing"),
    ):
        with refused(line):
            type(result).from_json(spoiled, "r.json")


def test_a_result_is_a_table_and_a_page_that_begins_with_its_answer(result: Result) -> None:
    assert isinstance(result.to_frame(), pd.DataFrame)
    page = result.page()
    assert page.answer
    assert page.answer.split(",")[0].split(";")[0] in " ".join(str(result).split())
    html = to_html(page)
    assert html.count('class="answer"') == 1
    assert f"<title>{page.name}</title>" in html.replace("&#39;", "'")
