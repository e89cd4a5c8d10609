"""Mutations: what files and command lines turn into in the hands of other tools, broken disks and people who try.

Every function takes its chance from a `random.Random`: Hypothesis's own in the test run, which shrinks what it finds,
and a seeded one in the long run, which is faster.
"""

import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

# What a value may turn into, whatever it was.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e17, 1e308, math.inf, math.nan,
    "", " ", "none", "nan", "9" * 5000, "x" * 10_000, "\0", "\ud800", "\u202e", "a\nb", "../..", "=1+1", "<b>", [], {},
    [[]], [None], {"a": None}, {"": {}}, ["x"] * 100,
)  # fmt: skip
WORDS = (
    "", "0", "-1", "1", "2", "1e400", "1e-320", "nan", "inf", "-inf", "0x10", "1_000", "9" * 30, "9" * 5000, "x" * 5000,
    "1e17", "none", "true", "=", ",", ":", "/", "a=b", "%", "99%", "101%", "-", "--", "..", "/dev/zero", "/dev/full",
    "~",    "\u202e", "\ud800", "é", "[bold]", "{}", "'", '"', "\n", "\t", "2147483647", "1.5", "1e9", "s", "5ms",
)  # fmt: skip
# Too deep for the parser; and just not too deep for it, but for whoever goes through its values from a place deeper in.
DEEP = (
    "[" * 100_000,
    *(left * n + "1" + right * n for n in (850, 900, 950, 970) for left, right in ("[]", ('{"a":', "}"))),
)
GENTLE = 0.35  # share of the inputs that only say other numbers: most of them are read, and what follows is attacked


def json_value(value: Any, chance: Random) -> Any:
    """The value with one to three of its nodes changed: another type, gone, twice, elsewhere."""
    for _ in range(chance.randint(1, 3)):
        value = _changed(value, chance)
    return value


def json_text(value: Any, chance: Random) -> bytes:
    """A JSON text of a mutated value, now and then broken as a text."""
    if chance.random() < GENTLE:
        return nearly(json.dumps(value), chance).encode()
    text = json.dumps(json_value(value, chance), ensure_ascii=chance.random() < 0.9)
    if chance.random() < 0.05:
        return text.replace("1", chance.choice(("NaN", chance.choice(DEEP), "9" * 5000, "1e999")), 1).encode(
            "utf-8", "replace"
        )
    data = text.encode("utf-8", "surrogatepass")
    return damaged(data, chance) if chance.random() < 0.1 else data


def json_lines(rows: list[Any], chance: Random) -> bytes:
    """JSON lines of which some are mutated, broken, twice or missing."""
    if chance.random() < GENTLE:
        return nearly("".join(json.dumps(row) + "\n" for row in rows), chance).encode()
    lines = []
    for row in rows:
        how = chance.random()
        if how < 0.3:
            lines.append(json_text(row, chance))
        elif how < 0.35:
            continue
        elif how < 0.4:
            lines.append(chance.choice((b"", b"[]", b"{", b"\xff", b"null", b"7")))
        else:
            lines.append(json.dumps(row).encode())
            if how > 0.97:
                lines.append(lines[-1])
    end = chance.choice((b"\n", b"\n", b"\r\n", b""))
    return b"\n".join(lines) + end


def table(header: list[str], rows: list[list[str]], chance: Random) -> bytes:
    """A CSV file of mutated cells, rows and columns."""
    if chance.random() < GENTLE:
        head, *others = (",".join(row) + "\n" for row in [header, *rows])
        return (head + nearly("".join(others), chance)).encode()
    cells = [list(header), *(list(row) for row in rows)]
    for _ in range(chance.randint(1, 4)):
        row = chance.choice(cells)
        if row and chance.random() < 0.7:
            row[chance.randrange(len(row))] = chance.choice((*WORDS, "2023-11-16 18:15:46", "1e300", "2262-04-12"))
        elif chance.random() < 0.5:
            row.append(chance.choice(WORDS))
        elif row:
            row.pop()
    mark = chance.choice((",", ",", ",", ";", "\t"))
    text = "\n".join(mark.join(row) for row in cells) + chance.choice(("\n", ""))
    data = text.encode("utf-8", "surrogatepass")
    return damaged(data, chance) if chance.random() < 0.2 else data


def toml_text(text: str, chance: Random) -> bytes:
    """A TOML text of which values, keys or whole lines are others."""
    if chance.random() < GENTLE:
        return nearly(text, chance).encode()
    lines = text.split("\n")
    for _ in range(chance.randint(1, 3)):
        i = chance.randrange(len(lines))
        key, equals, _ = lines[i].partition("=")
        value = chance.choice(
            ("1", "-1", "1.5", "nan", "inf", "true", '"x"', "[]", "[1, 2]", "{}", "{a = 1}", "9" * 5000, "1979-05-27",
             '"' + "x" * 5000 + '"', "[" * 5000, "0x7fffffff", "[[[]]]", '["a", 1]', '"\\u0000"')
        )  # fmt: skip
        how = chance.random()
        if equals and how < 0.6:
            lines[i] = f"{key}= {value}"
        elif how < 0.75:
            lines.insert(i, f"{chance.choice(('a', 'policy', 'x.y', 'rate', key.strip() or 'b'))} = {value}")
        elif how < 0.85:
            lines.insert(i, chance.choice(("[grid]", "[base]", "[x]", "[policy]")))
        else:
            del lines[i]
            lines = lines or [""]
    data = "\n".join(lines).encode()
    return damaged(data, chance) if chance.random() < 0.1 else data


def nearly(text: str, chance: Random) -> str:
    """The text with one to three of its digits others."""
    out = list(text)
    digits = [i for i, c in enumerate(out) if c in "0123456789"]
    for at in chance.sample(digits, min(len(digits), chance.randint(1, 3))):
        out[at] = chance.choice("123456789")
    return "".join(out)


def damaged(data: bytes, chance: Random) -> bytes:
    """Bytes that were cut short, flipped, overwritten or repeated."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not out:
            return b""
        at = chance.randrange(len(out))
        match chance.randrange(5):
            case 0:
                del out[at:]
            case 1:
                out[at] = chance.randrange(256)
            case 2:
                out[at] ^= 1 << chance.randrange(8)
            case 3:
                size = chance.randint(1, 64)
                out[at : at + size] = bytes(size)
            case _:
                out[at:at] = out[at : at + chance.randint(1, 256)]
    return bytes(out)


def columns(table: pa.Table, chance: Random) -> pa.Table:
    """A Parquet file's table with a column gone, twice, of another type or of other values, or with other rows."""
    at = chance.randrange(table.num_columns)
    column, name = table.column(at), table.column_names[at]
    rows = [chance.randrange(table.num_rows) for _ in range(chance.randrange(table.num_rows + 1))]
    match chance.randrange(8):
        case 0:
            return table.remove_column(at)
        case 1:
            return table.append_column(name, column)
        case 2:
            return table.set_column(at, name, pa.array([str(value) for value in column.to_pylist()]))
        case 3:
            return table.set_column(at, name, pa.nulls(table.num_rows, column.type))
        case 4:
            return table.set_column(at, name, pa.nulls(table.num_rows))
        case 5:
            others = pa.array([chance.randrange(len(column)) for _ in column], pa.int64())
            return table.set_column(at, name, column.take(others))
        case 6 if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            values = column.to_pylist()
            for _ in range(min(len(values), chance.randint(1, 3))):
                values[chance.randrange(len(values))] = _edge(column.type, chance)
            return table.set_column(at, name, pa.array(values, column.type))
        case _:
            return table.take(pa.array(sorted(rows) if chance.random() < 0.5 else rows, pa.int64()))


def _edge(kind: pa.DataType, chance: Random) -> float | int:
    """A number at the edge of a column's type."""
    if pa.types.is_floating(kind):
        return chance.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-320, 1e308))
    most = 2 ** (kind.bit_width - pa.types.is_signed_integer(kind)) - 1
    return chance.choice((0, 1, most, most // 2, 0 if pa.types.is_unsigned_integer(kind) else -1))


# Types of a Parquet column, and values of each.
TYPES: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.date32(), date(2026, 1, 2)), (pa.timestamp("us", "UTC"), datetime(2026, 1, 2)),
    (pa.timestamp("ns"), datetime(2026, 1, 2)), (pa.duration("ms"), timedelta(1)), (pa.time64("us"), time(1)),
    (pa.decimal128(38, 9), Decimal("1.5")), (pa.decimal128(38, 0), Decimal(10) ** 37), (pa.binary(), b"\xff9"),
    (pa.large_string(), "9"), (pa.dictionary(pa.int32(), pa.string()), "9"), (pa.list_(pa.int64()), [1, 2]),
    (pa.struct([("a", pa.int64())]), {"a": 1}), (pa.map_(pa.string(), pa.int64()), [("a", 1)]), (pa.bool_(), True),
    (pa.uint64(), 2**64 - 1), (pa.int8(), -1), (pa.float32(), 3e38), (pa.float64(), math.inf), (pa.float64(), 1e-320),
)  # fmt: skip


def of_a_type(num: int, chance: Random) -> pa.Array:
    """A column of so many values of one of Parquet's types, now and then without some."""
    kind, value = chance.choice(TYPES)
    return pa.array([None if chance.random() < 0.1 else value for _ in range(num)], kind)


def spec(text: str, chance: Random) -> str:
    """A text of an option's small language, such as `optimus:8,num_blocks=2`, with parts of it changed."""
    if chance.random() < GENTLE:
        return nearly(text, chance)
    parts = re.split(r"([,:=/|])", text)
    for _ in range(chance.randint(1, 2)):
        i = chance.randrange(len(parts))
        parts[i] = chance.choice((*WORDS, parts[i] * 2, *parts))
    return "".join(parts)


def _changed(value: Any, chance: Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.08:
        return _odd(value, chance)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
    how = chance.random()
    if how < 0.12:
        del copy[key]
    elif how < 0.18 and isinstance(copy, dict):
        copy[chance.choice(("", "x" * 300, "a\nb", "schema", "policy"))] = copy.pop(key)
    elif how < 0.24 and isinstance(copy, list):
        copy.extend(copy[:3])
    else:
        copy[key] = _changed(copy[key], chance)
    return copy


def _odd(value: Any, chance: Random) -> Any:
    """Another value, or a near one of the same type."""
    near: dict[type, Callable[[Any], Any]] = {
        int: lambda v: v + chance.choice((-1, 1, 2**32)), float: lambda v: v * chance.choice((-1, 1e6, 1e-6)),
        str: lambda v: v + "x", bool: lambda v: not v, list: lambda v: [*v, None], dict: lambda v: {**v, "x": 1},
    }  # fmt: skip
    if type(value) in near and chance.random() < 0.25:
        return near[type(value)](value)
    return chance.choice(ODD)
