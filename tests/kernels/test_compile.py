"""Every kernel compiles for a GPU, whether or not there is one: the interpreter runs much that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsim.kernels

FOLDER = Path(dsim.kernels.__file__).parent


@pytest.mark.parametrize("capability", ["90"])
def test_every_kernel_compiles_within_the_shared_memory_there_is(capability: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), capability],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0].split(".")[2] for line in done.stdout.splitlines()}
    assert compiled == {path.parent.name for path in FOLDER.glob("*/kernel.py")}
