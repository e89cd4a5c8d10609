"""Sums over many requests, as OpenAI's usage exports have them, and the requests that they stand for."""

from dataclasses import replace
from typing import Any

from .formats import Format
from .parse import BadRowError, read_count, read_number
from .rows import Row, Rows

MOST = 10_000_000  # requests: what a replay can hold


def spread(found: Rows, form: Format) -> tuple[Rows, str]:
    """A row a request, at equal distances between its sum's start and end, and a warning that says so.

    Each has the sum's mean lengths, in whole tokens that add up to the sum. A bad row is a complaint about it.
    """
    numbers: list[int] = []
    rows: list[Row | str] = []
    for number, row in zip(found.numbers, found.rows, strict=True):
        try:
            requests = [row] if isinstance(row, str) else requests_of(row, form, MOST - len(rows))
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
    """The requests of one sum; none where it holds none, as in an hour without traffic."""
    if row.get(form.count or "") in (None, "", 0, "0"):
        return []
    num = read_count(row, form.count or "", 0)
    if num > most:
        raise BadRowError(f"{form.count} is {num}, expected at most {MOST} in all")
    start, end = (float(read_number(key, row.get(key), 0)) for key in (form.time, form.until))
    if not end > start:
        raise BadRowError(f"{form.until} is {end:g}, expected more than {form.time}, which is {start:g}")
    lengths = [(key, *divmod(read_count(row, key, 0), num)) for key in (form.input, form.output)]
    kept = {key: row[key] for key in form.extras if key in row}
    gap = (end - start) / num
    return [
        {form.time: start + (i + 0.5) * gap, **{key: each + (i < rest) for key, each, rest in lengths}, **kept}
        for i in range(num)
    ]
