"""Load a trace: find it, recognise its format, read it, sort it and shift it to start at 0."""

import os
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..engine.errors import TraceError
from ..files.read import cut, cut_words, did_you_mean, printable
from . import frames
from .chosen import chosen, column_of
from .formats import (
    MEASURED,
    OF_RUN,
    TICKS_PER_SECOND,
    Format,
    flat,
    named,
    own_format,
    recognise,
    shown_keys,
    with_only,
)
from .otlp import OTLP, is_otlp, rows_of_spans
from .parse import Columns, columns_of_frame, columns_of_good_rows, columns_of_rows, moments_in
from .rows import (
    Rows,
    container,
    csv_frame,
    csv_header,
    csv_rows,
    decode,
    json_rows,
    jsonl_rows,
    page_rows,
    parquet_rows,
    read_bytes,
)
from .sharegpt import columns_of_conversations, is_sharegpt
from .shipped import SHIPPED
from .trace import Trace, TraceNotes
from .usage import spread
from .vllm_log import VLLM_LOG, is_vllm_log, rows_of_log

# The request lines of a step log. By name it cannot be asked for: its first line says what it is.
STEP_LOG = Format("steplog", "arrival", "input_length", "output_length", "s", {"id": "id"})
PLAUSIBLE_RATES = (0.01, 1000.0)  # req/s: outside these the time unit is probably another


def load(
    path_or_name: str | Path | pd.DataFrame,
    *,
    time_unit: str | None = None,
    skip_bad: bool = False,
    keep_failed: bool = False,
    format: str | None = None,
    columns: str | None = None,
    only: str | None = None,
) -> Trace:
    """The trace in a file or a pandas frame, or a shipped one by its name.

    `time_unit` (s, ms, us, ns) overrides the format's; `skip_bad` drops and counts bad rows; `keep_failed` keeps
    requests without output; `format` is recognised by the keys by default; `columns` names a file's own columns, as
    `arrival=created_at,input=prompt_tokens,output=completion_tokens`; `only` (`model=NAME` or `COLUMN=VALUE`) selects
    rows.
    """
    if time_unit is not None and time_unit not in TICKS_PER_SECOND:
        raise TraceError(f"time unit is {cut(time_unit)}, expected one of: {', '.join(TICKS_PER_SECOND)}")
    if columns is not None and format is not None:
        raise TraceError(f"--columns is {cut(columns)} and --format is {cut(format)}, expected one of them")
    found: Columns
    form: Format | None
    if isinstance(path_or_name, pd.DataFrame):
        path, name = frames.FRAME, "frame"
        found, form = read_frame(path_or_name, format, skip_bad, columns, only)
    else:
        file, name = locate(path_or_name)
        path = str(file)
        found, form = read(file, format, skip_bad, columns, only)
    has_arrivals = form is not None
    unit = time_unit or (form.unit if form else "s")
    if time_unit is not None and form is not None and form.unit == "datetime":
        raise TraceError(f"{path}: {form.time} is a date and time, expected no --time-unit (it is {time_unit})")
    if form is not None and form.doubtful and time_unit is None and format is None:
        found.warnings.extend(doubts(found, form))
    runs = list(dict.fromkeys(found.extras.pop(OF_RUN, [])))
    if len(runs) > 1:
        of = cut(", ".join(map(str, runs)))
        raise TraceError(f"{path} holds the requests of {len(runs)} policies ({of}), expected those of one")
    return finish(found, path, name, form.name if form else "sharegpt", unit, keep_failed, has_arrivals)


def locate(path_or_name: str | Path) -> tuple[Path, str]:
    """The file and the name of a trace; an error lists the shipped ones."""
    path = Path(path_or_name)
    if os.path.exists(path):  # not Path.exists, which raises for names that no file can have
        return path, printable(path.stem)
    if str(path_or_name) in SHIPPED:
        return SHIPPED[str(path_or_name)], str(path_or_name)
    hint = did_you_mean(str(path_or_name), SHIPPED, any_case=True)
    raise TraceError(
        f"no trace file {cut_words(str(path_or_name))}{hint}, expected a file or a shipped trace: {', '.join(SHIPPED)}"
    )


def read(
    path: Path, format: str | None, skip_bad: bool, own: str | None = None, only: str | None = None
) -> tuple[Columns, Format | None]:
    """A file's columns and its format, None for ShareGPT. own: `--columns`; only: `--only`."""
    found, form = _read_all(path, format, skip_bad, own, only)
    return _chosen(found, form, str(path), only), form


def _chosen(found: Columns, form: Format | None, path: str, only: str | None) -> Columns:
    """The rows that `--only` and the log's own columns select."""
    if only is not None and (form is None or not form.only):
        kind = "conversations" if form is None else form.name
        raise TraceError(f"{path}: --only is {cut(only)}, and {kind} have no such column: expected another format")
    return chosen(found, form, path, only) if form is not None and (form.own or only is not None) else found


def _read_all(
    path: Path, format: str | None, skip_bad: bool, own: str | None, only: str | None
) -> tuple[Columns, Format | None]:
    data = read_bytes(path)
    where = str(path)
    wanted = named(format) if format and format != "sharegpt" else None
    kind = container(where, data)
    if kind == "csv":
        text = decode(where, data)
        if format is None and own is None and is_vllm_log(text):
            rows, warnings = rows_of_log(where, text)
            return with_warnings(columns_of_rows(rows, VLLM_LOG, skip_bad), warnings), VLLM_LOG
        return read_csv(where, data, text, wanted, skip_bad, own, only)
    if kind == "parquet":
        found = parquet_rows(where, data)
    elif kind == "json":
        found = json_rows(where, decode(where, data))
    else:
        text = decode(where, data)
        found = page_rows(where, text) or jsonl_rows(where, text)
    whole, first = next(((i, row) for i, row in enumerate(found.rows) if isinstance(row, dict) and row), (0, None))
    if first is None:
        if not found.rows:
            raise TraceError(f"{where} holds no rows, expected a trace")
        raise TraceError(f"{found.place(0)}: {found.rows[0] if isinstance(found.rows[0], str) else 'row has no keys'}")
    # A step log: take its requests.
    if format is None and own is None and first.get("schema") == "dsim-steplog":
        found, wanted = requests_of_log(found), STEP_LOG
        return columns_of_good_rows(found.rows, wanted) or columns_of_rows(found, wanted, skip_bad), wanted
    if format == "sharegpt" or (format is None and own is None and is_sharegpt(first)):
        return columns_of_conversations(found), None
    if format in (None, OTLP.name) and own is None and is_otlp(first):
        found, warnings = rows_of_spans(found)
        form = OTLP if only is None else with_only(OTLP, where, column_of(only), [*OTLP.extras])
        return with_warnings(columns_of(found, form, skip_bad), warnings), form
    form = choose(found.place(whole), flat(first), wanted, own, only)
    if form.nested:
        found = replace(found, rows=[row if isinstance(row, str) else flat(row) for row in found.rows])
    return columns_of(found, form, skip_bad), form


def read_frame(
    frame: pd.DataFrame, format: str | None, skip_bad: bool, own: str | None, only: str | None = None
) -> tuple[Columns, Format | None]:
    """A frame's columns and its format, None for ShareGPT."""
    if format == "sharegpt" or (format is None and own is None and len(frame) and is_sharegpt(dict(frame.iloc[0]))):
        return _chosen(columns_of_conversations(frames.rows_of(frame)), None, frames.FRAME, only), None
    table, form = frames.table_of(frame, format, own, only)
    found = frames.fast_columns(table, form) or columns_of(frames.rows_of(table), form, skip_bad)
    return _chosen(found, form, frames.FRAME, only), form


def columns_of(found: Rows, form: Format, skip_bad: bool) -> Columns:
    """The columns of rows: fast where every value is good, else one at a time."""
    if form.count is not None:
        found, warning = spread(found, form)
        return with_warnings(columns_of(found, replace(form, count=None), skip_bad), [warning])
    return columns_of_good_rows(found.rows, form) or columns_of_rows(found, form, skip_bad)


def with_warnings(columns: Columns, warnings: list[str]) -> Columns:
    """The columns with earlier warnings put first."""
    return replace(columns, warnings=[*warnings, *columns.warnings])


def requests_of_log(found: Rows) -> Rows:
    """The request lines of a step log (docs/steplog.md), whose arrivals are the engine's.

    A finished request has the length of its output, whatever limit it set.
    """
    of_requests = [i for i, row in enumerate(found.rows) if isinstance(row, str) or row.get("kind") == "request"]
    if not of_requests:
        raise TraceError(f"{found.path} holds no request lines, expected a step log that names its requests")
    emitted: dict[Any, int] = {}
    finished = set()
    for row in found.rows:
        if isinstance(row, dict) and row.get("kind") == "finish":
            finished.add(str(row.get("request")))
        elif isinstance(row, dict) and isinstance(row.get("requests"), list):
            of_rows = row.get("emitted")  # one value: of all rows
            for request, tokens in zip(
                row["requests"], of_rows if isinstance(of_rows, list) else repeat(of_rows), strict=False
            ):
                if isinstance(tokens, int):
                    emitted[str(request)] = emitted.get(str(request), 0) + tokens
    rows = [found.rows[i] for i in of_requests]
    for i, row in enumerate(rows):
        if isinstance(row, dict) and (name := str(row.get("request"))) in finished and emitted.get(name):
            rows[i] = {**row, "output_length": emitted[name]}
    return replace(found, numbers=[found.numbers[i] for i in of_requests], rows=rows)


def read_csv(
    where: str, data: bytes, text: str, wanted: Format | None, skip_bad: bool, own: str | None, only: str | None
) -> tuple[Columns, Format]:
    """A CSV file's columns and its format."""
    header = csv_header(where, text)
    slow = csv_rows(where, text) if own is not None else None
    first = next((row for row in slow.rows if isinstance(row, dict)), {}) if slow is not None else {}
    form = choose(f"{where}:1", dict.fromkeys(header, None) | first, wanted, own, only)
    numeric = dict.fromkeys((form.input, form.output), None)
    dtypes: dict[str, Any] = {name: str for name, _ in form.kept if name in header}
    moments = [form.time, *moments_in(form, header)]
    dtypes |= numeric | dict.fromkeys(moments, str if form.unit == "datetime" else None)
    frame = csv_frame(data, dtypes) if form.input in header and form.count is None else None
    columns = columns_of_frame(frame, form) if frame is not None and len(frame) else None
    if columns is not None:
        return columns, form
    found = slow or csv_rows(where, text)
    if not found.rows:
        raise TraceError(f"{where} holds a header and no rows, expected a trace")
    return columns_of(found, form, skip_bad), form


def choose(place: str, first: dict[str, Any], wanted: Format | None, own: str | None, only: str | None) -> Format:
    """The requested format if the first row's keys allow it, else the recognised one."""
    keys = list(first)
    if own is not None:
        form = own_format(place, own, keys, first.get)
    elif wanted is None:
        form = recognise(place, keys)
    elif wanted.matches(keys):
        form = wanted
    else:
        raise TraceError(f"{place}: keys {shown_keys(keys)} lack those of {wanted.name}, expected {wanted.keys}")
    return form if only is None else with_only(form, place, column_of(only), keys)


def doubts(columns: Columns, form: Format) -> list[str]:
    """Warnings that times may be in another unit than the format's."""
    time = columns.time.astype(np.float64)
    found = []
    if (time % 1 != 0).any() and form.unit == "ms":
        found.append(f"{form.time} is fractional and read as {form.unit}: if it counts seconds, say --time-unit s")
    duration = float(np.ptp(time)) / TICKS_PER_SECOND[form.unit] if len(time) else 0.0
    if duration > 0:
        rate = (len(time) - 1) / duration
        low, high = PLAUSIBLE_RATES
        if not low <= rate <= high:
            found.append(f"{form.time} read as {form.unit} makes {rate:.3g} req/s: another --time-unit may be meant")
    return found


def finish(
    columns: Columns, path: str, name: str, format: str, unit: str, keep_failed: bool, has_arrivals: bool
) -> Trace:
    """Drop failures, sort by time with ties in file order, and start at 0."""
    failed = np.flatnonzero(columns.output_length == 0)
    kept = np.arange(len(columns.time))
    if not keep_failed:
        kept = np.delete(kept, failed)
    if not len(kept):
        raise TraceError(
            f"{path}: none of {columns.num_rows} rows is a request ({columns.num_skipped} bad, "
            f"{len(failed)} without output), expected at least 1"
        )
    time = columns.time[kept]
    # A row is out of order if an earlier one has a later time.
    num_unsorted = int((time < np.maximum.accumulate(time)).sum())
    if num_unsorted:
        columns.warnings.append(f"{num_unsorted} rows were out of order and have been sorted")
        order = np.argsort(time, kind="stable")
        time, kept = time[order], kept[order]
    ticks = TICKS_PER_SECOND["ns" if unit == "datetime" else unit]
    for metric, after in columns.waited.items():
        if not np.isnan(after[kept]).all():
            columns.extras[MEASURED[metric]] = [None if wait != wait else wait / ticks for wait in after.tolist()]
    rows = kept.tolist() if columns.extras else []
    notes = TraceNotes(
        path=path,
        format=format,
        num_rows=columns.num_rows,
        num_unsorted=num_unsorted,
        num_skipped=columns.num_skipped,
        failed_in_trace=0 if keep_failed else len(failed),
        has_hash_ids="hash_ids" in columns.extras,
        has_arrivals=has_arrivals,
        warnings=tuple(columns.warnings),
    )
    try:
        return Trace(
            name,
            (time - time[0]) / ticks,
            columns.input_length[kept],
            columns.output_length[kept],
            {key: [column[i] for i in rows] for key, column in columns.extras.items()},
            notes,
        )
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
