"""The raw rows of a trace file: CSV, JSON lines, JSON or Parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..engine.errors import TraceError
from ..files.read import MOST, cut, json_of, parsing
from ..files.read import read_bytes as read_bytes_of

MAX_PARQUET_ROWS = 10_000_000  # a small file may claim any number
LONGEST = 2**62  # ns, of a tool call
LATEST = 1e300  # a float beyond it loses a sum; the row reader rejects it
FRAME = "the frame"  # in place of a path
BY_ROW = "{}: row {}"  # without lines

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with line or row numbers; a text in place of a row says why it is unreadable."""

    path: str
    numbers: list[int]
    rows: list[Row | str]
    form: str = "{}:{}"  # path and number

    @classmethod
    def of(cls, path: str, found: Iterable[tuple[int, Row | str]], form: str = "{}:{}") -> "Rows":
        pairs = [(number, row) for number, item in found for row in rows_in(item)]
        return cls(path, [number for number, _ in pairs], [row for _, row in pairs], form)

    def place(self, i: int) -> str:
        """Of row i, for errors."""
        return self.form.format(self.path, self.numbers[i])


def read_bytes(path: Path) -> bytes:
    """TraceError if the file is missing, unreadable, too large or empty."""
    data = read_bytes_of(path, kind=TraceError)
    if not data.strip():
        raise TraceError(f"{path} is empty, expected a trace")
    return data


def container(path: str, data: bytes) -> str:
    """parquet, json, jsonl or csv by the first bytes; TraceError if binary."""
    if data[:4] == b"PAR1":
        return "parquet"
    if b"\0" in data[:65536]:
        raise TraceError(f"{path} is a binary file, expected CSV, JSON lines, JSON or Parquet")
    start = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return {b"[": "json", b"{": "jsonl"}.get(start, "csv")


def decode(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x}"
        raise TraceError(f"{path}:{line}: {found} is no UTF-8, expected a text file (or Parquet)") from error


def csv_head(path: str, text: str) -> dict[str, str | None]:
    """Column names, with the first complete row's values."""
    names: list[str] = []
    try:
        for fields in csv.reader(io.StringIO(text, newline="")):
            if not names:
                names = [name.strip() for name in fields]
            elif len(fields) == len(names):
                return dict(zip(names, fields, strict=True))
    except csv.Error as error:
        if not names:
            raise TraceError(f"{path}:1: malformed CSV ({error}), expected column names") from None
    return dict.fromkeys(names)


def csv_rows(path: str, text: str) -> Rows:
    """Without blank lines; a row of wrong width is unreadable."""
    numbers: list[int] = []
    rows: list[Row | str] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return Rows(path, numbers, rows)
        except csv.Error as error:
            numbers.append(reader.line_num)
            rows.append(f"malformed CSV ({error}), expected {len(header)} fields")
            continue
        if not header:
            header = [name.strip() for name in fields]
        elif fields:
            numbers.append(reader.line_num)
            if len(fields) == len(header):
                rows.append(dict(zip(header, fields, strict=True)))
            else:
                rows.append(f"row has {len(fields)} fields, expected {len(header)} ({cut(','.join(header))})")


def jsonl_rows(path: str, text: str) -> Rows:
    # str.splitlines would also split inside JSON strings.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line and not line.isspace())
    return Rows.of(path, ((number, parse_object(line)) for number, line in lines))


def json_rows(path: str, text: str) -> Rows:
    """The array must be complete."""
    try:
        return rows_of_array(path, json_of(text))
    except json.JSONDecodeError as error:
        line, why = f":{error.lineno}", error.msg
    except (ValueError, MemoryError) as error:
        line, why = "", cut(error)
    raise TraceError(f"{path}{line}: malformed JSON ({why}), expected an array of objects")


def page_rows(path: str, text: str) -> Rows | None:
    """An API's answer over several lines, `{"data": [...]}`; else None."""
    if not isinstance(parse_object(text.lstrip().split("\n", 1)[0]), str):
        return None  # JSON lines
    try:
        return rows_of_array(path, [json_of(text)])
    except (ValueError, MemoryError):
        return None


def rows_of_array(path: str, found: list[Any]) -> Rows:
    return Rows.of(path, enumerate(map(object_or_complaint, found), start=1), BY_ROW)


def parquet_rows(path: str, data: bytes) -> Rows:
    import pyarrow.parquet

    with parsing(path, "Parquet", TraceError), pyarrow.parquet.ParquetFile(io.BytesIO(data)) as file:
        claims = file.metadata
        size = sum(claims.row_group(i).total_byte_size for i in range(claims.num_row_groups))
        if claims.num_rows > MAX_PARQUET_ROWS or not 0 <= size <= MOST:
            raise TraceError(
                f"{path}: holds {claims.num_rows} rows of {size} bytes, expected at most {MAX_PARQUET_ROWS} of {MOST}"
            )
        rows = file.read().to_pylist()
    return Rows(path, list(range(1, len(rows) + 1)), rows, BY_ROW)


def parse_object(line: str) -> Row | str:
    """The line's object, or why there is none."""
    try:
        return object_or_complaint(json_of(line))
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
    except ValueError as error:
        why = cut(error)
    return f"malformed JSON ({why}), expected one object per line"


def object_or_complaint(found: Any) -> Row | str:
    """The object, or why it is none."""
    return found if isinstance(found, dict) else f"row is {json.dumps(found, default=str)[:40]}, expected an object"


def rows_in(row: Row | str) -> Iterator[Row | str]:
    """The object, or the items of an API's answer (`data`)."""
    items = [row]
    if isinstance(row, dict) and isinstance(row.get("data"), list):
        items = [object_or_complaint(item) for item in row["data"]]
    for item in items:
        yield from turns(item)


def turns(row: Row | str) -> Iterator[Row | str]:
    """A row, or an LLMServingSim session's turns, each a tool's time after the previous one."""
    if isinstance(row, str) or not isinstance(row.get("sub_requests"), list):
        yield row
        return
    start: Any = row.get("arrival_time_ns")
    delay: Any = 0
    for turn in map(object_or_complaint, row["sub_requests"]):
        if isinstance(turn, str):
            yield turn
            continue
        known = isinstance(delay, int | float) and 0 <= delay <= LONGEST
        if known and isinstance(start, int | float) and not isinstance(start, bool) and abs(start) <= LATEST:
            start += delay
        yield {
            "arrival_time_ns": start,
            "input_toks": turn.get("input_toks"),
            "output_toks": turn.get("output_toks"),
            "session_id": row.get("session_id"),
            "delay": delay / 1e6 if known else delay,  # the row reader rejects it
        }
        pause = turn.get("tool_duration_ns", 0)
        delay = pause if isinstance(pause, int | float) and not isinstance(pause, bool) else 0
