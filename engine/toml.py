"""Parse untrusted TOML; reject nesting deeper than the recursion limit allows."""

import re
import tomllib
from itertools import accumulate, chain
from typing import Any

DEEPEST = 100  # tables, arrays and key parts within each other; of JSON, lists and objects
TOO_DEEP = "it is nested too deeply"

# Strings and comments do not nest.
_ASIDE = re.compile(r'''"""(?:\\.|[^\\])*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*''', re.S)
_OPENS = {"[": 1, "{": 1, "]": -1, "}": -1}


def toml_of(text: str) -> dict[str, Any]:
    """A TOML text's table; ValueError if it is none or nested beyond DEEPEST.

    Depth is checked first: the parser's time and memory are quadratic in a key's parts, its stack finite.
    """
    if max(map(text.count, "[{.")) > DEEPEST // 2:  # few texts
        bare = _ASIDE.sub("", text)
        depths = accumulate(_OPENS[bracket] for bracket in re.findall(r"[\[\]{}]", bare))
        parts = (words.count(".") for words in re.split(r"[^\w \t.-]", bare))
        if max(chain(depths, parts)) > DEEPEST:
            raise ValueError(TOO_DEEP)
    return tomllib.loads(text)
