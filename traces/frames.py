"""A trace from a pandas frame: one row per request, with a known format's columns or those of `Trace.to_frame`."""

from datetime import datetime, timedelta
from typing import Any

import pandas as pd

from ..engine.errors import TraceError
from .rows import FRAME, Rows


def rows_of(frame: pd.DataFrame) -> Rows:
    """With missing values as None; TraceError for no rows or duplicate names."""
    keys = tuple(map(str, frame.columns))
    if not len(frame) or len(set(keys)) < len(keys):
        raise TraceError(f"{FRAME} has {len(frame)} rows of {', '.join(keys)}, expected some, and each column once")
    columns = [[plain(value) for value in frame[name].tolist()] for name in frame.columns]
    rows = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
    return Rows(FRAME, list(range(len(rows))), rows, form="frame.iloc[{1}]", header=keys, top=FRAME)


def plain(value: Any) -> Any:
    """As in a file: None if missing, dates (and times since a beginning) as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | dict):
        return value
    if pd.isna(value):
        return None
    if isinstance(value, timedelta):
        value = pd.Timestamp(0) + value
    if isinstance(value, datetime):
        return str(value)
    return value
