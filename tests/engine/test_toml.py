"""TOML is bounded in depth before it is parsed, and by nothing that nests nothing."""

import tomllib

import pytest

from dsim.engine.toml import TOO_DEEP, toml_of


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "[{b = " * 51 + "1" + "}]" * 51,
        ".".join("a" * 5000) + " = 1",  # of ten times as many the parser takes minutes and 40 GB
        '"a".' * 5000 + "a = 1",
        "[" + " . ".join("a" * 102) + "]",
        "a = [" * 60 + '"' + "[" * 60,
    ],
    ids=lambda text: text[:12],
)
def test_toml_that_nests_deeper_than_any_file_s_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=TOO_DEEP):
        toml_of(text)


def test_brackets_and_dots_that_nest_nothing_are_no_matter() -> None:
    lines = [
        "a = " + "[" * 100 + "]" * 100,
        ".".join("b" * 101) + " = 1",
        f'c = "{"[" * 200}{"a." * 200}\\"[" # {"[" * 200}',
        f"d = '{'{' * 200}\\' # it's {'[' * 200}",
        f'e = """\n{"[" * 200}\\"""{"." * 200}" """',
        f"f = '''\n{'[' * 200}''{'.' * 200}'''",
        "g = [" + "[1.5, 2.5], " * 200 + "]",
        "\n".join("[[h]]" for _ in range(200)),
    ]
    text = "\n".join(lines)
    assert toml_of(text) == tomllib.loads(text)
