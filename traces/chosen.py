"""Select a log's rows: one model's text requests that the server itself answered."""

import re
from collections import Counter

import numpy as np

from ..engine.errors import DsimError, TraceError, cut, quoted
from ..files.read import did_you_mean
from .formats import Format, check_column
from .rows import Rows
from .trace import Bools

# Of lower-case cells. FAILED: words, or an HTTP status of 400 or more.
FAILED = re.compile(
    "fail|err|abort|cancel|timed?.?out|reject|refuse|denied|disconnect|incomplete|exception|unavail|false|"
    r"^(status_code_)?[45]\d\d\b"
)
TRUE = re.compile(r"^(true|1|1\.0)$")
# Columns that exclude rows: cells, reason.
LEFT_OUT = {
    "kind": (
        re.compile("embed|rerank|image|audio|speech|transcription|realtime|moderation|video|ocr"),
        "are no requests for text (embeddings, images or others)",
    ),
    "cache_hit": (TRUE, "were answered from the gateway's cache, and not by the server"),
}
OF_LOG = (*LEFT_OUT, "cancelled", "error")


def chosen(rows: Rows, form: Format, only: str | None) -> tuple[Rows, list[str]]:
    """The rows to read, and warnings of those left out. only: `model=NAME` or `COLUMN=VALUE`."""
    total = len(rows.rows)
    keep, warnings = np.ones(total, bool), []
    columns = form.columns_of(rows)
    for name, (cells, reason) in LEFT_OUT.items():
        if name not in columns or not form.is_log:
            continue
        out = keep & _matches(cells, texts_of(rows, columns[name]))
        if num_out := int(out.sum()):
            warnings.append(f"{num_out} of {total} rows {reason}, and left out")
        keep &= ~out
    readable = np.array([i not in rows.bad for i in range(total)])
    models = columns.get("model", "model")
    if only is not None:
        keep &= _selected(rows, models, only, keep) | ~readable
    elif form.is_log and "model" in columns:
        counts = Counter(np.array(texts_of(rows, models), object)[keep & readable])
        if len(counts) > 1:
            warnings.append(f"the log mixes {len(counts)} models ({_shown(counts)}): --only model=NAME takes one")
    if not keep.any():
        raise TraceError(f"{rows.path}: none of {total} rows is a request for text, expected at least 1")
    if not keep.all():
        rows = rows.take(np.flatnonzero(keep).tolist())
    return rows, warnings


def _selected(rows: Rows, models: str, only: str, keep: Bools) -> Bools:
    """Rows with the asked value. models: the column of `model`."""
    column, _, value = (side.strip() for side in only.partition("="))
    if not (column and value):
        raise DsimError(f"--only is {quoted(only)}, expected model=NAME or COLUMN=VALUE")
    source = {"model": models}.get(column, column)
    if " or " not in source:
        check_column(rows, source, "--only")
    texts = np.array(texts_of(rows, source), object)
    counts = Counter(texts[keep])
    if value not in counts:
        hint = did_you_mean(value, [name for name in counts if name])
        raise DsimError(f"{rows.path}: no row is of {column} {cut(value)}{hint}, expected one of {_shown(counts)}")
    selected: Bools = texts == value
    return selected


def failures(rows: Rows, form: Format) -> list[str]:
    """Why each request of a log failed, "" if it was answered."""
    columns = form.columns_of(rows)
    reasons = [""] * len(rows.rows)
    if form.is_log and "status" in columns:
        texts = texts_of(rows, columns["status"])
        reasons = np.where(_matches(FAILED, texts), texts, "").tolist()
    if "error" in columns:
        reasons = texts_of(rows, columns["error"])
    if "cancelled" in columns:
        reasons = np.where(_matches(TRUE, texts_of(rows, columns["cancelled"])), "cancelled", reasons).tolist()
    return reasons


def _matches(cells: re.Pattern[str], texts: list[str]) -> Bools:
    return np.array([cells.search(text.lower()) is not None for text in texts])


def texts_of(rows: Rows, names: str) -> list[str]:
    """A column's cells; "" if missing."""
    return ["" if value is None else str(value).strip() for value in rows.values(names)]


def _shown(values: Counter[str]) -> str:
    return cut(", ".join(f"{name or 'without a name'}: {count}" for name, count in values.most_common()))
