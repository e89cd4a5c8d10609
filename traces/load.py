"""Load a trace: find, recognise, read, sort it and shift it to start at 0."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..engine.errors import TraceError
from ..files.read import FilePath, cut, cut_words, did_you_mean, printable
from .formats import MEASURED, OF_RUN, OTHER_FORMATS, TICKS_PER_SECOND, Format, ReadOptions, own_format, recognise
from .parse import Columns, columns_of_rows
from .rows import FRAME, Row, Rows, raw_rows, read_bytes
from .shipped import SHIPPED
from .trace import Trace, TraceNotes

if TYPE_CHECKING:
    import pandas as pd


def load(
    path_or_name: "FilePath | pd.DataFrame",
    *,
    time_unit: str | None = None,
    skip_bad: bool = False,
    columns: str | None = None,
    only: str | None = None,
) -> Trace:
    """Load a trace from a file or a pandas frame, or a shipped one by name.

    `time_unit` (s, ms, us, ns) overrides the format's; `skip_bad` leaves bad rows out and counts them; `columns` names
    a file's columns
    (`arrival=created_at,input=prompt_tokens,output=completion_tokens`); `only` (`model=NAME` or `COLUMN=VALUE`) selects
    rows. TraceError names file and line of what cannot be read.
    """
    if time_unit is not None and time_unit not in TICKS_PER_SECOND:
        raise TraceError(f"time unit is {cut(time_unit)}, expected one of: {', '.join(TICKS_PER_SECOND)}")
    options = ReadOptions(columns, only, skip_bad, time_unit)
    if not isinstance(path_or_name, str | Path):
        from . import frames  # files need no pandas

        return finish(*read_rows(frames.rows_of(path_or_name), options), FRAME, "frame")
    file, name = locate(path_or_name)
    table, form = read_rows(raw_rows(str(file), read_bytes(file)), options)
    if file.name in SHIPPED:
        table.warnings.append(f"{name} is read from the file of this name, not from the shipped trace")
    return finish(table, form, str(file), name)


def locate(path_or_name: FilePath) -> tuple[Path, str]:
    """File and name; an error lists the shipped traces."""
    path = Path(path_or_name)
    if os.path.exists(path):  # Path.exists raises for impossible names
        return path, printable(path.stem)
    name = str(path_or_name)
    if name in SHIPPED:
        return SHIPPED[name], name
    hint = did_you_mean(name, SHIPPED)
    raise TraceError(f"no trace file {cut_words(name)}{hint}, expected a file or a shipped trace: {', '.join(SHIPPED)}")


def read_rows(rows: Rows, options: ReadOptions) -> tuple[Columns, Format]:
    """Columns and format of a file's rows."""
    if not rows.rows:
        raise TraceError(f"{rows.path} holds no rows, expected a trace")
    first = next((row for row in rows.rows if row), None)
    if first is None and rows.header is None:
        raise TraceError(f"{rows.place(0)}: {rows.bad.get(0, 'row has no keys')}")
    if options.columns is not None:
        form = own_format(rows, options.columns)
    elif (first or {}).get("schema") == "dsim-steplog":
        rows, form = requests_of_log(rows), OTHER_FORMATS["steplog"]
    else:
        form = recognise(rows)
    if form.name == "dsim" and "limited" in rows.keys:
        rows = replace(rows, rows=list(map(of_run, rows.rows)))
    return columns_of_rows(rows, form, options)


def of_run(row: Row) -> Row:
    """In requests.parquet a limit that was not asked for is no limit."""
    limit = row.get("max_tokens") if row.get("limited") else None
    return {**row, "max_tokens": limit, "status": None}


def requests_of_log(log: Rows) -> Rows:
    """A step log's request lines (docs/steplog.md); finished ones get their actual output length.

    If one ended early, the requested lengths become limits.
    """
    rows = log.take([i for i, row in enumerate(log.rows) if i in log.bad or row.get("kind") == "request"])
    finished = {str(row.get("request")) for row in log.rows if row.get("kind") == "finish"}
    emitted: Counter[str] = Counter()
    for row in log.rows:
        names, counts = row.get("requests") or [], row.get("emitted")
        if not isinstance(counts, list):  # one value is for all rows
            counts = [counts] * len(names)
        for name, tokens in zip(map(str, names), counts, strict=False):
            emitted[name] += tokens or 0
    early, served = False, []
    for row in rows.rows:
        name, limit = str(row.get("request")), row.get("output_length")
        served.append({**row, "max_tokens": limit})
        if name in finished and emitted[name]:
            served[-1]["output_length"] = emitted[name]
            early |= emitted[name] != limit
    if not early:
        served = rows.rows
    return replace(rows, rows=served)


def finish(columns: Columns, form: Format, path: str, name: str) -> Trace:
    """Drop failures, sort by time (ties in file order), start at 0."""
    if len(runs := set(columns.extras.pop(OF_RUN, []))) > 1:
        policies = cut(", ".join(sorted(map(str, runs))))
        expected = f"expected those of one: --only {OF_RUN}=NAME"
        raise TraceError(f"{path} holds the requests of {len(runs)} policies ({policies}), {expected}")
    answered = columns.output_length > 0
    if not answered.any():
        raise TraceError(
            f"{path}: none of {columns.num_rows} rows is a request ({columns.num_skipped} bad, {len(answered)} without "
            "output), expected at least 1"
        )
    if not answered.all():
        columns = columns.take(np.flatnonzero(answered).tolist())
    # Out of order: an earlier row is later.
    num_unsorted = int((columns.time < np.maximum.accumulate(columns.time)).sum())
    if num_unsorted:
        columns.warnings.append(f"{num_unsorted} rows were out of order and have been sorted")
        columns = columns.take(np.argsort(columns.time, kind="stable").tolist())
    extras = dict(columns.extras)
    for metric, after in columns.waited.items():
        if not np.isnan(after).all():
            extras[MEASURED[metric]] = [None if np.isnan(wait) else wait for wait in after.tolist()]
    notes = TraceNotes(
        path=path,
        format=form.name,
        num_rows=columns.num_rows,
        num_unsorted=num_unsorted,
        num_skipped=columns.num_skipped,
        failed_in_trace=int((~answered).sum()),
        warnings=tuple(columns.warnings),
    )
    time = (columns.time - columns.time[0]) / form.ticks
    try:
        return Trace(name, time, columns.input_length, columns.output_length, extras=extras, notes=notes)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
