"""Runs are, bit for bit, what they were when the hashes were taken."""

import os
import subprocess
import sys
from typing import Any

import pytest

from dsim.engine.jit import JIT
from dsim.engine.spec import PRESETS

from . import golden

QUICK = [
    pytest.param(full, how, {}, id=name)
    for spec in (*PRESETS, *golden.VARIANTS)
    for name, full, how in golden.chosen_worlds(spec)
] + [pytest.param(name.split(" ")[0], {"replicas": 2}, changes, id=name) for name, changes in golden.PROFILES.items()]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("spec", "how", "latency_changes"), QUICK)
def test_a_run_in_plain_python_has_the_hash_that_it_had(
    spec: str, how: dict[str, Any], latency_changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    assert golden.digest(*golden.run(spec, how, **latency_changes)) == golden.recorded()[name]


@pytest.mark.slow
def test_without_a_compiler_runs_have_the_hashes_that_they_had_and_warn_of_nothing() -> None:
    # Numbers that wrap on purpose would be warned of where NumPy adds them.
    names = [
        golden.chosen_worlds(spec)[0][0]
        for spec in ("optimus,num_blocks=2", "focus", "maskkv", "vllm-ar,drafter=eagle")
    ]
    cells = [f"{__file__}::{test_a_run_in_plain_python_has_the_hash_that_it_had.__name__}[{name}]" for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error::RuntimeWarning", *cells]
    ran = subprocess.run(command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert (ran.returncode, f"{len(names)} passed" in ran.stdout) == (0, True), ran.stdout


@pytest.mark.skipif(not JIT, reason="nothing is compiled")
@pytest.mark.parametrize("spec", golden.COMPILED)
def test_a_compiled_run_has_the_hash_that_it_had(spec: str) -> None:
    recorded = golden.recorded()
    for name, full, how in golden.chosen_worlds(spec):
        assert golden.digest(*golden.run(full, how)) == recorded[name], name


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*PRESETS, *golden.VARIANTS])
def test_every_run_of_a_policy_has_the_hash_that_it_had(spec: str, request: pytest.FixtureRequest) -> None:
    if spec in PRESETS:
        request.getfixturevalue("compiled")
    recorded = golden.recorded()
    found = dict(golden.cells((spec,)))
    assert found
    assert {name: value for name, value in found.items() if recorded[name] != value} == {}


def test_every_recorded_hash_is_of_a_cell_that_there_is() -> None:
    named = {name for spec in (*PRESETS, *golden.VARIANTS) for name, _, _ in golden.worlds(spec)}
    assert set(golden.recorded()) == named | set(golden.PROFILES)
