"""Without a compiler rules are plain Python, and runs are bit for bit the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsim

from . import golden

CELLS = (
    "optimus,obs=true emit=step replicas=2 router=round-robin",
    "focus,num_pages=11 emit=block replicas=2 router=round-robin",
    "maskkv emit=end replicas=2 router=round-robin",
    "vllm-ar-spec,num_pages=40 emit=block eos",
)


@pytest.mark.slow
def test_runs_that_are_not_compiled_have_the_recorded_hashes_and_warn_of_nothing() -> None:
    # Numbers that wrap on purpose would be warned of where NumPy adds them.
    path = os.pathsep.join([str(Path(dsim.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "dsim.tests.engine.plain", *CELLS],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    recorded = golden.recorded()
    assert json.loads(ran.stdout) == {name: recorded[name] for name in CELLS}
