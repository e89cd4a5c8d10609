"""Compiled code is kept under a key of all that it was made from: the next process follows an edit of any of it."""

import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

import dsim

PLUGIN = """
import numpy as np
import shares

from replica.engine.jit import rule

MORE = 3
TABLE = np.array([1.0])


@rule
def more(tokens, extra=0):
    return extra + tokens * int(TABLE[0] > 1.0) + shares.SHARE * MORE


@rule
def mine(prompt, length, state, p):
    return more(prompt)
"""
KEY = """
import plugin
from replica.engine.hooks import held
from replica.engine.jit import _folder, bind
from replica.engine.rows.passes import pages_of_canvas

answer = _folder(pages_of_canvas, {held: plugin.mine}, "").name
"""
ASK = (
    KEY
    + """
import numpy as np
from replica.engine.state import Asked, PolicyState, Replica

one = np.ones(1)
world = Replica(*[one] * len(Replica._fields))._replace(
    fixed=np.ones(1, [("block", "i8"), ("state_tokens", "i8"), ("page", "i8")])[0],
    asked=Asked(*np.full((len(Asked._fields), 1), 1000)),
)
answer = bind(pages_of_canvas, {held: plugin.mine})(world, PolicyState(one, one, one, one), 0, 0, 0)
"""
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A package of its own that holds a copy of the engine."""
    source = Path(dsim.__file__).parent / "engine"
    shutil.copytree(source, tmp_path / "replica" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "replica" / "__init__.py").touch()
    return tmp_path


def run(place: Path, code: str) -> Any:
    """The answer of a process of its own, which imports what is in `place`, and keeps there what it compiles."""
    forks = multiprocessing.get_context("fork")  # this process has not imported any of it
    ours, theirs = forks.Pipe()
    process = forks.Process(target=_answer, args=(place, code, theirs))
    process.start()
    theirs.close()
    answer = ours.recv()
    process.join()
    return answer


def _answer(place: Path, code: str, told: Any) -> None:
    config.CACHE_DIR = str(place / "kept")
    sys.path.insert(0, str(place))
    sys.dont_write_bytecode = True
    names: dict[str, Any] = {}
    exec(code, names)
    told.send(names["answer"])


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.slow
def test_an_edit_of_a_plug_in_s_rule_and_of_all_that_it_goes_by_is_picked_up(place: Path) -> None:
    (place / "plugin.py").write_text(PLUGIN)
    (place / "shares.py").write_text("SHARE = 1\n")
    assert run(place, ASK) == 3
    keys = {run(place, KEY)}
    for file, before, after in (
        ("plugin", "MORE = 3", "MORE = 5"),
        ("shares", "SHARE = 1", "SHARE = 2"),
        ("plugin", "TABLE = np.array([1.0])", "TABLE = np.array([1.0 + 1e-12])"),  # printed alike
        ("plugin", "tokens * int", "2 * tokens * int"),  # a rule that the answer calls
        ("plugin", "extra=0", "extra=100"),
    ):
        edit(place / f"{file}.py", before, after)
        key = run(place, KEY)
        assert key not in keys, after
        keys.add(key)
    assert run(place, ASK) == 2110
