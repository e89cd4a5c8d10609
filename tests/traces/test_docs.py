"""The example in docs/traces.md runs, and its tables name what there is."""

from pathlib import Path

import pytest

from dsim.traces import ARRIVALS, LENGTHS, load, shipped_names
from dsim.traces.formats import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_example_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, str(PAGE), "exec"), {})
    assert len(load("out.jsonl")) == 100


def test_the_docs_name_every_format_process_workload_and_trace() -> None:
    text = PAGE.read_text()
    for name in (*FORMATS, *ARRIVALS, *LENGTHS, *shipped_names()):
        assert f"`{name}`" in text
    for form in FORMATS.values():
        for key in (form.time, form.input, form.output):
            assert key in text
