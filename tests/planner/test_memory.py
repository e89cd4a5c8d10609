"""What a replica's memory holds, against bytes counted by hand."""

from dataclasses import replace

from dsim.engine.engine import Engine
from dsim.engine.errors import ProfileError
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.profiler.profile import load
from dsim.sim.setting import Setting

from ..checks import refused

GEMMA = load("h100-diffusiongemma-fp8")
LOGITS = 256 * 262_144 * 4  # of a canvas, in fp32


def test_a_short_row_holds_its_own_length_in_both_groups_and_a_long_one_its_window() -> None:
    policy = parse("vllm-diffusion:8")
    engine = Engine(policy, Setting(policy, GEMMA).limits, RequestTable(0))
    # 20,480 (L + 2C) + 204,800 min(L + 2C, ...) bytes of a row whose text ends at L: prompt and all canvases but one.
    assert [16 * n for n in engine.most_pages(Request(0, 0.0, 256, 256))] == [512 + 256, 10 * (512 + 256)]
    long = engine.most_pages(Request(0, 0.0, 20_000, 256))
    # Two steps' chunks of its prompt, the one in flight and the next, and the window before them.
    assert long == (-(-(20_000 + 512) // 16), 10 * (-(-(1023 + 2 * 8192) // 16) + 1))
    # A scheduler that keeps all pages alike holds every token in every layer.
    assert Setting(parse("ar"), GEMMA).limits.window == 0
    whole = replace(GEMMA.memory, kv_bytes_per_token=225_280, window_bytes_per_token=0, workspace_bytes=0)
    assert Setting(parse("ar"), GEMMA).limits == Setting(parse("ar"), replace(GEMMA, memory=whole)).limits


def test_rows_that_nobody_bounds_take_half_of_the_memory_at_most() -> None:
    free = GEMMA.memory.capacity_bytes - GEMMA.memory.weight_bytes
    rows = Setting(parse("vllm-diffusion:none,max_num_batched_tokens=262144"), GEMMA).limits.max_batch
    assert rows == free // 2 // (5 * LOGITS) == 22
    assert Setting(parse("vllm-ar"), GEMMA).limits.max_batch == 1024  # no canvas, no bound


def test_a_workspace_that_leaves_no_room_says_how_many_rows_there_is_room_for() -> None:
    with refused(r"64 rows 85.9 GB and their logits 17.2 GB, .*: expected at most 37 rows", ProfileError):
        _ = Setting(parse("vllm-diffusion:64,max_num_batched_tokens=16384"), GEMMA).limits
    assert Setting(parse("vllm-diffusion:37,max_num_batched_tokens=16384"), GEMMA).limits.num_pages >= 15
    with refused("expected at most 37 rows", ProfileError):
        _ = Setting(parse("vllm-diffusion:38,max_num_batched_tokens=16384"), GEMMA).limits
    small = replace(GEMMA, memory=replace(GEMMA.memory, capacity_bytes=GEMMA.memory.weight_bytes + 10**9))
    with refused("expected more memory", ProfileError):
        _ = Setting(parse("vllm-diffusion:1"), small).limits
