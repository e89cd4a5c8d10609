"""The command line starts in a moment: help, the version and mistakes are told and load none of the parts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsim import __version__
from dsim.cli import QUESTIONS, choices
from dsim.engine.engine import EMIT
from dsim.planner.deploy import UNROUTED
from dsim.planner.objective import OBJECTIVES
from dsim.planner.validation import LOADS, POLICIES
from dsim.profiler.precision import BITS
from dsim.profiler.profile import DEFAULT
from dsim.results.world import World
from dsim.sim.deciders import DECIDERS
from dsim.sim.routers import ROUTERS
from dsim.sim.scalers import FIXED, SCALERS
from dsim.traces import ARRIVALS, LENGTHS, SHIPPED
from dsim.traces.lengths import FORMS

HEAVY = (
    "jinja2", "joblib", "matplotlib", "numba", "numpy", "numpy.ma", "optuna", "pandas", "plotly", "pyarrow", "ray",
    "scipy", "scipy.linalg", "scipy.special", "simpy", "starlette", "torch", "triton", "uvicorn",
)  # fmt: skip
MISTAKES = (
    ["repaly"], ["replay"], ["replay", "azure-conv", "--polcy", "ar"], ["replay", "azure-conv", "--replicas", "two"],
)  # fmt: skip
# Runs commands one after another, and prints of each how it ends, whether it printed, and the heavy modules after it.
SAYS_WHAT_IS_LOADED = """
import contextlib, io, json, sys
from dsim.cli import main

heavy, commands = json.loads(sys.argv[1])
for command in commands:
    sys.argv, out, code = ["dsim", *command], io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([command, code, bool(out.getvalue()), [name for name in heavy if name in sys.modules]]))
"""


def after(*commands: list[str]) -> list[object]:
    """What SAYS_WHAT_IS_LOADED prints of commands in a new process."""
    code = [sys.executable, "-c", SAYS_WHAT_IS_LOADED, json.dumps([HEAVY, commands])]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_replay_of_a_shipped_trace_loads_what_it_needs() -> None:
    command = ["replay", "azure-conv", "--num-requests", "300"]  # a few would run without machine code
    after(command)  # compiling loads SciPy, and parsing the trace pyarrow
    # Numba asks for SciPy's version, and NumPy's percentile for its masked arrays.
    assert after(command) == [[command, 0, True, ["numba", "numpy", "numpy.ma", "scipy", "simpy"]]]


@pytest.mark.slow
def test_a_replay_whose_code_is_on_disk_makes_a_dispatcher_of_no_shipped_rule() -> None:
    command = ["replay", "azure-conv", "--num-requests", "300"]
    after(command)
    counts = (
        "import gc\nfrom dsim.engine.jit import Rule\n"
        "rules = [held for held in gc.get_objects() if isinstance(held, Rule)]\n"
        "print(len(rules) > 100, [rule.__name__ for rule in rules if '_compiled' in vars(rule)])"
    )
    code = [sys.executable, "-c", SAYS_WHAT_IS_LOADED + counts, json.dumps([[], [command]])]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout.endswith("\nTrue []\n")


def test_help_and_mistakes_are_told_and_load_none_of_the_parts() -> None:
    helps = [["--version"], ["--help"], *([command, "--help"] for command in (*QUESTIONS, "trace"))]
    assert after(*helps, *MISTAKES) == [
        *([command, 0, True, []] for command in helps), *([command, 2, False, []] for command in MISTAKES),
    ]  # fmt: skip


def test_it_starts_where_nothing_can_be_written(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    done = subprocess.run(
        [sys.executable, "-B", "-m", "dsim", "--version"], capture_output=True, text=True,
        env={"HOME": gone, "XDG_CACHE_HOME": gone, "NUMBA_CACHE_DIR": "/proc/none", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dsim {__version__}\n", "")


def test_the_choices_that_help_lists_are_those_of_the_parts() -> None:
    assert {name: value for name, value in vars(choices).items() if name.isupper()} == {
        "TRACES": tuple(SHIPPED), "ARRIVALS": ARRIVALS,
        "LENGTHS": tuple(LENGTHS), "LENGTH_FORMS": FORMS, "PROFILE": DEFAULT, "POLICY": World.policy,
        "WEIGHTS": tuple(BITS), "ROUTERS": tuple(ROUTERS), "UNROUTED": UNROUTED, "DECIDERS": tuple(DECIDERS),
        "FIXED": FIXED, "SCALERS": (FIXED, *SCALERS), "EMIT": EMIT, "OBJECTIVES": tuple(OBJECTIVES),
        "VALIDATE_POLICIES": POLICIES, "VALIDATE_LOADS": LOADS,
    }  # fmt: skip
