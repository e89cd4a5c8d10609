"""A trace from a pandas frame: a row a request, with the columns of any known format or of `Trace.to_frame`."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pandas as pd

from ..engine.errors import TraceError
from .chosen import column_of
from .formats import Format, named, own_format, recognise, shown_keys, with_only
from .parse import Columns, columns_of_frame
from .rows import Rows

FRAME = "the frame"


class FrameRows(Rows):
    """A frame's rows, named as pandas finds them."""

    __slots__ = ()

    def place(self, i: int) -> str:
        return f"{FRAME}.iloc[{self.numbers[i]}]".removeprefix("the ")


def table_of(
    frame: pd.DataFrame, format: str | None, own: str | None, only: str | None = None
) -> tuple[pd.DataFrame, Format]:
    """The columns of a frame that its format names, times as numbers or dates; TraceError where they are of none."""
    keys = [str(name) for name in frame.columns]
    if not len(frame):
        raise TraceError(f"{FRAME} holds no rows, expected a trace")
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"{FRAME} has {keys.count(twice)} columns {twice}, expected one")
    table = frame.set_axis(keys, axis=1)
    if own is not None:
        form = own_format(FRAME, own, keys, lambda name: plain(table[name].iloc[0]))
    elif format is None:
        form = recognise(FRAME, keys)
    else:
        form = named(format)
        if not form.matches(keys):
            raise TraceError(f"{FRAME}: columns {shown_keys(keys)} lack those of {form.name}, expected {form.keys}")
    if only is not None:
        form = with_only(form, FRAME, column_of(only), keys)
    wanted = {
        form.time, form.input, form.output, form.text, form.count, form.until, form.first, form.end,
        form.wait, form.only, *form.extras,
    }  # fmt: skip
    table = table[[key for key in keys if key in wanted]].reset_index(drop=True)
    if form.time not in table:
        return table, form
    times = table[form.time]
    if isinstance(times.dtype, pd.DatetimeTZDtype) or times.dtype.kind == "M":
        return table, replace(form, unit="datetime", doubtful=False)
    if times.dtype.kind == "m":
        return table.assign(**{form.time: times.dt.total_seconds()}), replace(form, unit="s", doubtful=False)
    return table, form


def fast_columns(table: pd.DataFrame, form: Format) -> Columns | None:
    """The columns of a frame in one pass, or None when a value needs a closer look."""
    if form.count is not None or form.input not in table or table.isna().to_numpy().any():
        return None
    return columns_of_frame(table, form)


def rows_of(table: pd.DataFrame) -> Rows:
    """The rows of a frame, missing values as None."""
    columns = {str(name): [plain(value) for value in table[name].tolist()] for name in table.columns}
    rows: list[Any] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return FrameRows(FRAME, list(range(len(rows))), rows, by_line=False)


def plain(value: Any) -> Any:
    """A frame's value as a file has it: None where it is missing, a date as text."""
    if isinstance(value, list | tuple | dict):
        return value
    if hasattr(value, "tolist"):  # NumPy's
        return plain(value.tolist())
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return None
    return str(value) if isinstance(value, datetime) else value
