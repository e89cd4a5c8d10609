"""Every kernel compiles for a GPU, whether or not there is one, and as what it was designed to be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsim.kernels
from dsim.kernels.ragged_paged_attention.kernel import SMALL_TILES, TILES

FOLDER = Path(dsim.kernels.__file__).parent
HOPPER, BLACKWELL, CONSUMER = 90, 100, 120  # H100 and H200; B200; RTX PRO and 50: 99 KiB of shared memory
TENSOR_CORES = {HOPPER: "wgmma", BLACKWELL: "tcgen05", CONSUMER: "mma"}  # of 64 rows and more
LARGE = (" x 16 queries", " x 32 queries")  # of attention: tiles of 64 rows and more


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    """What compile_ahead.py prints, one entry a compute capability, kernel and shape."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), *map(str, TENSOR_CORES)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(params=TENSOR_CORES)
def capability(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def facts(every: list[dict[str, Any]], capability: int) -> list[dict[str, Any]]:
    return [fact for fact in every if fact["capability"] == capability]


def of(facts: list[dict[str, Any]], kernel: str, name: str) -> list[dict[str, Any]]:
    found = [fact for fact in facts if fact["kernel"] == f"dsim.kernels.{kernel}.kernel.{name}"]
    assert found, (kernel, name)
    return found


def test_every_kernel_compiles_within_the_shared_memory_there_is(facts: list[dict[str, Any]]) -> None:
    compiled = {fact["kernel"].split(".")[2] for fact in facts}
    assert compiled == {path.parent.name for path in FOLDER.glob("*/kernel.py")}


def test_no_kernel_of_a_step_spills_registers_to_memory(facts: list[dict[str, Any]]) -> None:
    assert [fact for fact in facts if fact["spilled"]] == []


def test_keys_values_and_the_head_are_copied_by_16_bytes_and_multiplied_by_tensor_cores(
    facts: list[dict[str, Any]], capability: int
) -> None:
    # A block of keys and its values are copied by 16 bytes, in as many stages as there are or in the loop.
    for fact in of(facts, "ragged_paged_attention", "_attend"):
        assert fact["wide_loads"] >= 24, fact
        assert fact["tensor_cores"] == (TENSOR_CORES[capability] if fact["case"].endswith(LARGE) else "mma"), fact
    for fact in of(facts, "confidence", "_of_hidden"):
        assert (fact["wide_loads"] >= 24, fact["tensor_cores"]) == (True, TENSOR_CORES[capability]), fact


def test_logits_and_rows_are_loaded_by_16_bytes(facts: list[dict[str, Any]]) -> None:
    # A thread of a norm loads 16 numbers of the stream, of what joins it and of the weight; the others load two halves.
    for kernel, name, least in (
        ("confidence", "_of_logits", 2),
        ("kv_scatter", "_scatter", 2),
        ("add_rms_norm", "_add_norm", 6),
        ("swiglu", "_gate", 2),
        ("qk_norm_rope", "_norm_rope", 2),
    ):
        assert all(fact["wide_loads"] >= least for fact in of(facts, kernel, name)), kernel


def test_as_many_programs_reside_on_a_multiprocessor_as_keys_are_split_for(
    facts: list[dict[str, Any]], capability: int
) -> None:
    small = capability == CONSUMER
    for fact in of(facts, "ragged_paged_attention", "_attend"):
        block_m = min(128, 4 * int(fact["case"].split()[2]))  # four query heads a KV head
        tile = (SMALL_TILES if small else {}).get(max(16, block_m), TILES[max(16, block_m)][:1])[0]
        assert fact["programs"] >= tile.resident, fact
        # Warps that a scheduler has to choose from.
        assert fact["programs"] * fact["warps"] >= 8, fact
    least = 4 if small else 8
    assert all(fact["programs"] * fact["warps"] >= least for fact in of(facts, "confidence", "_of_hidden"))
    assert all(fact["programs"] * fact["warps"] >= 48 for fact in of(facts, "confidence", "_of_logits"))
