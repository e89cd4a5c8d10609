"""The tables of docs/traces.md and traffic.md name what there is."""

from pathlib import Path

from dsim.traces import ARRIVALS, LENGTHS, SHIPPED
from dsim.traces.formats import FORMATS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_name_every_format_process_workload_and_trace() -> None:
    text = "".join((DOCS / name).read_text() for name in ("traces.md", "traffic.md"))
    for name in (*FORMATS, *ARRIVALS, *LENGTHS, *SHIPPED):
        assert f"`{name}`" in text
    for form in FORMATS.values():
        for key in f"{form.time} or {form.input} or {form.output}".split(" or "):
            assert key in text
