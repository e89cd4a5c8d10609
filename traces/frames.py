"""A trace from a pandas frame: one row per request, with the columns of a known format or of `Trace.to_frame`."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pandas as pd

from ..engine.errors import TraceError
from .formats import Format
from .parse import Columns, columns_at_once
from .rows import FRAME, Rows


def keys_of(frame: pd.DataFrame) -> list[str]:
    """The column names as text; TraceError for a frame without rows or with duplicate names."""
    keys = [str(name) for name in frame.columns]
    if not len(frame):
        raise TraceError(f"{FRAME} holds no rows, expected a trace")
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"{FRAME} has {keys.count(twice)} columns {twice}, expected one")
    return keys


def table_of(frame: pd.DataFrame, keys: list[str], form: Format) -> tuple[pd.DataFrame, Format]:
    """The columns that a format names, and the format with the unit that the type of the times implies."""
    table = frame.set_axis(keys, axis=1)
    table = table[[key for key in keys if key in form.all_keys]].reset_index(drop=True)
    if form.time in table:
        times = table[form.time]
        if isinstance(times.dtype, pd.DatetimeTZDtype) or times.dtype.kind == "M":
            return table, replace(form, unit="datetime", doubtful=False)
        if times.dtype.kind == "m":
            return table.assign(**{form.time: times.dt.total_seconds()}), replace(form, unit="s", doubtful=False)
    return table, form


def fast_columns(table: pd.DataFrame, form: Format) -> Columns | None:
    """The columns of a frame in one pass; None if a value needs the slower row-by-row reader."""
    if form.count or form.input not in table or table.isna().to_numpy().any():
        return None
    return columns_at_once({str(key): table[key] for key in table}, form)


def rows_of(table: pd.DataFrame) -> Rows:
    """The rows of a frame; missing values are None."""
    columns = {str(name): [plain(value) for value in table[name].tolist()] for name in table.columns}
    rows: list[Any] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Rows("frame", list(range(len(rows))), rows, "{}.iloc[{}]")


def plain(value: Any) -> Any:
    """A frame's value as in a file: None if missing, dates as text."""
    if isinstance(value, list | tuple | dict):
        return value
    if hasattr(value, "tolist"):  # a NumPy value
        return plain(value.tolist())
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return None
    return str(value) if isinstance(value, datetime) else value
