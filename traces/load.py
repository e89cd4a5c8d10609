"""Load a trace: find, recognise, read, sort it and shift it to start at 0."""

import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.errors import TraceError
from ..files.read import cut, cut_words, did_you_mean, printable
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
from .parse import Columns, columns_of_rows
from .parsed import parsed
from .rows import (
    FRAME,
    Rows,
    container,
    csv_head,
    csv_rows,
    decode,
    json_rows,
    jsonl_rows,
    page_rows,
    parquet_rows,
    read_bytes,
)
from .shipped import SHIPPED
from .trace import Trace, TraceNotes

if TYPE_CHECKING:
    import pandas as pd

# A step log's request lines; its first line identifies it.
STEP_LOG = Format(
    "steplog", "arrival", "input_length", "output_length", "s",
    {key: key for key in ("id", "max_tokens", "hash_ids", "block_size", "diffusion_max_steps")},
)  # fmt: skip
PLAUSIBLE_RATES = (0.01, 1000.0)  # req/s; others suggest another time unit


@dataclass(frozen=True, slots=True)
class Asked:
    """`load`'s arguments that select format and rows."""

    format: str | None = None
    columns: str | None = None
    only: str | None = None
    skip_bad: bool = False

    def is_format(self, name: str, recognised: bool) -> bool:
        """Requested, or recognised and no other requested."""
        return self.format == name or (self.format is None and self.columns is None and recognised)

    def format_of(self, place: str, first: Mapping[str, object]) -> Format:
        """By `columns`, by name, or recognised by the first row."""
        keys = list(first)
        if self.columns is not None:
            form = own_format(place, self.columns, first)
        elif self.format is None:
            form = recognise(place, keys)
        else:
            form = named(self.format)
            if not form.matches(keys):
                raise TraceError(f"{place}: keys {shown_keys(keys)} lack those of {form.name}, expected {form.keys}")
        return self.with_only(form, place, keys)

    def with_only(self, form: Format, place: str, keys: list[str]) -> Format:
        """Also keep the column of `only`."""
        return form if self.only is None else with_only(form, place, column_of(self.only), keys)


def load(
    path_or_name: "str | Path | pd.DataFrame",
    *,
    time_unit: str | None = None,
    skip_bad: bool = False,
    format: str | None = None,
    columns: str | None = None,
    only: str | None = None,
) -> Trace:
    """Load a trace from a file or a pandas frame, or a shipped one by name.

    `time_unit` (s, ms, us, ns) overrides the format's; `skip_bad` leaves bad rows out and counts them; `format` is by
    default recognised by its keys; `columns` names a file's columns
    (`arrival=created_at,input=prompt_tokens,output=completion_tokens`); `only` (`model=NAME` or `COLUMN=VALUE`) selects
    rows. TraceError names file and line of what cannot be read.
    """
    if time_unit is not None and time_unit not in TICKS_PER_SECOND:
        raise TraceError(f"time unit is {cut(time_unit)}, expected one of: {', '.join(TICKS_PER_SECOND)}")
    if columns is not None and format is not None:
        raise TraceError(f"--columns is {cut(columns)} and --format is {cut(format)}, expected one of them")
    asked = Asked(format, columns, only, skip_bad)
    if not isinstance(path_or_name, str | Path):
        return _ready(*read_frame(path_or_name, asked), FRAME, "frame", format, time_unit)
    file, name = locate(path_or_name)
    path, data = str(file), read_bytes(file)
    return parsed(
        data, (path, name, *astuple(asked), time_unit),
        lambda: _ready(*read_data(path, data, asked), path, name, format, time_unit),
    )  # fmt: skip


def _ready(found: Columns, form: Format, path: str, name: str, format: str | None, time_unit: str | None) -> Trace:
    """With doubts about the unit."""
    if time_unit is not None and form.unit == "datetime":
        raise TraceError(f"{path}: {form.time} is a date and time, expected no --time-unit (it is {time_unit})")
    if form.doubtful and time_unit is None and format is None:
        found.warnings.extend(doubts(found, form))
    runs = list(dict.fromkeys(found.extras.pop(OF_RUN, [])))
    if len(runs) > 1:
        policies = cut(", ".join(map(str, runs)))
        raise TraceError(f"{path} holds the requests of {len(runs)} policies ({policies}), expected those of one")
    return finish(found, path, name, form, time_unit)


def locate(path_or_name: str | Path) -> tuple[Path, str]:
    """File and name; an error lists the shipped traces."""
    path = Path(path_or_name)
    if os.path.exists(path):  # Path.exists raises for impossible names
        return path, printable(path.stem)
    name = str(path_or_name)
    if name in SHIPPED:
        return SHIPPED[name], name
    hint = did_you_mean(name, SHIPPED, any_case=True)
    raise TraceError(f"no trace file {cut_words(name)}{hint}, expected a file or a shipped trace: {', '.join(SHIPPED)}")


def read(path: Path, asked: Asked) -> tuple[Columns, Format]:
    """Columns and format of a file."""
    return read_data(str(path), read_bytes(path), asked)


def read_data(where: str, data: bytes, asked: Asked) -> tuple[Columns, Format]:
    """As `read`. where: the name in errors."""
    if asked.format is not None:
        named(asked.format)
    kind = container(where, data)
    if kind == "csv":
        return _chosen(*read_csv(where, data, asked), where, asked)
    if kind == "parquet":
        found = parquet_rows(where, data)
    elif kind == "json":
        found = json_rows(where, decode(where, data))
    else:
        text = decode(where, data)
        found = page_rows(where, text) or jsonl_rows(where, text)
    return _chosen(*read_rows(where, found, asked), where, asked)


def read_frame(frame: "pd.DataFrame", asked: Asked) -> tuple[Columns, Format]:
    """As `read`."""
    from . import frames  # files need no pandas

    keys = frames.keys_of(frame)
    first = dict(zip(keys, map(frames.plain, frame.iloc[0]), strict=True))
    table, form = frames.table_of(frame, keys, asked.format_of(FRAME, first))
    return _chosen(columns_of_rows(frames.rows_of(table), form, asked.skip_bad), form, FRAME, asked)


def _chosen(found: Columns, form: Format, path: str, asked: Asked) -> tuple[Columns, Format]:
    """Rows by `--only` and the log's columns."""
    if asked.only is not None and not form.only:
        raise TraceError(
            f"{path}: --only is {cut(asked.only)}, and {form.name} has no such column: expected another format"
        )
    if form.own or asked.only is not None:
        found = chosen(found, form, path, asked.only)
    return found, form


def read_rows(where: str, found: Rows, asked: Asked) -> tuple[Columns, Format]:
    """Of JSON or Parquet."""
    whole, first = next(((i, row) for i, row in enumerate(found.rows) if isinstance(row, dict) and row), (0, None))
    if first is None:
        if not found.rows:
            raise TraceError(f"{where} holds no rows, expected a trace")
        raise TraceError(f"{found.place(0)}: {found.rows[0] if isinstance(found.rows[0], str) else 'row has no keys'}")
    if asked.is_format(STEP_LOG.name, first.get("schema") == "dsim-steplog"):
        return columns_of_rows(requests_of_log(found), STEP_LOG, asked.skip_bad), STEP_LOG
    if is_otlp(first) and asked.is_format(OTLP.name, True):
        found, warnings = rows_of_spans(found)
        form = asked.with_only(OTLP, where, [*OTLP.extras])
        columns = columns_of_rows(found, form, asked.skip_bad)
        return replace(columns, warnings=[*warnings, *columns.warnings]), form
    form = asked.format_of(found.place(whole), flat(first))
    if any("." in key for key in form.all_keys):
        found = replace(found, rows=[row if isinstance(row, str) else flat(row) for row in found.rows])
    return columns_of_rows(found, form, asked.skip_bad), form


def requests_of_log(found: Rows) -> Rows:
    """A step log's request lines (docs/steplog.md); finished ones get their actual output length.

    If one ended early, the requested lengths become limits.
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
            each = row.get("emitted")  # one value is for all rows
            for request, tokens in zip(row["requests"], each if isinstance(each, list) else repeat(each), strict=False):
                if isinstance(tokens, int):
                    emitted[str(request)] = emitted.get(str(request), 0) + tokens
    rows = [found.rows[i] for i in of_requests]
    asked = [row.get("output_length") if isinstance(row, dict) else None for row in rows]
    early = False
    for i, row in enumerate(rows):
        if isinstance(row, dict) and (name := str(row.get("request"))) in finished and emitted.get(name):
            rows[i] = {**row, "output_length": emitted[name]}
            early = early or (isinstance(limit := asked[i], int) and emitted[name] < limit)
    if early:
        rows = [{**row, "max_tokens": asked[i]} if isinstance(row, dict) else row for i, row in enumerate(rows)]
    return replace(found, numbers=[found.numbers[i] for i in of_requests], rows=rows)


def read_csv(where: str, data: bytes, asked: Asked) -> tuple[Columns, Format]:
    """Of a CSV file."""
    text = decode(where, data)
    first = csv_head(where, text)
    form = asked.format_of(f"{where}:1", first)
    found = csv_rows(where, text)
    if not found.rows:
        raise TraceError(f"{where} holds a header and no rows, expected a trace")
    return columns_of_rows(found, form, asked.skip_bad), form


def doubts(columns: Columns, form: Format) -> list[str]:
    """Whether the unit may not be the format's."""
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


def finish(columns: Columns, path: str, name: str, form: Format, time_unit: str | None) -> Trace:
    """Drop failures, sort by time (ties in file order), start at 0."""
    kept = np.flatnonzero(columns.output_length > 0)
    num_failed = len(columns.time) - len(kept)
    if not len(kept):
        raise TraceError(
            f"{path}: none of {columns.num_rows} rows is a request ({columns.num_skipped} bad, "
            f"{num_failed} without output), expected at least 1"
        )
    time = columns.time[kept]
    # Out of order: an earlier row is later.
    num_unsorted = int((time < np.maximum.accumulate(time)).sum())
    if num_unsorted:
        columns.warnings.append(f"{num_unsorted} rows were out of order and have been sorted")
        order = np.argsort(time, kind="stable")
        time, kept = time[order], kept[order]
    unit = time_unit or form.unit
    ticks = TICKS_PER_SECOND["ns" if unit == "datetime" else unit]
    for metric, after in columns.waited.items():
        if not np.isnan(after[kept]).all():
            columns.extras[MEASURED[metric]] = [None if wait != wait else wait / ticks for wait in after.tolist()]
    notes = TraceNotes(
        path=path,
        format=form.name,
        num_rows=columns.num_rows,
        num_unsorted=num_unsorted,
        num_skipped=columns.num_skipped,
        failed_in_trace=num_failed,
        warnings=tuple(columns.warnings),
    )
    extras = {key: [column[i] for i in kept.tolist()] for key, column in columns.extras.items()}
    lengths = columns.input_length[kept], columns.output_length[kept]
    try:
        return Trace(name, (time - time[0]) / ticks, *lengths, extras, notes)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
