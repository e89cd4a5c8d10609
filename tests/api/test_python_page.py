"""docs/python.md has every shared argument and result of `import dsim`, as the code has them."""

import re
import typing
from pathlib import Path

import pytest

import dsim
from dsim.api.signature import Traffic
from dsim.planner.recorded import OfRun
from dsim.report.shown import Showable

PAGE = Path(dsim.__file__).parent / "docs" / "python.md"


@pytest.mark.parametrize("name", typing.get_type_hints(Traffic))
def test_the_page_says_what_each_shared_argument_means(name: str) -> None:
    assert len(re.findall(rf"^\| `{name}` \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.M)) == 1


def test_the_page_says_what_each_kind_of_result_has() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for cls in (Showable, OfRun):
        for name in vars(cls):
            if not name.startswith("_"):
                assert f"`.{name}" in text, name
