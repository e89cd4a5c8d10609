"""The base of every result: typed fields, and their JSON, table, page and pictures."""

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..engine.errors import DsimError
from ..files.read import did_you_mean, quoted, shown
from ..results.metrics import no_nan
from .page import Figure, Page, Table, Words

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure as PlotlyFigure

VERSION = 1  # of every result's JSON
NOT_STORED = {"stored": False}
FAULTS = {"missing": "is missing", "unexpected_keyword_argument": "is unknown"}
TITLE_HEIGHT = 34  # pixels, for a legend too


@dataclass(frozen=True, repr=False)
class Result(ABC):
    """What a question is answered with: a frozen dataclass of plain values, of which all else is a view.

    `to_json` and `from_json` are exact inverses: a field's name is its key; NaN is null, so a number that may be
    missing is `float | None`. A field that is no part of the answer (arrays, an open folder) has `metadata=NOT_STORED`.
    """

    schema: ClassVar[str]  # of its JSON: "dsim-plan"

    def to_json(self) -> dict[str, Any]:
        """The object of `--json` and of the result's file."""
        stored = {field.name: getattr(self, field.name) for field in fields(self) if not field.metadata}
        return {"schema": self.schema, "version": VERSION, **no_nan(stored)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the result") -> Self:
        """DsimError, in one line, unless `to_json` could have written it."""
        import pydantic  # slow to load

        for name, value in {"schema": cls.schema, "version": VERSION}.items():
            if data.get(name) != value:
                raise DsimError(f"{where}: {name} is {quoted(data.get(name))}, expected {quoted(value)}")
        values = {name: value for name, value in data.items() if name not in ("schema", "version")}
        reader = pydantic.TypeAdapter(list[cls], config=pydantic.ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]
        try:
            [result] = reader.validate_json(json.dumps([values]))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place, expected = ".".join(map(str, first["loc"][1:])), first["msg"].removeprefix("Input should be ")
            problem = FAULTS.get(first["type"], f"is {shown(first['input'])}, expected {expected}")
            raise DsimError(f"{where}: {place} {problem}") from None
        return result

    @abstractmethod
    def page(self) -> Page:
        """The page of the result."""

    @abstractmethod
    def to_frame(self) -> "pd.DataFrame":
        """The result as a table."""

    def figures(self) -> list[Figure]:
        """The page's figures, the answer's first."""
        return self.page().figures

    def plot(self, name: str | None = None) -> "PlotlyFigure":
        """A figure by name, by default the answer's; DsimError lists the names."""
        figures = {figure.name: figure for figure in self.figures()}
        if name is None and figures:
            name = next(iter(figures))
        if name not in figures:
            held = ", ".join(figures) or "none: there is nothing to draw"
            raise DsimError(
                f"there is no figure {quoted(name)}{did_you_mean(str(name), figures)}, expected one of: {held}"
            )
        from plotly.graph_objects import Figure as PlotlyFigure  # pages do not need it

        drawn = PlotlyFigure(figures[name].chart.to_json())
        margin = figures[name].chart.layout["margin"]
        drawn.update_layout(
            title={"text": figures[name].title, "y": 1.0, "yanchor": "top", "pad": {"t": 10}}, showlegend=True,
            legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
            margin={**margin, "t": margin["t"] + TITLE_HEIGHT, "b": margin["b"] + TITLE_HEIGHT},
            height=figures[name].chart.layout["height"] + 2 * TITLE_HEIGHT,
            paper_bgcolor="white",  # dark text in a dark notebook
        )  # fmt: skip
        return drawn

    def __str__(self) -> str:
        from rich.console import Console  # slow to load

        from .text import render

        out = io.StringIO()
        render(self.page(), Console(file=out))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = self.page()
        lines = [*page.alarms, page.answer, *page.details, *(f"{name}: {value}" for name, value in page.facts)]
        parts = [f"<p>{escape(line)}</p>" for line in lines if line]
        for block in (block for section in page.sections for block in section.blocks):
            if isinstance(block, Words):
                parts += [f"<p>{escape(line)}</p>" for line in block.lines]
            elif isinstance(block, Table) and not block.fold:
                parts.append(_html(block))
        return "".join([*parts, *(f"<p>Note: {escape(note)}</p>" for note in page.notes)])


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def frame_of(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Nested entries become `outer_inner`."""
    import pandas as pd

    return pd.json_normalize([dict(row) for row in rows], sep="_")
