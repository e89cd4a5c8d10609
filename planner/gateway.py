"""Reads a gateway's log that has start, first token and end of each request as what a client measured.

LiteLLM's columns are those of its table of spend logs (`LiteLLM_SpendLogs` in BerriAI/litellm, schema.prisma): an
answer that was not streamed has its end, or nothing, as `completionStartTime`. Any other log is read by `--columns`.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..engine.errors import DsimError, TraceError
from ..files.read import cut, float_of, quoted
from ..report.clients.read import LARGEST, MAX_TOKENS, ClientLog, Sent, failed, read_client
from ..traces.formats import OWN, TICKS_PER_SECOND, flat, shown_keys
from ..traces.parse import whole_ns
from ..traces.rows import Row, Rows, container, csv_rows, decode, json_rows, jsonl_rows, page_rows, parquet_rows
from ..traces.rows import read_bytes as read_bytes_of

NEEDED = ("arrival", "input", "output", "first", "end")
EXAMPLE = "arrival=START,first=FIRST_TOKEN,end=END,input=COLUMN,output=COLUMN"
LITELLM = {
    "arrival": "startTime", "first": "completionStartTime", "end": "endTime", "input": "prompt_tokens",
    "output": "completion_tokens", "model": "model", "status": "status", "kind": "call_type",
}  # fmt: skip
GOOD = ("", "success", "ok", "completed", "200")  # of a status, in any case of letters


@dataclass(frozen=True, slots=True)
class Log:
    """A gateway's rows and its name of each of our columns."""

    rows: Rows
    names: dict[str, str]
    tool: str

    def value(self, row: Row, ours: str) -> Any:
        return row.get(self.names.get(ours, ""))


def read_measured(
    path: Path, columns: str | None = None, only: str | None = None, time_unit: str | None = None
) -> tuple[ClientLog, list[str]]:
    """The requests in a gateway's log or in a load generator's file, and what is doubtful about them.

    columns: the log's own names; only: `model=NAME`, for a log of several.
    """
    log = _gateway(path, columns)
    if log is None:
        if only is not None:
            raise DsimError(f"--only is {cut(only)} and {path} is a load generator's file: expected a gateway's log")
        return read_client(path), []
    rows, warnings = _chosen(log, only)
    found = [_sent(log, i, row, time_unit) for i, row in rows]
    found.sort(key=lambda sent: sent.sent)
    whole = sum(not sent.error and math.isnan(sent.first) for sent in found)
    if whole:
        warnings.append(f"{whole} of {len(found)} answers were not streamed: their ttft and tpot are missing")
    model = next((str(value) for _, row in rows if (value := log.value(row, "model"))), "")
    return ClientLog(str(path), log.tool, model, tuple(found)), warnings


def _gateway(path: Path, columns: str | None) -> Log | None:
    """The rows of a gateway's log; None for a file that is a load generator's."""
    data, where = read_bytes_of(path), str(path)
    kind = container(where, data)
    if kind == "csv":
        rows = csv_rows(where, decode(where, data))
    elif kind == "parquet":
        rows = parquet_rows(where, data)
    elif kind == "json":
        rows = json_rows(where, decode(where, data))
    else:
        text = decode(where, data)
        rows = page_rows(where, text) or jsonl_rows(where, text)
    first = next((flat(row) for row in rows.rows if isinstance(row, dict) and row), {})
    keys = [str(key) for key in first]
    if columns is not None:
        return Log(rows, _own(where, columns, keys), "gateway")
    if {LITELLM[name] for name in NEEDED} <= set(keys):
        return Log(rows, LITELLM, "LiteLLM")
    if kind == "jsonl":
        return None
    raise TraceError(
        f"{where}: keys {shown_keys(keys)} are of no known log with start, first token and end, expected LiteLLM's "
        f"({', '.join(LITELLM[name] for name in NEEDED)}) or --columns {EXAMPLE}"
    )


def _own(where: str, text: str, keys: list[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, theirs = (side.strip() for side in part.partition("="))
        if ours not in OWN or not equals or not theirs or ours in names:
            raise TraceError(f"--columns has {quoted(part)}, expected {EXAMPLE} and, where there are, {', '.join(OWN)}")
        if theirs not in keys:
            had = f"expected one of: {shown_keys(keys)}"
            raise TraceError(f"{where}: no column {cut(theirs)} (--columns {ours}={cut(theirs)}), {had}")
        names[ours] = theirs
    for ours in NEEDED:
        if ours not in names:
            raise TraceError(f"--columns {cut(text)} lacks {ours}, expected {EXAMPLE}")
    return names


def _chosen(log: Log, only: str | None) -> tuple[list[tuple[int, Row]], list[str]]:
    """The rows of the model that was asked for, without embeddings, each with its index."""
    rows = []
    for i, row in enumerate(log.rows.rows):
        if isinstance(row, str):
            raise TraceError(f"{log.rows.place(i)}: {row}")
        rows.append((i, flat(row)))
    warnings = []
    kept = [(i, row) for i, row in rows if "embedding" not in str(log.value(row, "kind") or "").lower()]
    if len(kept) < len(rows):
        warnings.append(f"{len(rows) - len(kept)} of {len(rows)} rows are embeddings, and left out")
    models = Counter(str(log.value(row, "model") or "") for _, row in kept)
    if only is not None:
        key, _, wanted = (side.strip() for side in only.partition("="))
        if key != "model" or not wanted:
            raise DsimError(f"--only is {quoted(only)}, expected model=NAME")
        if wanted not in models:
            raise DsimError(f"{log.rows.path}: no row is of model {cut(wanted)}, expected one of {_shown(models)}")
        kept = [(i, row) for i, row in kept if str(log.value(row, "model") or "") == wanted]
    elif len(models) > 1:
        warnings.append(f"the log mixes {len(models)} models ({_shown(models)}): --only model=NAME takes one")
    if not kept:
        raise TraceError(f"{log.rows.path}: none of {len(rows)} rows is a request for text, expected at least 1")
    return kept, warnings


def _shown(models: Counter[str]) -> str:
    return cut(", ".join(f"{name or 'without a name'}: {count}" for name, count in models.most_common()))


def _sent(log: Log, i: int, row: Row, unit: str | None) -> Sent:
    where = log.rows.place(i)
    sent = _time(where, log, row, "arrival", unit)
    status = str(log.value(row, "status") or "")
    tokens = None if status.lower() not in GOOD else _count(where, log, row, "output")
    if not tokens:
        return failed(sent, 0, status if status.lower() not in GOOD else "no output")
    end, first = _time(where, log, row, "end", unit), math.nan
    if log.value(row, "first") not in (None, ""):
        first = _time(where, log, row, "first", unit)
        if not sent <= first <= end:
            told = f"{log.names['first']} is {first - sent:g} s and {log.names['end']} {end - sent:g} s"
            raise TraceError(f"{where}: {told} after {log.names['arrival']}, expected them in this order")
    if end < sent:
        raise TraceError(f"{where}: {log.names['end']} is {end - sent:g} s after the start, expected at least 0")
    if first == end and tokens > 1:
        first = math.nan
    return Sent(sent, first, end, _count(where, log, row, "input"), tokens, 0)


def _time(where: str, log: Log, row: Row, ours: str, unit: str | None) -> float:
    """A column's time in s: a number of the unit, or a date."""
    value = log.value(row, ours)
    number = float_of(str(value))
    if math.isfinite(number) and abs(number) < LARGEST:
        return number / TICKS_PER_SECOND[unit or "s"]
    try:
        moment = int(whole_ns(pd.Series([value], dtype=str))[0])
        if moment <= -(2**63) + 1:  # pandas' "not a time"
            raise ValueError
        return moment / 1e9
    except (ValueError, OverflowError, TypeError):
        raise TraceError(f"{where}: {log.names[ours]} is {quoted(str(value))}, expected a time") from None


def _count(where: str, log: Log, row: Row, ours: str) -> int:
    value = log.value(row, ours)
    number = float_of(str(value))
    if not 0 <= number <= MAX_TOKENS or number != int(number):
        raise TraceError(
            f"{where}: {log.names[ours]} is {quoted(str(value))}, expected a whole number from 0 to {MAX_TOKENS}"
        )
    return int(number)
