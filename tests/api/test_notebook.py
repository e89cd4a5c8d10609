"""examples/notebook.ipynb, cell by cell in this process, on less traffic: frames and figures come out."""

import ast
import json
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest

from dsim.report.run_page import RunResult

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SMALL = ("NUM_REQUESTS = 5000", "NUM_REQUESTS = 60")


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text())


def shown(code: str, held: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last expression, if it ends with one."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), held)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), held) if last else None


@pytest.mark.slow
def test_every_cell_runs_and_shows_a_frame_or_a_figure(notebook: dict[str, Any]) -> None:
    held: dict[str, Any] = {}
    kinds = []
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(SMALL[0] in cell for cell in cells) == 1
    for cell in cells:
        result = shown(cell.replace(*SMALL), held)
        if result is not None:
            kinds.append(next(k for k in (pd.DataFrame, go.Figure, RunResult) if isinstance(result, k)))
    frame, figure = pd.DataFrame, go.Figure
    assert kinds == [frame, frame, RunResult, frame, frame, frame, frame, figure, figure, frame, figure]
    assert held["run"]._repr_html_() == f"<pre>{escape(str(held['run']))}</pre>"
    assert held["served"].groupby("policy", observed=True).size().tolist() == [60, 60]


def test_it_is_kept_without_what_it_printed_on_somebodys_machine(notebook: dict[str, Any]) -> None:
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
