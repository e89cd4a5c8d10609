"""A file of any known format means the same however its tool writes it, or is refused in one line."""

import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.traces import Trace, load
from dsim.traces.formats import FORMATS, Format

from .files import refusal, rows_of, save

BEGIN = 1_772_359_200  # s since 1970
KINDS = ("jsonl", "json", "csv", "tsv", "parquet")
ANYTHING = st.none() | st.integers(0, 9) | st.text("aZ9 ,;'\"\n\t{[é-", max_size=5) | st.just([1, 2])


def row_of(form: Format, i: int) -> dict[str, Any]:
    """A request `i` s after the first that waits 0.25 s for its first token and 0.5 s for its end."""

    times = {form.time: BEGIN + i, form.first: BEGIN + i + 0.25, form.end: BEGIN + i + 0.5}
    as_dates = form.unit == "datetime"
    row: dict[str, Any] = {
        key: datetime.fromtimestamp(time, UTC).isoformat() if as_dates else time * form.ticks
        for key, time in times.items()
    }
    row |= {form.input: 7 + i, form.output: 5 + i, form.ttft: 0.25, form.e2el: 0.5}
    row |= {theirs: "ok" for theirs, ours in form.extras.items() if ours == "status"}
    return {key: value for key, value in row.items() if key}


def nested(row: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Its dotted keys as objects, or as JSON in a cell."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        outer, dot, inner = key.partition(".")
        found[outer] = {**found.get(outer, {}), inner: value} if dot else value
    found = {key: nested(value, False) if isinstance(value, dict) else value for key, value in found.items()}
    return {k: json.dumps(v) if as_text and isinstance(v, dict) else v for k, v in found.items()}


def written(rows: list[dict[str, Any]], kind: str) -> bytes:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), out := pa.BufferOutputStream())
        return bytes(out.getvalue())
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
        table.writeheader()
        table.writerows({k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()} for row in rows)
        return text.getvalue().encode()
    if kind == "json":
        return json.dumps(rows).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def meaning(trace: Trace) -> tuple[Any, ...]:
    return rows_of(trace), trace.extras, trace.notes.format


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(sorted(FORMATS)), st.sampled_from(KINDS))
def test_a_variant_of_a_file_is_the_plain_one(data: st.DataObject, name: str, kind: str) -> None:
    form = FORMATS[name]
    plain = [row_of(form, i) for i in range(3)]
    first = [{key.partition(" or ")[0]: value for key, value in row.items()} for row in plain]
    names = {key: data.draw(st.sampled_from(key.split(" or "))) for key in plain[0]}
    order = data.draw(st.permutations(list(plain[0])))
    more = data.draw(st.dictionaries(st.sampled_from(("x", "y.z", "", "Total tokens")), ANYTHING, max_size=2))
    rows = [{names[key]: row[key] for key in order} | more for row in plain]
    if (how_deep := data.draw(st.sampled_from(("flat", "objects", "text")))) != "flat":
        rows = [nested(row, how_deep == "text") for row in rows]
    expected = meaning(load(save(first)))
    assert meaning(load(save(written(rows, kind), "variant"))) == expected
    if kind == "parquet":  # a column has one type
        return
    rows.insert(1, data.draw(st.sampled_from([dict.fromkeys(rows[0], "soon"), dict.fromkeys(rows[0])])))
    path = save(written(rows, kind), "broken")
    assert refusal(path).startswith(str(path))
    trace = load(path, skip_bad=True)
    assert (meaning(trace), trace.notes.num_skipped) == (expected, 1)
