"""Read users' files: bounded, never from a device, one-line errors."""

import csv
import difflib
import errno
import io
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from ..engine.errors import SHOWN, DsimError, MachineError
from ..engine.errors import cut as cut
from ..engine.errors import quoted as quoted

TOO_DEEP = "it is nested too deeply"
MOST = 2 << 30  # bytes of a trace, log or journal
MOST_OF_SETTINGS = 64 << 20  # bytes of a profile, manifest or TOML file
OF_THE_MACHINE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
}
LONGEST_WORD = 200  # of a message
LARGEST = 1e100  # number of a file: sums and squares stay finite
# Characters that control a terminal, or the direction of text; not tabs and ends of lines.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # a shell's pipes

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begins a spreadsheet's formula

ErrorType = type[DsimError]
FilePath: TypeAlias = str | Path
Json: TypeAlias = dict[str, Any]  # an object of a JSON file


def read_bytes(path: FilePath, *, max_size: int = MOST, kind: ErrorType = DsimError) -> bytes:
    """Of a file or a shell's pipe; DsimError for other things and above `max_size` bytes."""
    try:
        with open(_checked(path, kind), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > max_size else file.read(max_size + 1)
    except OSError as error:
        raise fault(path, error, "read", kind) from None
    except MemoryError:
        raise MachineError(f"{path}: does not fit into memory") from None
    if max(size, len(data)) > max_size:
        raise kind(f"{path}: holds {max(size, len(data))} bytes, expected at most {max_size}")
    return data


def read_text(path: FilePath, *, kind: ErrorType = DsimError) -> str:
    """Without byte-order mark."""
    data = read_bytes(path, max_size=MOST_OF_SETTINGS, kind=kind)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None


def json_of(text: str | bytes | bytearray, **options: Any) -> Any:
    """json.loads with its options; ValueError if invalid or nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def read_json(path: FilePath, *, kind: ErrorType = DsimError) -> Any:
    return parsed_json(path, read_text(path, kind=kind), kind=kind)


def parsed_json(path: FilePath, text: str, *, kind: ErrorType = DsimError) -> Any:
    """A file's text as JSON."""
    with parsing(path, "JSON", kind):
        return json_of(text)


def read_toml(path: FilePath, *, kind: ErrorType = DsimError) -> dict[str, Any]:
    text = read_text(path, kind=kind)
    with parsing(path, "TOML", kind):
        return tomllib.loads(text)


def read_csv(
    path: FilePath, columns: Iterable[str], *, kind: ErrorType = DsimError
) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows as FILE:LINE and cells by column; DsimError if a column is missing."""
    text = read_text(path, kind=kind)
    with parsing(path, "CSV", kind):
        head, *rows = list(csv.reader(io.StringIO(text))) or [[]]
    if not set(columns) <= set(head):
        raise kind(f"{path}: has columns {cut(', '.join(head))}, expected {', '.join(columns)}")
    for line, cells in enumerate(rows, 2):
        if cells and len(cells) != len(head):
            raise kind(f"{path}:{line}: it has {len(cells)} cells, expected {len(head)}")
        if cells:
            yield f"{path}:{line}", dict(zip(head, map(_uncovered, cells), strict=True))


def _uncovered(cell: str) -> str:
    """Without the apostrophe that `csv_of` puts before a formula."""
    text = cell.strip()
    return text.removeprefix("'" * text[1:].startswith(FORMULA))


def read_lines(path: FilePath, *, kind: ErrorType = DsimError) -> Iterator[tuple[int, str]]:
    """Numbered from 1; the length of a line is limited."""
    with naming(path, "read", kind), open(_checked(path, kind), "rb") as file:
        number = 0
        while line := file.readline(MOST_OF_SETTINGS + 1):
            number += 1
            if len(line) > MOST_OF_SETTINGS or file.tell() > MOST:
                raise kind(f"{path}:{number}: is longer than {MOST_OF_SETTINGS} bytes, or the file than {MOST}")
            try:
                yield number, line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise kind(f"{path}:{number}: is not UTF-8 text: {error.reason}") from None


@contextmanager
def parsing(place: object, form: str, kind: ErrorType = DsimError) -> Iterator[None]:
    """A parser's errors become one line that names the place."""
    try:
        yield
    except DsimError:
        raise
    except Exception as error:
        reason = cut(str(error) or type(error).__name__)
        raise kind(f"{place}: cannot be read as {form}: {reason}") from None


def cut_words(text: str) -> str:
    """On one line, without the middle of long words."""
    words = (w if len(w) <= LONGEST_WORD else f"{w[: SHOWN // 2]}...{w[-SHOWN // 2 :]}" for w in text.split())
    return " ".join(words)


def float_of(text: str) -> float:
    """NaN if the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def share_of(text: str) -> float:
    """Of `2%` or `0.02`; NaN if the text is no number."""
    return float_of(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def shown(value: object) -> str:
    """For messages."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return cut(json.dumps(value, ensure_ascii=True, default=str))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint at the nearest name in any case, or ""."""
    by_case = {candidate.lower(): candidate for candidate in names}
    for close in difflib.get_close_matches(name.lower(), by_case, n=1):
        return f" (did you mean {by_case[close]}?)"
    return ""


def printable(name: str) -> str:
    """Bytes that are not UTF-8, lone surrogates, and characters that control a terminal become escapes."""
    try:
        text = os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        text = name.encode("utf-8", "backslashreplace").decode()
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def without_secrets(text: str) -> str:
    """Without the user, the query and the fragment of each URL."""
    return re.sub(r"(\w://)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*)?", r"\1\2", text)


def fault(path: object, error: OSError, doing: str = "written", kind: ErrorType = DsimError) -> DsimError:
    """DsimError if another path fixes it, else MachineError."""
    line = f"{path}: cannot be {doing}: {error.strerror or error}"
    return MachineError(line) if error.errno in OF_THE_MACHINE else kind(line)


@contextmanager
def naming(path: object, doing: str = "written", kind: ErrorType = DsimError) -> Iterator[None]:
    """An OSError becomes `fault`'s line."""
    try:
        yield
    except OSError as error:
        raise fault(path, error, doing, kind) from None


def described(mode: int) -> str:
    kinds = {
        "d": "a directory",
        "l": "a symbolic link",
        "p": "a pipe",
        "s": "a socket",
        "c": "a device",
        "b": "a device",
    }
    return kinds.get(stat.filemode(mode)[0], "a file")


def _checked(path: FilePath, kind: ErrorType) -> FilePath:
    """A file or a shell's pipe: a device or another pipe may never end."""
    if "\0" in str(path):
        raise kind(f"{cut(repr(str(path)))}: cannot be read: no file's name holds a null byte")
    try:
        mode = os.stat(path).st_mode
    except UnicodeEncodeError:
        raise kind(f"{cut(repr(str(path)))}: cannot be read: no file's name holds half a character") from None
    piped = stat.S_ISFIFO(mode) and str(path).startswith(STREAMS)
    if not (stat.S_ISREG(mode) or piped):
        raise kind(f"{path}: is {described(mode)}, expected a file")
    return path
