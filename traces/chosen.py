"""Select a log's rows: one model's text requests that the server itself answered."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine.errors import DsimError, TraceError, cut, quoted
from ..files.read import did_you_mean
from .formats import Format, check_column
from .rows import Rows

# In lower case.
GOOD = (
    "", "success", "succeeded", "ok", "completed", "complete", "finished", "done", "unset", "true", "none", "stop",
    "length", "eos", "tool_calls", "function_call", "end_turn", "max_tokens", "stop_sequence", "content_filter",
)  # fmt: skip
BAD = re.compile("fail|err|abort|cancel|timed?.?out|reject|refuse|denied|disconnect|incomplete|exception|unavail|false")
NO_TEXT = re.compile("embed|rerank|image|audio|speech|transcription|realtime|moderation|video|ocr")
CODE = re.compile(r"[1-5]\d\d\b")  # of HTTP
TRUE = ("true", "1", "1.0")
# Columns that exclude rows: test of the lower-case value, reason.
LEFT_OUT: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("kind", NO_TEXT.search, "are no requests for text (embeddings, images or others)"),
    ("cache_hit", TRUE.__contains__, "were answered from the gateway's cache, and not by the server"),
)
OF_LOG = (*(name for name, _, _ in LEFT_OUT), "cancelled", "error")


def is_good(status: str) -> bool | None:
    """Whether the request was answered; None: an unknown word."""
    word = status.lower().removeprefix("status_code_")
    if CODE.match(word):
        return word < "4"
    return True if word in GOOD else False if BAD.search(word) else None


def chosen(rows: Rows, form: Format, only: str | None) -> tuple[Rows, list[str]]:
    """The rows to read, and warnings of those left out. only: `model=NAME` or `COLUMN=VALUE`."""
    total = len(rows.rows)
    keep, warnings = np.ones(total, bool), []
    columns = form.columns_of(rows)

    def leave(out: Sequence[bool], reason: str) -> None:
        if num_out := int((keep & out).sum()):
            warnings.append(f"{num_out} of {total} rows {reason}, and left out")
            keep[:] &= ~np.array(out)

    for name, is_out, reason in LEFT_OUT if form.is_log else ():
        if name in columns:
            leave([bool(is_out(text.lower())) for text in texts_of(rows, columns[name])], reason)
    if form.is_log and "id" in columns:
        ids, *keys = (texts_of(rows, key) for key in (columns["id"], form.time, form.output))
        first: dict[Any, int] = {}
        repeats = [first.setdefault(key, i) < i and key[0] != "" for i, key in enumerate(zip(ids, *keys, strict=True))]
        leave(repeats, "repeat a request (id and time)")
    models = columns.get("model", "model")
    if only is not None:
        column, _, value = (side.strip() for side in only.partition("="))
        if not (column and value):
            raise DsimError(f"--only is {quoted(only)}, expected model=NAME or COLUMN=VALUE")
        source = models if column == "model" else column
        if source not in columns.values():
            check_column(rows, source, "--only")
        texts = np.array(texts_of(rows, source), object)
        counts = Counter(texts[keep])
        if value not in counts:
            hint = did_you_mean(value, [name for name in counts if name])
            choice = f"{column} {cut(value)}"
            raise DsimError(f"{rows.path}: no row is of {choice}{hint}, expected one of {_shown(counts)}")
        keep &= (texts == value) | [i in rows.bad for i in range(total)]
    elif form.is_log and "model" in columns:
        counts = Counter(text for i, text in enumerate(texts_of(rows, models)) if keep[i] and i not in rows.bad)
        if len(counts) > 1:
            warnings.append(f"the log mixes {len(counts)} models ({_shown(counts)}): --only model=NAME takes one")
    if not keep.any():
        raise TraceError(f"{rows.path}: none of {total} rows is a request for text, expected at least 1")
    return rows if keep.all() else rows.take(np.flatnonzero(keep).tolist()), warnings


def failures(rows: Rows, form: Format, warnings: list[str]) -> list[str]:
    """Why each request of a log failed, "" if it was answered; warns of unknown words."""
    columns = form.columns_of(rows)
    reasons = [""] * len(rows.rows)
    if form.is_log and "status" in columns:
        texts = texts_of(rows, columns["status"])
        counts = Counter(texts)
        good = {text: is_good(text) for text in counts}
        reasons = [text if good[text] is False else "" for text in texts]
        unknown = Counter({text: count for text, count in counts.items() if good[text] is None})
        if unknown:
            problem = f"status of unknown meaning ({_shown(unknown)})"
            warnings.append(f"{unknown.total()} requests have a {problem}: taken as answered")
    if "error" in columns:
        reasons = texts_of(rows, columns["error"])
    if "cancelled" in columns:
        gone = texts_of(rows, columns["cancelled"])
        reasons = ["cancelled" if text.lower() in TRUE else reason for text, reason in zip(gone, reasons, strict=True)]
    return reasons


def texts_of(rows: Rows, names: str) -> list[str]:
    """A column's cells; "" if missing."""
    return ["" if value is None else str(value).strip() for value in rows.values(names)]


def _shown(values: Counter[str]) -> str:
    return cut(", ".join(f"{name or 'without a name'}: {count}" for name, count in values.most_common()))
