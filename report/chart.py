"""Charts as Plotly JSON, built without Plotly.

templates/style.css sets the colours of text, axes and grid.
"""

import json
import math
from typing import Any

import numpy as np

# Okabe and Ito's palette for colour-blind readers, without yellow (invisible on white) and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#80868b")
LINES = ("solid", "dot", "dashdot", "longdash")  # by round through the colours
INK, GRID = "#5f6368", "#dadce0"
HEIGHT = 270  # pixels
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"  # as templates/style.css
DIGITS = 7  # significant; a screen shows fewer
CLEAR = "rgba(0,0,0,0)"
AXIS = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": GRID,
    "automargin": True,
    "exponentformat": "none",
    "separatethousands": True,
}

Json = dict[str, Any]


class Chart:
    """A pair of axes and their traces."""

    def __init__(
        self,
        x: str = "",
        y: str = "",
        *,
        percent: bool = False,
        height: int = HEIGHT,
        legend: bool = False,
        from_zero: bool = True,
    ) -> None:
        """percent: y is a share. from_zero: of y. legend: below the chart, until the page draws its own."""
        self.data: list[Json] = []
        self.x: Json = {**AXIS, "title": {"text": x, "standoff": 8}, "showgrid": False}
        self.y: Json = {**AXIS, "title": {"text": y, "standoff": 8}}
        if from_zero:
            self.y["rangemode"] = "tozero"
        if percent:
            self.y |= {"tickformat": ".3~p", "range": [0, 1.02]}
        self.layout: Json = {
            "height": height,
            "showlegend": legend,
            "hovermode": "closest",
            "bargap": 0.25,
            "paper_bgcolor": CLEAR,
            "plot_bgcolor": CLEAR,
            "margin": {"l": 56, "r": 18, "t": 22, "b": 36},
            "font": {"family": FONT, "size": 12, "color": INK},
        }

    def add(self, kind: str, **trace: Any) -> None:
        """A Plotly trace: `add("bar", x=..., y=...)`."""
        self.data.append({"type": kind, **trace})

    def line(self, x: Any, y: Any, name: str, index: int = 0, *, hover: str = "", **extra: Any) -> None:
        """In policy `index`'s colour and dash."""
        dash = LINES[index // len(COLOURS) % len(LINES)]
        line = {"color": colour(index), "width": 2, "dash": dash}
        trace = {
            "x": x,
            "y": y,
            "mode": "lines",
            "name": name,
            "legendgroup": name,
            "hovertemplate": hover,
            "line": line,
        }
        self.add("scatter", **{**trace, **extra})

    def vline(self, x: Any, label: str = "", dash: str = "dash", side: str = "center") -> None:
        """side: the label's end at the line: "left", "right" or "center"."""
        self._shape(x0=x, x1=x, y0=0, y1=1, yref="paper", line={"color": INK, "width": 1.2, "dash": dash})
        if label:
            self._note(x=x, y=1, yref="paper", xanchor=side, yanchor="bottom", text=label)

    def hline(self, y: float, label: str = "") -> None:
        self._shape(y0=y, y1=y, x0=0, x1=1, xref="paper", line={"color": INK, "width": 1.2, "dash": "dash"})
        if label:
            self._note(y=y, x=0, xref="paper", xanchor="left", yanchor="bottom", text=label)

    def band(self, low: float, high: float) -> None:
        shade = {"fillcolor": COLOURS[2], "opacity": 0.15, "line": {"width": 0}}
        self._shape(type="rect", x0=low, x1=high, y0=0, y1=1, yref="paper", **shade)

    def __repr__(self) -> str:
        return f"Chart({', '.join(str(trace.get('name') or trace['type']) for trace in self.data)})"

    def to_json(self) -> Json:
        return {"data": self.data, "layout": {**self.layout, "xaxis": self.x, "yaxis": self.y}}

    def _shape(self, **shape: Any) -> None:
        self.layout.setdefault("shapes", []).append({"type": "line", **shape})

    def _note(self, **note: Any) -> None:
        note |= {"showarrow": False, "font": {"size": 11}}
        self.layout.setdefault("annotations", []).append(note)


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def logarithmic(axis: Json) -> None:
    """With ticks at 1, 2 and 5 times powers of ten."""
    ticks = [m * 10.0**power for power in range(-6, 7) for m in (1, 2, 5)]
    axis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


def script_json(value: Any) -> str:
    """For a script element: short numbers, NaN as null, `<` escaped."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    if isinstance(value, Chart):
        value = value.to_json()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = float(f"{value:.{DIGITS}g}")
        if value.is_integer() and abs(value) < 2**53:
            return int(value)
    return value
