"""docs/python.md has every result of `import dsim`, as the code has them."""

from pathlib import Path

import dsim
from dsim.report.result import Result
from dsim.report.run import RunResult

MACHINERY = {"from_info", "open", "columns", "temporary", "failure"}  # of the command that made a run
PAGE = Path(dsim.__file__).parent / "docs" / "python.md"


def test_the_page_says_what_each_kind_of_result_has() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for cls in (Result, RunResult):
        for name in vars(cls):
            if not name.startswith("_") and name not in MACHINERY:
                assert f"`.{name}" in text, name
