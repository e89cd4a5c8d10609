"""The base of every result: typed fields, and their JSON, table, page and pictures."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from ..files.read import did_you_mean, quoted
from ..results.stored import NOT_STORED as NOT_STORED
from ..results.stored import Stored
from .page import Figure, Page

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure as PlotlyFigure

TITLE_HEIGHT = 34  # pixels, for a legend too


@dataclass(frozen=True, repr=False)
class Result(Stored, ABC):
    """The answer to a question: a frozen dataclass of plain values. Page, JSON, table and pictures are views of it."""

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
            names = ", ".join(figures) or "none: there is nothing to draw"
            raise DsimError(
                f"there is no figure {quoted(name)}{did_you_mean(str(name), figures)}, expected one of: {names}"
            )
        from plotly.graph_objects import Figure as PlotlyFigure  # pages do not need it

        layout, title = figures[name].chart.layout, figures[name].title
        drawn = PlotlyFigure(figures[name].chart.to_json())
        drawn.update_layout(
            title={"text": title, "y": 1.0, "yanchor": "top", "pad": {"t": 10}},
            showlegend=True,
            legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
            margin={side: layout["margin"][side] + TITLE_HEIGHT for side in ("t", "b")},
            height=layout["height"] + 2 * TITLE_HEIGHT,
            paper_bgcolor="white",  # dark text in a dark notebook
        )
        return drawn

    def __str__(self) -> str:
        from rich.console import Console  # slow to load

        from .text import render

        out = io.StringIO()
        render(self.page(), Console(file=out))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def frame_of(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Nested entries become `outer_inner`."""
    import pandas as pd

    return pd.json_normalize([dict(row) for row in rows], sep="_")
