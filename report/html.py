"""A page as self-contained HTML; equal pages give equal bytes."""

import re
from base64 import b64encode
from dataclasses import replace
from importlib.resources import files

from .. import __version__
from .chart import colour, script_json
from .page import Page
from .result import Result


def to_html(page: Page) -> str:
    """With style, script and Plotly's basic bundle."""
    import jinja2  # only pages need it

    templates = files(__package__) / "templates"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string((templates / "page.html").read_text(encoding="utf-8"))
    figures = {figure.name: figure.chart for figure in page.figures}
    return template.render(
        page=page,
        style=(templates / "style.css").read_text(encoding="utf-8"),
        script=(templates / "page.js").read_text(encoding="utf-8"),
        plotly=b64encode((templates / "plotly-basic.min.js.gz").read_bytes()).decode(),
        figures=script_json(figures),
        swatch=colour,
        breakable=_breakable,
    )


def result_files(result: Result, command: str = "") -> dict[str, str]:
    """A result's page, and last its JSON, named by the schema; equal results give equal bytes."""
    page = result.page()
    if command:
        page = replace(page, command=command, version=__version__)
    return {f"{result.schema.removeprefix('dsim-')}.json": result.to_text(), "report.html": to_html(page)}


def _breakable(cell: str) -> str:
    """May break after a SPEC's commas."""
    from markupsafe import Markup, escape  # comes with Jinja2

    return Markup(re.sub(r"(?<=,)(?=[^\s])", "<wbr>", str(escape(cell))))
