"""The raw rows of a trace file: CSV, JSON lines, JSON or Parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..engine.errors import TraceError
from ..engine.garbage import uncollected
from ..files.read import cut, json_of, parsing
from ..files.read import read_bytes as read_bytes_of

MAX_PARQUET_VALUES = 20_000_000  # about 3 GB; a larger file may hold one a byte
FRAME = "the frame"  # in place of a path
BY_ROW = "{}: row {}"  # without lines
LOOKED_AT = 1000  # rows, for the keys inside objects

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows with line or row numbers; an unreadable one is empty."""

    path: str
    numbers: list[int]
    rows: list[Row]
    bad: dict[int, str] = field(default_factory=dict)  # why a row is unreadable
    form: str = "{}:{}"  # path and number
    header: tuple[str, ...] | None = None  # of a CSV file or a frame
    top: str = ""  # place of the header
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, items: Iterable[tuple[int, Row | str]], form: str = "{}:{}") -> "Rows":
        rows = cls(path, [], [], form=form)
        for number, row in items:
            rows.add(number, row)
        return rows

    def add(self, number: int, row: Row | str) -> None:
        if isinstance(row, str):
            self.bad[len(self.rows)] = row
            row = {}
        self.numbers.append(number)
        self.rows.append(row)

    def place(self, i: int) -> str:
        """Of row i, for errors."""
        return self.form.format(self.path, self.numbers[i])

    def head(self) -> str:
        """The place of the keys."""
        places = (self.place(i) for i, row in enumerate(self.rows) if row)
        return self.top or next(places, self.path)

    def take(self, index: list[int]) -> "Rows":
        bad = {place: self.bad[i] for place, i in enumerate(index) if i in self.bad}
        return replace(self, numbers=[self.numbers[i] for i in index], rows=[self.rows[i] for i in index], bad=bad)

    @cached_property
    def keys(self) -> list[str]:
        """Of all rows, and `outer.inner` of the objects in the first LOOKED_AT."""
        keys = dict.fromkeys(self.header or ())
        if self.header is None:
            keys = dict.fromkeys(key for row in self.rows for key in row)
        for row in self.rows[:LOOKED_AT]:
            keys |= dict.fromkeys(dotted(row))
        return list(keys)

    def has(self, names: str) -> bool:
        """Whether a row may have the column; `a or b`: one of them."""
        return any(name in self.keys or name.partition(".")[0] in self.keys for name in names.split(" or "))

    def values(self, names: str) -> list[Any]:
        """A column; `a or b`: each row's first value of these."""
        if names in self.keys and "." not in names:
            return [row.get(names) for row in self.rows]
        if " or " not in names:
            return [inside(row, names) for row in self.rows]
        columns = map(self.values, names.split(" or "))
        return [next((v for v in cells if not is_missing(v)), None) for cells in zip(*columns, strict=True)]

    def first(self, name: str) -> Any:
        """A column's first value."""
        return next((value for row in self.rows if not is_missing(value := inside(row, name))), None)


def is_missing(value: Any) -> bool:
    """An empty cell."""
    return value is None or value in ("", "-") or value != value


def opened(value: Any) -> Any:
    """The object in a cell, or in its text; of a list of objects the first, as `0`."""
    if isinstance(value, str) and value.startswith(("{", "[{")):
        with suppress(ValueError):
            value = json_of(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {"0": value[0]}
    return value


def dotted(row: Row, before: str = "") -> Iterator[str]:
    """The keys, and those inside objects as `outer.inner`."""
    for key, value in row.items():
        yield f"{before}{key}"
        inner = opened(value)
        if isinstance(inner, dict):
            yield from dotted(inner, f"{before}{key}.")


def inside(row: Row, path: str) -> Any:
    """The value at `outer.inner`; a key may have dots itself."""
    if path in row:
        return row[path]
    outer, dot, tail = path.partition(".")
    while dot:
        if outer in row:
            inner = opened(row[outer])
            if not isinstance(inner, dict):
                return None
            return inside(inner, tail)
        head, dot, tail = tail.partition(".")
        outer = f"{outer}.{head}"
    return None


def read_bytes(path: Path) -> bytes:
    """TraceError if the file is missing, unreadable, too large or empty."""
    data = read_bytes_of(path, kind=TraceError)
    if not data.strip():
        raise TraceError(f"{path} is empty, expected a trace")
    return data


@uncollected()
def raw_rows(path: str, data: bytes) -> Rows:
    """The rows of CSV, JSON lines, JSON or Parquet. path: the name in errors."""
    kind = container(path, data)
    if kind == "parquet":
        return parquet_rows(path, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x}"
        raise TraceError(f"{path}:{line}: {byte} is no UTF-8, expected a text file (or Parquet)") from error
    if kind == "csv":
        return csv_rows(path, text)
    if kind == "jsonl" and isinstance(parse_object(text.split("\n", 1)[0]), dict):
        return jsonl_rows(path, text)
    return json_rows(path, text, kind)


def container(path: str, data: bytes) -> str:
    """parquet, json, jsonl or csv by the first bytes; TraceError if binary."""
    if data[:4] == b"PAR1":
        return "parquet"
    if b"\0" in data[:65536]:
        raise TraceError(f"{path} is a binary file, expected CSV, JSON lines, JSON or Parquet")
    head = data[:65536].removeprefix(b"\xef\xbb\xbf").lstrip()
    return {b"[": "json", b"{": "jsonl"}.get(head[:1], "csv")


def csv_rows(path: str, text: str) -> Rows:
    """Without blank lines; a row of wrong width is unreadable."""
    head = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=max(",;\t", key=head.count))
    try:
        header = tuple(name.strip() for name in next(reader))
    except csv.Error as error:
        raise TraceError(f"{path}:1: malformed CSV ({error}), expected column names") from None
    rows = Rows(path, [], [], header=header, top=f"{path}:1")
    while True:
        try:
            for fields in reader:
                if len(fields) == len(header):
                    rows.numbers.append(reader.line_num)
                    rows.rows.append(dict(zip(header, fields)))  # noqa: B905
                elif fields:
                    problem = f"row has {len(fields)} fields, expected {len(header)} ({cut(','.join(header))})"
                    rows.add(reader.line_num, problem)
        except csv.Error as error:
            rows.add(reader.line_num, f"malformed CSV ({error}), expected {len(header)} fields")
        else:
            return rows


def jsonl_rows(path: str, text: str) -> Rows:
    # str.splitlines would also split inside JSON strings.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line and not line.isspace())
    return Rows.of(path, ((number, parse_object(line)) for number, line in lines))


def json_rows(path: str, text: str, kind: str) -> Rows:
    """One complete value; JSON lines with a bad first line are read line by line."""
    try:
        value = json_of(text)
    except (ValueError, MemoryError) as error:
        if kind == "jsonl":
            return jsonl_rows(path, text)
        raise TraceError(f"{path}: malformed JSON ({cut(error)}), expected an array of objects") from None
    if not isinstance(value, list):
        value = [value]
    return Rows.of(path, enumerate(map(object_or_complaint, value), start=1), BY_ROW)


def parquet_rows(path: str, data: bytes) -> Rows:
    import pyarrow.parquet

    rows: list[Row] = []
    with parsing(path, "Parquet", TraceError), pyarrow.parquet.ParquetFile(io.BytesIO(data)) as file:
        # Equal values may take nothing in the file.
        num_values, limit = file.metadata.num_rows * file.metadata.num_columns, max(MAX_PARQUET_VALUES, len(data))
        if num_values > limit:
            raise TraceError(f"{path}: holds {num_values} values, expected at most {limit}")
        for batch in file.iter_batches(1024):
            rows += batch.to_pylist()
    return Rows(path, list(range(1, len(rows) + 1)), rows, form=BY_ROW)


def parse_object(line: str) -> Row | str:
    """The line's object, or why there is none."""
    try:
        return object_or_complaint(json_of(line))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except ValueError as error:
        reason = cut(error)
    return f"malformed JSON ({reason}), expected one object per line"


def object_or_complaint(value: Any) -> Row | str:
    """The object, or why it is none."""
    if isinstance(value, dict):
        return value
    return f"row is {json.dumps(value, default=str)[:40]}, expected an object"
