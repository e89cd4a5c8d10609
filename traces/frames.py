"""A trace from a pandas frame: one row per request, with a known format's columns or those of `Trace.to_frame`."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pandas as pd

from ..engine.errors import TraceError
from .formats import Format
from .rows import FRAME, Rows


def keys_of(frame: pd.DataFrame) -> list[str]:
    """Column names as text; TraceError for no rows or duplicate names."""
    keys = [str(name) for name in frame.columns]
    if not len(frame):
        raise TraceError(f"{FRAME} holds no rows, expected a trace")
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"{FRAME} has {keys.count(twice)} columns {twice}, expected one")
    return keys


def first(table: pd.DataFrame, name: str) -> Any:
    """A column's first value."""
    values = table[name].tolist() if name in table else []
    return next((value for value in map(plain, values) if value not in (None, "")), None)


def rows_of(table: pd.DataFrame, form: Format) -> tuple[Rows, Format]:
    """Rows with missing values as None; the format with the unit of the times' type."""
    if form.time in table:
        times = table[form.time]
        if isinstance(times.dtype, pd.DatetimeTZDtype) or times.dtype.kind == "M":
            form = replace(form, unit="datetime", doubtful=False)
        elif times.dtype.kind == "m":
            table = table.assign(**{form.time: times.dt.total_seconds()})
            form = replace(form, unit="s", doubtful=False)
    columns = {str(name): [plain(value) for value in table[name].tolist()] for name in table.columns}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Rows("frame", list(range(len(rows))), rows, form="{}.iloc[{}]"), form


def plain(value: Any) -> Any:
    """As in a file: None if missing, dates as text."""
    if isinstance(value, list | tuple | dict):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return None
    return str(value) if isinstance(value, datetime) else value
