"""What a replica's memory holds, part by part, against bytes counted by hand."""

from dataclasses import replace

import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.policy import parse
from dsim.planner.limits import limited_by
from dsim.planner.memory import largest, parts
from dsim.profiler.profile import Profile, load
from dsim.sim.twin import limits_of

GEMMA = load("h100-diffusiongemma-fp8")
ROW = 204_800 * (1024 + 2 * 256)  # windowed layers: a window, the canvas and the one decided ahead
LOGITS = 256 * 262_144 * 4  # of a canvas, in fp32


def held(spec: str, profile: Profile) -> dict[str, int]:
    return parts(parse(spec), profile, limits_of(parse(spec), profile))


def test_the_parts_of_a_canvas_model_s_memory_are_its_sheet_s() -> None:
    found = held("vllm-diffusion:4", GEMMA)
    assert list(found) == [
        "weights", "KV pages", "scratch slots", "windowed layers", "sampler workspace", "left free",
    ]  # fmt: skip
    assert found["windowed layers"] == 4 * ROW
    assert found["sampler workspace"] == 4 * 6 * LOGITS  # six tensors of a canvas at once, the logits among them
    assert found["scratch slots"] == 4 * 2 * 256 * 20_480
    assert sum(found.values()) == GEMMA.memory.capacity_bytes
    pages = limits_of(parse("vllm-diffusion:4"), GEMMA).num_pages
    assert found["KV pages"] + found["scratch slots"] == pages * 16 * 20_480
    # SGLang decides on nothing ahead: a canvas of each row, and no more.
    assert held("sglang-gemma:4", GEMMA)["scratch slots"] == 4 * 256 * 20_480


def test_blocks_hold_one_block_of_scratch_and_no_row_has_a_workspace() -> None:
    found = held("lmdeploy-bd32,max_batch=8", load("a100-sdar-8b"))
    assert found["scratch slots"] == 8 * 32 * load("a100-sdar-8b").memory.kv_bytes_per_token
    assert "windowed layers" not in found
    assert found["sampler workspace"] == (4096 + 16) * 151_936 * 2  # a prefill's logits


@pytest.mark.parametrize(
    ("spec", "tiled", "binds"),
    [
        ("vllm-diffusion:24", False, "sampler workspace"),
        ("vllm-diffusion:100,max_num_batched_tokens=25600", True, "windowed layers"),
        ("vllm-diffusion:8", True, "KV pages"),
        ("vllm-diffusion:24,num_pages=300", False, "KV pages"),  # the setting, whatever fills the rest
    ],
)
def test_who_waits_for_pages_is_told_what_takes_the_memory(spec: str, tiled: bool, binds: str) -> None:
    profile = replace(GEMMA, memory=replace(GEMMA.memory, workspace_bytes=0)) if tiled else GEMMA
    shares = dict.fromkeys(("decode", "prefill", "host", "waiting for rows", "cut prefills"), 0.0)
    found = limited_by(shares | {"waiting for pages": 0.9}, 0.0, parse(spec), profile)
    assert (found.name, found.binds) == ("KV memory", binds)
    assert "num_pages" in spec or largest(held(spec, profile)) == binds


def test_rows_that_nobody_bounds_take_half_of_the_memory_at_most() -> None:
    # A row of an autoregressive model on the same card needs no canvas: windows alone, of 30 GB.
    rows = limits_of(parse("vllm-ar"), GEMMA).max_batch
    assert rows == (GEMMA.memory.capacity_bytes - GEMMA.memory.weight_bytes) // 2 // ROW == 95
    assert limits_of(parse("vllm-ar"), load("h100-sdar-8b")).max_batch == 1024  # no windows, no bound
    shares = dict.fromkeys(("decode", "prefill", "host", "waiting for pages", "cut prefills"), 0.0)
    found = limited_by(shares | {"waiting for rows": 0.9}, 0.0, parse("vllm-ar"), GEMMA)
    assert found.setting == "max_batch=95: 1024 rows of 0.315 GB would take more than half of the memory"
    assert found.binds == "max rows"


def test_a_workspace_that_leaves_no_room_says_how_many_rows_there_is_room_for() -> None:
    with pytest.raises(ProfileError, match=r"64 rows 106 GB and their logits 17.2 GB, .*: expected at most 31 rows$"):
        limits_of(parse("vllm-diffusion:64,max_num_batched_tokens=16384"), GEMMA)
    assert limits_of(parse("vllm-diffusion:31"), GEMMA).num_pages >= 15
    with pytest.raises(ProfileError, match=r"expected at most 31 rows$"):
        limits_of(parse("vllm-diffusion:32"), GEMMA)
    small = replace(GEMMA, memory=replace(GEMMA.memory, capacity_bytes=GEMMA.memory.weight_bytes + 10**9))
    with pytest.raises(ProfileError, match=r"expected more memory$"):
        limits_of(parse("vllm-diffusion:1"), small)
