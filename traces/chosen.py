"""Select a log's rows: one model's text requests that the server itself answered."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.errors import DsimError, TraceError, cut, quoted
from ..files.read import did_you_mean
from .formats import ONLY, Format
from .parse import Columns

GOOD = ("", "success", "ok", "completed", "200")  # in lower case
TRUE = ("true", "1", "1.0")
# Columns that exclude rows: test of the lower-case value, reason.
LEFT_OUT: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("kind", lambda kind: "embedding" in kind, "are embeddings"),
    ("cache_hit", lambda hit: hit in TRUE, "were answered from the gateway's cache, and not by the server"),
)
OF_LOG = tuple(name for name, _, _ in LEFT_OUT)
READ = (ONLY, "status", "model", *OF_LOG)


def is_good(status: Any) -> bool:
    """Whether the request was answered."""
    return _text(status).lower() in GOOD


def column_of(only: str) -> str:
    column, equals, value = (side.strip() for side in only.partition("="))
    if not (column and equals and value):
        raise DsimError(f"--only is {quoted(only)}, expected model=NAME or COLUMN=VALUE")
    return column


def chosen(found: Columns, form: Format, path: str, only: str | None) -> Columns:
    """Select rows, set failed requests' output to 0, and warn of rows left out. only: `model=NAME` or
    `COLUMN=VALUE`."""
    total = len(found.time)
    texts = {name: [_text(value) for value in column] for name, column in found.extras.items() if name in READ}
    kept, failed, warnings = np.ones(total, bool), np.zeros(total, bool), []
    if form.own:
        for name, is_out, what in LEFT_OUT:
            left = kept & np.array([is_out(text.lower()) for text in texts.get(name, [""] * total)], bool)
            if left.any():
                warnings.append(f"{left.sum()} of {total} rows {what}, and left out")
                kept &= ~left
        failed = np.array([not is_good(text) for text in texts.get("status", [""] * total)], bool)
    if only is not None:
        values = np.array(texts.get(ONLY, [""] * total), object)
        wanted = only.partition("=")[2].strip()
        counts = Counter(values[kept].tolist())
        if wanted not in counts:
            hint = did_you_mean(wanted, [name for name in counts if name], any_case=True)
            what = f"{column_of(only)} {cut(wanted)}"
            raise DsimError(f"{path}: no row is of {what}{hint}, expected one of {_shown(counts)}")
        kept &= values == wanted
    elif form.own:
        models = Counter(np.array(texts.get("model", [""] * total), object)[kept].tolist())
        if len(models) > 1:
            warnings.append(f"the log mixes {len(models)} models ({_shown(models)}): --only model=NAME takes one")
    if not kept.any():
        raise TraceError(f"{path}: none of {total} rows is a request for text, expected at least 1")
    rows = np.flatnonzero(kept)
    extras = {name: column for name, column in found.extras.items() if name not in (ONLY, *OF_LOG * form.own)}
    return replace(
        found,
        time=found.time[rows],
        input_length=found.input_length[rows],
        output_length=np.where(failed, 0, found.output_length)[rows],
        extras={name: [column[i] for i in rows.tolist()] for name, column in extras.items()},
        waited={name: column[rows] for name, column in found.waited.items()},
        num_rows=found.num_rows - (total - len(rows)),
        warnings=[*found.warnings, *warnings],
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _shown(values: Counter[str]) -> str:
    return cut(", ".join(f"{name or 'without a name'}: {count}" for name, count in values.most_common()))
