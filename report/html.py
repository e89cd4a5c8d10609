"""A page as self-contained HTML; equal pages give equal bytes."""

import re
from base64 import b64encode
from dataclasses import replace
from importlib.resources import files

import numpy as np

from .. import __version__
from .chart import colour, dashed, script_json
from .page import Figure, Page
from .result import Result
from .table import number


def to_html(page: Page) -> str:
    """With style, script and Plotly's basic bundle."""
    import jinja2  # only pages need it

    templates = files(__package__) / "templates"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    template = environment.from_string((templates / "page.html").read_text(encoding="utf-8"))
    figures = {figure.name: figure.chart for figure in page.figures}
    return template.render(
        page=page,
        style=(templates / "style.css").read_text(encoding="utf-8"),
        script=(templates / "page.js").read_text(encoding="utf-8"),
        plotly=b64encode((templates / "plotly-basic.min.js.gz").read_bytes()).decode(),
        figures=script_json(figures),
        swatch=_swatch,
        described=described,
        loud=_loud,
        breakable=_breakable,
    )


def result_files(result: Result, command: str = "") -> dict[str, str]:
    """A result's page, and last its JSON, named by the schema; equal results give equal bytes."""
    page = result.page()
    if command:
        page = replace(page, command=command, version=__version__)
    return {f"{result.schema.removeprefix('dsim-')}.json": result.to_text(), "report.html": to_html(page)}


def described(figure: Figure) -> str:
    """A chart in text, for readers who cannot see it: its axes, and each trace's range."""
    chart = figure.chart
    axes = " over ".join(filter(None, (axis["title"]["text"] for axis in (chart.y, chart.x))))
    sentences = [f"Chart: {figure.title}" + (f" ({axes})" if axes else "")]
    for trace in chart.data:
        values = list(trace.get("y", ()))
        if any(isinstance(value, str) for value in values):  # names along y
            values = trace["x"]
        numbers = [value for value in values if isinstance(value, int | float | np.number)]
        heights = [float(value) for value in numbers if np.isfinite(value)]
        if heights:
            name = f"{trace['name']}: " if trace.get("name") else ""
            sentences.append(f"{name}{number(min(heights))} to {number(max(heights))}")
    return re.sub(r"<[^>]*>", "", ". ".join(sentences).replace("<br>", " ")) + "."


def _loud(line: str) -> tuple[str, str]:
    """Leading words in capitals, and the rest."""
    loud, text = re.findall(r"(?s)((?:[A-Z]{2,}:? )*)(.*)", line)[0]
    return loud.rstrip(), text


def _breakable(cell: str) -> str:
    """May break after a SPEC's commas."""
    from markupsafe import Markup, escape  # comes with Jinja2

    return Markup(re.sub(r"(?<=,)(?=[^\s])", "<wbr>", str(escape(cell))))


def _swatch(index: int) -> str:
    ink = colour(index)
    return f"repeating-linear-gradient(90deg,{ink} 0 3px,transparent 3px 5px)" if dashed(index) else ink
