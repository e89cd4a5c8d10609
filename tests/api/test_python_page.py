"""docs/python.md and python-functions.md: every function, argument and result of `import dsim`, as the code has them.

After a change: `python -m dsim.tests.planner.test_python_page` writes the signatures anew.
"""

import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import dsim
from dsim.api.signature import Traffic
from dsim.planner import compared, given
from dsim.planner.recorded import OfRun
from dsim.report.shown import Showable

DOCS = Path(dsim.__file__).parent / "docs"
PAGE, SIGNATURES = DOCS / "python.md", DOCS / "python-functions.md"
FUNCTIONS = [name for name in dsim.__all__ if not name.startswith("_")]
ALIASES = {
    given.TraceLike: "TraceLike", given.ProfileLike: "ProfileLike", given.PolicyLike: "PolicyLike",
    compared.RunLike: "RunLike",
}  # fmt: skip
WIDTH = 110


def kind(annotation: Any) -> str:
    """A type as the page spells it: short names, and what may stand for a name under one."""
    for alias, name in ALIASES.items():
        if annotation == alias:
            return name
        rest = [a for a in typing.get_args(annotation) if a not in typing.get_args(alias)]
        if set(typing.get_args(alias)) < set(typing.get_args(annotation)):
            return " | ".join([name, *map(kind, rest)])
    if annotation is type(None):
        return "None"
    told = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for alias, name in ALIASES.items():
        told = told.replace(str(alias), name)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", told)


def signature(name: str) -> str:
    """A function's signature, in lines that a page shows; the shared arguments are `**traffic`."""
    function = getattr(dsim, name)
    own = inspect.signature(function.__wrapped__)
    words, keyword = [], False
    for p in own.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            words.append("**traffic")
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword:
            words.append("*")
            keyword = True
        words.append(f"{p.name}: {kind(p.annotation)}" + ("" if p.default is p.empty else f" = {p.default!r}"))
    lines, line = [], f"dsim.{name}("
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else f") -> {kind(own.return_annotation)}")
        if len(line) + len(piece) > WIDTH:
            lines.append(line.rstrip())
            line = "    "
        line += piece + " "
    return "\n".join([*lines, line.rstrip()])


def written() -> str:
    """The page with the signatures of today."""
    text = SIGNATURES.read_text(encoding="utf-8")
    for name in FUNCTIONS:
        block = f"```text\n{signature(name)}\n```"
        text, found = re.subn(
            rf"(### `{name}`\n(?:(?!###)[^`]|`(?!``))*?)```text\n.*?```", lambda m, b=block: m[1] + b, text, flags=re.S
        )
        assert found == 1, f"{SIGNATURES}: no section ### `{name}` with a text block"
    return text


def test_the_page_has_every_function_with_its_signature() -> None:
    assert re.findall(r"^### `(\w+)`$", SIGNATURES.read_text(encoding="utf-8"), re.M) == FUNCTIONS
    assert SIGNATURES.read_text(encoding="utf-8") == written()


@pytest.mark.parametrize("name", typing.get_type_hints(Traffic))
def test_the_page_says_what_each_shared_argument_means(name: str) -> None:
    assert len(re.findall(rf"^\| `{name}` \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.M)) == 1


def test_the_page_says_what_each_kind_of_result_has() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for cls in (Showable, OfRun):
        for name in vars(cls):
            if not name.startswith("_"):
                assert f"`.{name}" in text, name


if __name__ == "__main__":
    SIGNATURES.write_text(written(), encoding="utf-8")
