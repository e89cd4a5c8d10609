"""The tables of docs/traces.md name what there is."""

from pathlib import Path

from dsim.traces import ARRIVALS, LENGTHS, shipped_names
from dsim.traces.formats import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_docs_name_every_format_process_workload_and_trace() -> None:
    text = PAGE.read_text()
    for name in (*FORMATS, *ARRIVALS, *LENGTHS, *shipped_names()):
        assert f"`{name}`" in text
    for form in FORMATS.values():
        for key in (form.time, form.input, form.output):
            assert key in text
