"""Rows that sum up many requests, as in OpenAI's usage exports."""

from dataclasses import replace
from typing import Any

from .formats import Format
from .parse import BadRowError, read_count, read_number
from .rows import Row, Rows
from .trace import MAX_REQUESTS


def spread(found: Rows, form: Format) -> tuple[Rows, str]:
    """Expand sums into evenly spaced requests of mean lengths (integers, same total); a warning."""
    numbers: list[int] = []
    rows: list[Row | str] = []
    for number, row in zip(found.numbers, found.rows, strict=True):
        try:
            requests = [row] if isinstance(row, str) else requests_of(row, form, MAX_REQUESTS - len(rows))
        except BadRowError as complaint:
            requests = [str(complaint)]
        numbers += [number] * len(requests)
        rows += requests
    warning = (
        f"{len(found.rows)} rows are sums: the {len(rows)} requests arrive at equal distances with mean lengths; "
        "--arrival and --lengths give them a spread"
    )
    return replace(found, numbers=numbers, rows=rows), warning


def requests_of(row: Row, form: Format, most: int) -> list[Any]:
    if row.get(form.count) in (None, "", 0, "0"):
        return []
    num = read_count(form.count, row.get(form.count), 0)
    if num > most:
        raise BadRowError(f"{form.count} is {num}, expected at most {MAX_REQUESTS} in all")
    start, end = (float(read_number(key, row.get(key), 0)) for key in (form.time, form.until))
    if not end > start:
        raise BadRowError(f"{form.until} is {end:g}, expected more than {form.time}, which is {start:g}")
    lengths = [(key, *divmod(read_count(key, row.get(key), 0), num)) for key in (form.input, form.output)]
    extras = {key: row[key] for key in form.extras if key in row}
    gap = (end - start) / num
    return [
        {form.time: start + (i + 0.5) * gap, **{key: each + (i < rest) for key, each, rest in lengths}, **extras}
        for i in range(num)
    ]
