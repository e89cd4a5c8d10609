"""Charts in text, for readers who cannot see them."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .page import Figure
from .table import number

FEW = 8  # values listed; of more the range
MOST = 12  # traces


def described(figure: Figure) -> str:
    chart = figure.chart
    x, y = (str(axis.get("title", {}).get("text") or "") for axis in (chart.x, chart.y))
    axes = " over ".join(part for part in (y, x) if part)
    sentences = [_plain(f"Chart: {figure.title}" + (f" ({axes})" if axes else ""))]
    traces = [part for trace in chart.data if (part := _trace(trace, chart.x))]
    sentences += traces[:MOST]
    if len(traces) > MOST:
        sentences.append(f"and {len(traces) - MOST} more")
    return ". ".join(sentences) + "."


def _trace(trace: dict[str, Any], x_axis: dict[str, Any]) -> str:
    """Empty without values."""
    name = _plain(str(trace.get("name") or ""))
    head = f"{name}: " if name else ""
    places, values = list(trace.get("x", ())), list(trace.get("y", ()))
    if trace.get("orientation") == "h" or not any(map(_known, values)):  # names along y
        places, values = values, places
    shown = dict(zip(x_axis.get("tickvals", ()), x_axis.get("ticktext", ()), strict=False))
    pairs = [(shown.get(at, at) if len(shown) == len(set(places)) else at, value)
             for at, value in zip(places, values, strict=False) if _known(value)]  # fmt: skip
    if not pairs:
        return ""
    if len(pairs) <= FEW:
        return head + ", ".join(f"{number(v)} at {_at(at)}" for at, v in pairs)
    ends = f" from {_at(pairs[0][0])} to {_at(pairs[-1][0])}"
    return f"{head}{len(pairs)} points{ends}, values from {_span([float(v) for _, v in pairs])}"


def _at(value: Any) -> str:
    return number(float(value)) if _known(value) else _plain(str(value))


def _known(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


def _span(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def _plain(text: str) -> str:
    """Without HTML tags."""
    return re.sub(r"<[^>]*>", " ", text).strip()
