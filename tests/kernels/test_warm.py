"""Once the clock runs nothing is compiled and nothing captured, whatever the policy: by what Triton is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SPECS = (
    "lmdeploy-bd32,max_batch=5", "ar,max_batch=5", "optimus,max_batch=5", "focus,max_batch=5",
    "sparse-dllm,logits=block", "dllm-serve,max_batch=3", "maskkv:16", "sglang-gemma:5,canvas_length=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> list[dict[str, Any]]:
    """What run_uncompiled.py prints of nine requests, of which the warm-up serves four."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_uncompiled.py")), *SPECS],
        capture_output=True,
        text=True,
        check=False,
        # A few steps each, whose rules are not worth compiling.
        env={n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"} | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_policy_compiles_or_captures_while_the_clock_runs(ran: list[dict[str, Any]]) -> None:
    assert {row["policy"] for row in ran} == set(SPECS)
    assert [row for row in ran if row["late"]] == []


def test_a_policy_reaches_few_kernels(ran: list[dict[str, Any]]) -> None:
    # Attention has few ways for whole blocks, more for windows of every size, and three to five more for captured
    # prefills, whose sequences are padded. Each of the experts' products has four; pairs are sorted and summed.
    assert {row["ready"] for row in ran if row["policy"].startswith("lmdeploy")} == {16, 21}
    assert max(row["ready"] for row in ran) <= 34
