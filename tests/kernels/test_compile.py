"""Every kernel compiles for a GPU, whether or not there is one, and as what it was designed to be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsim.kernels
from dsim.benchmarks.compiled import README, table
from dsim.kernels.ragged_paged_attention.ragged_paged_attention_kernel import SMALL_TILES, TILES

pytestmark = pytest.mark.slow

HOPPER, BLACKWELL, CONSUMER = 90, 100, 120  # H100 and H200; B200; RTX PRO and 50: 99 KiB of shared memory
TENSOR_CORES = {HOPPER: "wgmma", BLACKWELL: "tcgen05", CONSUMER: "mma"}  # of 64 rows and more
LARGE = (" x 16 queries", " x 32 queries")  # of attention: tiles of 64 rows and more
WIDE_LOADS = {("confidence", "_of_logits"): 2, ("qk_norm_rope", "_norm_rope"): 2}  # 16-byte loads of a thread


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    """What compile_ahead.py prints, one entry a compute capability, kernel and shape."""
    command = [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), "--few", *map(str, TENSOR_CORES)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(every: list[dict[str, Any]], capability: int, kernel: str, name: str) -> list[dict[str, Any]]:
    wanted = capability, f"dsim.kernels.{kernel}.{kernel}_kernel.{name}"
    found = [fact for fact in every if (fact["capability"], fact["kernel"]) == wanted]
    assert found, wanted
    return found


def test_every_kernel_compiles_within_the_shared_memory_there_is_and_spills_nothing(
    every: list[dict[str, Any]],
) -> None:
    kernels = {path.parent.name for path in Path(dsim.kernels.__file__).parent.glob("*/*_kernel.py")}
    for capability in (HOPPER, BLACKWELL):
        assert {f["kernel"].split(".")[2] for f in every if f["capability"] == capability} == kernels
    assert [fact for fact in every if fact["spilled"]] == []


@pytest.mark.parametrize("capability", TENSOR_CORES)
def test_attention_copies_by_16_bytes_multiplies_by_tensor_cores_and_resides_as_it_is_split_for(
    every: list[dict[str, Any]], capability: int
) -> None:
    for fact in of(every, capability, "ragged_paged_attention", "_attend"):
        if fact["case"].startswith("heads"):
            continue
        # A block of keys and its values are copied by 16 bytes, in as many stages as there are or in the loop.
        assert fact["wide_loads"] >= 24, fact
        assert fact["tensor_cores"] == (TENSOR_CORES[capability] if fact["case"].endswith(LARGE) else "mma"), fact
        block_m = max(16, min(128, 4 * int(fact["case"].split()[2])))  # four query heads a KV head
        tile = (SMALL_TILES if capability == CONSUMER else {}).get(block_m, TILES[block_m])
        assert fact["programs"] >= tile.resident, fact
        assert fact["programs"] * fact["warps"] >= 8, fact  # that a scheduler has to choose from


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_small_kernels_load_by_16_bytes_and_have_warps_to_choose_from(
    every: list[dict[str, Any]], capability: int
) -> None:
    assert all(f["programs"] * f["warps"] >= 48 for f in of(every, capability, "confidence", "_of_logits"))
    for (kernel, name), least in WIDE_LOADS.items():
        assert all(fact["wide_loads"] >= least for fact in of(every, capability, kernel, name)), kernel


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_experts_of_many_rows_multiply_by_tensor_cores_of_64_rows_and_load_by_16_bytes(
    every: list[dict[str, Any]], capability: int
) -> None:
    for name in ("_gate_up", "_down"):
        of_steps = {fact["case"]: fact for fact in of(every, capability, "grouped_experts", name)}
        found = {case: fact["tensor_cores"] for case, fact in of_steps.items() if case.startswith("128 experts")}
        assert list(found.values()) == ["mma", "mma", TENSOR_CORES[capability], TENSOR_CORES[capability]], found
        assert all(fact["wide_loads"] >= 20 for fact in of_steps.values())
        assert all(fact["programs"] * fact["warps"] >= 8 for fact in of_steps.values())


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_a_canvas_s_attention_multiplies_heads_of_256_and_512_by_tensor_cores(
    every: list[dict[str, Any]], capability: int
) -> None:
    facts = [f for f in of(every, capability, "ragged_paged_attention", "_attend") if f["case"].startswith("heads")]
    assert {fact["case"].split(",")[0] for fact in facts} == {"heads of 256", "heads of 512"}
    for fact in facts:
        cores = TENSOR_CORES[capability]
        if fact["case"].startswith("heads of 512"):  # tiles of 32 rows
            cores = "mma"
        assert (fact["tensor_cores"], fact["wide_loads"] >= 16) == (cores, True), fact
        assert fact["programs"] * fact["warps"] >= 8
    for name in ("_sums", "_read"):
        assert all(fact["programs"] * fact["warps"] >= 16 for fact in of(every, capability, "read_logits", name))


def test_the_readme_has_a_row_for_every_compiled_kernel(every: list[dict[str, Any]]) -> None:
    def names(text: str) -> set[str]:
        return set(re.findall(r"^\| (\w+, `\w+`)", text, re.MULTILINE))

    assert len(names(table(every))) > 15
    # The figures differ between compilers: `python benchmarks/compiled.py --write` renews them.
    assert names(README.read_text(encoding="utf-8")) == names(table(every))
