"""Select the rows of a log: one model's text requests that the server itself answered."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.errors import DsimError, TraceError, cut, quoted
from ..files.read import did_you_mean
from .formats import ONLY, Format
from .parse import Columns

GOOD = ("", "success", "ok", "completed", "200")  # of a status, in any case of letters
TRUE = ("true", "1", "1.0")


def is_good(status: Any) -> bool:
    """Whether a status means that the request was answered."""
    return _text(status).lower() in GOOD


def column_of(only: str) -> str:
    """The column that `--only COLUMN=VALUE` names."""
    column, equals, value = (side.strip() for side in only.partition("="))
    if not (column and equals and value):
        raise DsimError(f"--only is {quoted(only)}, expected model=NAME or COLUMN=VALUE")
    return column


def chosen(found: Columns, form: Format, path: str, only: str | None) -> Columns:
    """Select rows, set the output of failed ones to 0, and warn of what was left out.

    only: `model=NAME` or `COLUMN=VALUE`. Without it a published trace keeps every row.
    """
    extras = dict(found.extras)
    kept, warnings = np.ones(len(found.time), bool), []
    total = len(kept)
    if form.own:
        for name, out, what in (
            ("kind", lambda kind: "embedding" in kind, "are embeddings"),
            ("cache_hit", lambda hit: hit in TRUE, "were answered from the gateway's cache, and not by the server"),
        ):
            left = kept & _matches(extras.pop(name, None), total, out)
            if left.any():
                warnings.append(f"{left.sum()} of {total} rows {what}, and left out")
                kept &= ~left
    picked = extras.pop(ONLY, None)
    if only is not None:
        values = np.array([_text(value) for value in picked or [None] * total], object)
        wanted = only.partition("=")[2].strip()
        counts = Counter(values[kept].tolist())
        if wanted not in counts:
            hint = did_you_mean(wanted, [name for name in counts if name], any_case=True)
            what = f"{column_of(only)} {cut(wanted)}"
            raise DsimError(f"{path}: no row is of {what}{hint}, expected one of {_shown(counts)}")
        kept &= values == wanted
    elif (
        form.own and len(models := Counter(map(_text, np.array(extras.get("model", [None] * total), object)[kept]))) > 1
    ):
        warnings.append(f"the log mixes {len(models)} models ({_shown(models)}): --only model=NAME takes one")
    if not kept.any():
        raise TraceError(f"{path}: none of {total} rows is a request for text, expected at least 1")
    output = found.output_length
    if form.own:
        output = np.where(_matches(extras.get("status"), total, lambda status: status not in GOOD), 0, output)
    rows = np.flatnonzero(kept)
    return replace(
        found,
        time=found.time[rows],
        input_length=found.input_length[rows],
        output_length=output[rows],
        extras={name: [column[i] for i in rows.tolist()] for name, column in extras.items()},
        waited={name: column[rows] for name, column in found.waited.items()},
        warnings=[*found.warnings, *warnings],
    )


def _matches(column: list[Any] | None, total: int, test: Callable[[str], bool]) -> Any:
    if column is None:
        return np.zeros(total, bool)
    return np.array([test(_text(value).lower()) for value in column], bool)


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _shown(values: Counter[str]) -> str:
    return cut(", ".join(f"{name or 'without a name'}: {count}" for name, count in values.most_common()))
