"""What a replica's memory holds, part by part, against bytes counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.engine import Engine
from dsim.engine.errors import ProfileError
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.planner.limits import JOURNALED, LEFT, Shares, largest, limited_by, parts
from dsim.profiler.profile import Profile, load
from dsim.sim.setting import Setting

GEMMA = load("h100-diffusiongemma-fp8")
LOGITS = 256 * 262_144 * 4  # of a canvas, in fp32


def held(spec: str, profile: Profile, in_windows: float = 0.0) -> dict[str, int]:
    return parts(Setting(parse(spec), profile), in_windows)


def test_the_parts_of_a_canvas_model_s_memory_are_its_sheet_s() -> None:
    found = held("vllm-diffusion:4", GEMMA, 0.75)
    assert list(found) == ["weights", "KV pages", "windowed layers", "sampler workspace", "left free"]
    assert found["sampler workspace"] == 4 * 6 * LOGITS  # six tensors of a canvas at once, the logits among them
    assert sum(found.values()) == GEMMA.memory.capacity_bytes
    pages = Setting(parse("vllm-diffusion:4"), GEMMA).limits.num_pages
    pool = pages * 16 * 20_480
    assert found["windowed layers"] == round(0.75 * pool)  # they and the others share it
    assert found["KV pages"] + found["windowed layers"] == pool


def test_no_row_of_blocks_has_a_workspace() -> None:
    found = held("lmdeploy-bd32,max_batch=8", load("a100-sdar-8b"))
    assert "windowed layers" not in found
    assert found["sampler workspace"] == (4096 + 16) * 151_936 * 2  # a prefill's logits


@pytest.mark.parametrize(
    ("spec", "tiled", "in_windows", "binds"),
    [
        ("vllm-diffusion:24", False, 0.8, "sampler workspace"),
        ("vllm-diffusion:60,max_num_batched_tokens=15360", True, 0.8, "windowed layers"),
        ("vllm-diffusion:60,max_num_batched_tokens=15360", True, 0.2, "KV pages"),
        # The setting, whatever fills the rest.
        ("vllm-diffusion:24,num_pages=3000", False, 0.2, "KV pages"),
        ("vllm-diffusion:24,num_pages=3000", False, 0.8, "windowed layers"),
    ],
)
def test_who_waits_for_pages_is_told_what_takes_the_memory(
    spec: str, tiled: bool, in_windows: float, binds: str
) -> None:
    profile = replace(GEMMA, memory=replace(GEMMA.memory, workspace_bytes=0)) if tiled else GEMMA
    shares = dict.fromkeys(("decode", "prefill", "host", "waiting for rows", "cut prefills"), 0.0)
    found = limited_by(shares | {"waiting for pages": 0.9}, 0.0, Setting(parse(spec), profile), in_windows)
    assert (found.name, found.binds) == ("KV memory", binds)
    assert found.memory == held(spec, profile, in_windows)
    assert "num_pages" in spec or largest(found.memory) == binds


def test_the_share_of_a_window_s_pages_is_of_the_keys_that_rows_had_in_sight() -> None:
    found = Shares(Setting(parse("vllm-diffusion:4"), GEMMA))
    assert found.in_windows == 0.0
    columns = ("waiting", "running", "pages", *JOURNALED, *(evicted for _, evicted in LEFT.values()))
    steps = {name: np.zeros(2, np.int64) for name in columns}
    steps |= {name: np.zeros(2, np.bool_) for name in ("prefill", "evicting")}
    steps |= {"num_forwards": np.ones(2, np.int64), "latency": np.array([1.0, 2.0])}
    found.append(steps | {"sum_kv": np.array([3000, 600]), "window_kv": np.array([1280, 600])}, {})
    windowed = 204_800 * (1280 + 2 * 600)
    assert found.in_windows == pytest.approx(windowed / (windowed + 20_480 * (3000 + 2 * 600)), rel=1e-12)


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
    shares = dict.fromkeys(("decode", "prefill", "host", "waiting for pages", "cut prefills"), 0.0)
    policy = parse("vllm-diffusion:none,max_num_batched_tokens=262144")
    found = limited_by(shares | {"waiting for rows": 0.9}, 0.0, Setting(policy, GEMMA))
    assert found.setting == "max_batch=22: 1024 rows of 1.34 GB would take more than half of the memory"
    assert found.binds == "max rows"


def test_a_workspace_that_leaves_no_room_says_how_many_rows_there_is_room_for() -> None:
    with pytest.raises(ProfileError, match=r"64 rows 85.9 GB and their logits 17.2 GB, .*: expected fewer rows"):
        _ = Setting(parse("vllm-diffusion:64,max_num_batched_tokens=16384"), GEMMA).limits
    assert Setting(parse("vllm-diffusion:37,max_num_batched_tokens=16384"), GEMMA).limits.num_pages >= 15
    with pytest.raises(ProfileError, match="expected fewer rows"):
        _ = Setting(parse("vllm-diffusion:38,max_num_batched_tokens=16384"), GEMMA).limits
    small = replace(GEMMA, memory=replace(GEMMA.memory, capacity_bytes=GEMMA.memory.weight_bytes + 10**9))
    with pytest.raises(ProfileError, match="expected fewer rows or more memory"):
        _ = Setting(parse("vllm-diffusion:1"), small).limits
