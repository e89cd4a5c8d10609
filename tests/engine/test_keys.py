"""Compiled code is kept under a key of all that it was made from: the next process follows an edit of any of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dsim

# A captured step of 150 tokens at 1 s each, priced by compiled code: of the shipped rules the quickest to compile.
PRICE = """
from replica.engine.engine import Engine, Limits
from replica.engine.jit import bind
from replica.engine.journal import RequestTable
from replica.engine.latency import LatencyModel, price
from replica.engine.policy import parse
from replica.engine.state import DECODE_STEP

latency = LatencyModel(((0.0, 0.0),), 1.0, graph_tokens=1000)
world = Engine(parse("ar"), Limits(9999, 1000, 300), RequestTable(150), latency=latency)._w
world.c["kind"], world.c["num_forwards"], world.c["tokens"] = DECODE_STEP, 1, 150
print(bind(price, {})(world, latency.arrays()))
"""
PLUGIN = """
from enum import IntEnum

import numpy as np
import shares

from replica.engine.jit import rule

MORE = 3
TABLE = np.array([1.0])


class Kind(IntEnum):
    ONE = 0


@rule
def more(tokens, extra=0):
    return extra + tokens * int(TABLE[0] > 1.0) + shares.SHARE * MORE + Kind.ONE


@rule
def mine(prompt, length, state, p):
    return more(prompt)
"""
ASK = """
import numpy as np
import plugin
from replica.engine.hooks import held
from replica.engine.jit import bind
from replica.engine.passes import pages_of_canvas
from replica.engine.state import Asked, Own, World

one = np.ones(1)
w = World(*[one] * len(World._fields))._replace(
    f=np.ones(1, [("block", "i8"), ("state_tokens", "i8"), ("page", "i8")]),
    asked=Asked(*np.full((len(Asked._fields), 1), 1000)),
)
print(bind(pages_of_canvas, {held: plugin.mine})(w, Own(one, one, one, one), 0, 0, 0))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A package of its own that holds a copy of the engine."""
    source = Path(dsim.__file__).parent / "engine"
    shutil.copytree(source, tmp_path / "replica" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "replica" / "__init__.py").touch()
    return tmp_path


def run(place: Path, code: str) -> float:
    """What a process of its own prints, which keeps in `place` what it compiles."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(place / "kept"), "PYTHONPATH": str(place)}
    ran = subprocess.run([sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_an_edited_constant_of_the_engine_is_followed_by_what_is_compiled_of_it(place: Path) -> None:
    before = run(place, PRICE)
    edit(place / "replica" / "engine" / "latency.py", "POWERS_TO = 256", "POWERS_TO = 100")
    after = run(place, PRICE)
    # 150 tokens are padded to 256, and then to 200.
    assert before - after == 256 - 200


def test_an_edit_of_a_plug_in_s_rule_and_of_all_that_it_goes_by_is_picked_up(place: Path) -> None:
    (place / "plugin.py").write_text(PLUGIN)
    (place / "shares.py").write_text("SHARE = 1\n")
    assert run(place, ASK) == 3
    edit(place / "plugin.py", "MORE = 3", "MORE = 5")
    assert run(place, ASK) == 5
    edit(place / "shares.py", "SHARE = 1", "SHARE = 2")
    assert run(place, ASK) == 10
    edit(place / "plugin.py", "TABLE = np.array([1.0])", "TABLE = np.array([1.0 + 1e-12])")  # printed alike
    assert run(place, ASK) == 1010
    edit(place / "plugin.py", "ONE = 0", "ONE = 7")
    assert run(place, ASK) == 1017
    edit(place / "plugin.py", "tokens * int", "2 * tokens * int")  # a rule that the answer calls
    assert run(place, ASK) == 2017
    edit(place / "plugin.py", "extra=0", "extra=100")
    assert run(place, ASK) == 2117
