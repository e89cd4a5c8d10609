"""A roofline never falls with more tokens, and lands where published runs of the same hardware did."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.cache_overhead import CACHES, PHASES
from dsim.engine.errors import ProfileError
from dsim.engine.latency import Features
from dsim.profiler.hardware import GPUS, Gpu, capability_of_name, gpu
from dsim.profiler.models import MODELS, model
from dsim.profiler.profile import Profile, load
from dsim.profiler.roofline import compute_slope, knee, latency_model, memory_model, roofline, weight_read
from dsim.research.calibration import calibrated

from ..checks import cases
from ..worlds import refusal

WORLDS = list(itertools.product(GPUS, MODELS, (1, 2, 4, 8), (False, True)))


def decode(profile: Profile, batch: int, chunk: int) -> float:
    tokens, keys = batch * chunk, 400
    return profile.latency.step(Features(tokens, tokens * keys, batch * keys, tokens, tokens, batch, 0))


@given(world=st.sampled_from(WORLDS), tokens=st.integers(1, 100_000), more=st.integers(0, 10_000))
@settings(max_examples=400, deadline=None)
def test_the_pieces_never_fall_and_are_never_below_the_roof(
    world: tuple[str, str, int, bool], tokens: int, more: int
) -> None:
    device, shape, tp = gpu(world[0]), model(world[1]), world[2]
    latency = latency_model(device, shape, tp, world[3])
    assert latency.base(tokens) <= latency.base(tokens + more)
    # The slope beyond the last knot is no gentler than the roof itself.
    assert latency.slope >= compute_slope(device, shape, tp) * (1 - 1e-5)
    assert latency.base(tokens) >= compute_slope(device, shape, tp) * tokens * (1 - 1e-4)
    # Between powers of two the share of touched experts bends a little above its chord.
    assert latency.base(tokens) >= weight_read(device, shape, tp, tokens) * (0.9 if shape.experts else 1 - 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_fits_or_is_refused(name: str) -> None:
    shape = model(name)
    for device, tp in itertools.product(GPUS, (1, 2, 4, 8)):
        even = shape.heads % tp == 0 and max(tp, shape.kv_heads) % min(tp, shape.kv_heads) == 0
        rows = memory_model(gpu(device), shape, tp).workspace_bytes
        left = tp * gpu(device).memory_bytes - shape.weight_bytes - rows - 66 * shape.vocab * 2
        if even and left * 0.8 >= 16 * 64 * shape.kv_bytes_per_token * max(1, tp // shape.kv_heads):
            profile = roofline(gpu(device), shape, tp)
            assert profile.is_estimate
            assert profile.memory.num_pages(64, 1, 64) >= 15, (device, tp)
        else:
            with pytest.raises(ProfileError, match=r"share evenly$|GB .* GB"):
                roofline(gpu(device), shape, tp)


def test_an_8b_model_on_an_a100() -> None:
    device, shape = gpu("A100"), model("SDAR-8B")
    # 15.14 GB of layers and LM head at 0.8 * 2.039 TB/s; 13.89 GFLOP a token at 0.75 * 312 TFLOP/s.
    assert weight_read(device, shape, 1, 1) == pytest.approx(9.28e-3, rel=1e-3)
    assert compute_slope(device, shape, 1) == pytest.approx(59.4e-6, rel=1e-3)
    assert knee(device, shape, 1) == pytest.approx(156.3, rel=1e-3)
    latency = latency_model(device, shape, 1, graphs=True)
    assert [x for x, _ in latency.knots] == [1, 78, 234]


def test_two_gpus_halve_the_work_and_add_all_reduces() -> None:
    shape = model("SDAR-8B")
    one = latency_model(gpu("H100"), shape, 1, graphs=True)
    two = latency_model(gpu("H100"), shape, 2, graphs=True)
    # 72 all-reduces of 10 us; a token sends 72 * 4096 * 2 bytes over 0.7 * 450 GB/s.
    assert two.knots[0][1] == pytest.approx(one.knots[0][1] / 2 + 72 * 10e-6, rel=1e-2)
    assert two.slope == pytest.approx(one.slope / 2 + 72 * 4096 * 2 / 315e9, rel=1e-4)
    assert two.kv_read == pytest.approx(one.kv_read / 2, rel=1e-5)
    assert two.sample == pytest.approx(one.sample, rel=1e-5)


def test_experts_are_read_as_tokens_reach_them() -> None:
    device, shape = gpu("A100"), model("LLaDA2.0-mini")
    assert weight_read(device, shape, 1, 1) * device.bandwidth * 0.8 == pytest.approx(2.22e9, rel=0.01)
    assert weight_read(device, shape, 1, 4096) * device.bandwidth * 0.8 == pytest.approx(31.87e9, rel=0.01)


def test_a_row_of_blocks_is_priced_as_counted_on_a_gb10() -> None:
    # coder543/minnow, LLaDA2.2-mini: 25.1 to 31.3 ms a forward of one row, 45.2 of 256 experts reached in a layer.
    by_block, by_token = (latency_model(gpu("GB10"), model(f"LLaDA2.{n}-mini"), 1, True).base(32) for n in (2, 1))
    assert by_block == pytest.approx(32e-3, rel=0.01)
    assert by_token == pytest.approx(95e-3, rel=0.01)
    sources = roofline(gpu("GB10"), model("LLaDA2.2-mini")).provenance.sources
    assert sources[1] == "dimensions in profiler/models.py, inferred: those of LLaDA2.1-mini"


def test_what_does_not_fit_says_both_values() -> None:
    with pytest.raises(ProfileError, match=r"SDAR-30B-A3B takes 61.1 GB of bf16 weights, 1 x L40S holds 48.3 GB"):
        roofline(gpu("L40S"), model("SDAR-30B-A3B"))
    with pytest.raises(ProfileError, match="Dream-7B has 28 heads and 4 KV heads, which 8 GPUs cannot share evenly"):
        roofline(gpu("A100"), model("Dream-7B"), 8)
    assert "tp is 0, expected at least 1" in refusal(ProfileError, lambda: roofline(gpu("A100"), model("Dream-7B"), 0))
    assert gpu("RTX 4090") is gpu("rtx-4090") is gpu("RTX4090")
    assert "no GPU is named B30; the known ones are A100-80GB, " in refusal(ProfileError, gpu, "B30")


def test_whole_steps_follow_the_calibrated_line_beyond_the_floor() -> None:
    profile, llada2 = load("a100-sdar-8b"), load("a100-llada2-mini")
    assert profile.origin == "calibrated"
    assert decode(profile, 1, 32) == decode(profile, 12, 32) == calibrated.CALIBRATED_LAUNCH
    assert decode(llada2, 1, 32) == decode(llada2, 32, 32) == llada2.latency.launch
    for fitted, intercept, slope, batches in (
        (profile, calibrated.CALIBRATED_INTERCEPT, calibrated.CALIBRATED_SLOPE, (32, 64, 128, 256)),
        (llada2, calibrated.LLADA2_INTERCEPT, calibrated.LLADA2_SLOPE, (64, 128, 256)),
    ):
        for batch in batches:
            assert decode(fitted, batch, 32) == pytest.approx(intercept + slope * 32 * batch, rel=1e-3)


def test_a_dense_pass_attends_faster_the_more_queries_it_has() -> None:
    # Of a block's 32 queries 0.3 of the peak, as before; of a dense pass's more and more, up to 0.6.
    device, shape = gpu("A100"), model("SDAR-8B")
    latency = latency_model(device, shape, 1, graphs=True)
    reached = []
    for queries in (1, 32, 64, 128, 512, 8192):
        short = Features(queries, queries, 1, 0, 0, 1, queries)._replace(sum_q_kv=0)
        spent = latency.step(short._replace(sum_q_kv=queries * 1000, sum_kv=1000)) - latency.step(
            short._replace(sum_kv=1000)
        )
        reached.append(4 * 4096 * 36 * queries * 1000 / spent / device.peak)
    assert reached == pytest.approx([0.3, 0.3, 0.3, 0.4, 0.6 / 1.125, 0.6 / (1 + 64 / 8192)], rel=1e-4)


SHEET = 'name = "Mine"\nsource = "its data sheet"\nbf16_tflops = 500\nbandwidth_gb_s = 4000\nmemory_gb = 96\n'


def test_a_data_sheet_is_a_gpu_with_assumptions_where_it_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHEET, encoding="utf-8")
    found = gpu(str(path))
    assert dataclasses.replace(found, link_latency=0.0) == Gpu(
        "Mine", 500e12, 4e12, 96 * 10**9, 31.5e9, 0.0, 0.65, 0.8, "its data sheet"
    )
    assert found.link_latency == pytest.approx(30e-6)
    profile = roofline(gpu(str(path)), model("SDAR-8B"))
    assert profile.verdict == "estimated, not measured"
    assert profile.provenance.sources[0] == "its data sheet"


@cases(
    "line says",
    ("bf16_tflop = 1", r"bf16_tflop is unknown \(did you mean bf16_tflops\?\), expected keys name, source, "),
    ("matmul_efficiency = 1.5", "matmul_efficiency is 1.5, expected more than 0 and at most 1"),
)
def test_a_data_sheet_that_cannot_be_is_refused_by_key(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHEET + line + "\n", encoding="utf-8")
    with pytest.raises(ProfileError, match=says):
        gpu(str(path))


@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
def test_a_gpu_s_row_names_its_source_and_tells_a_step_log_its_capability(row: Gpu) -> None:
    assert "data sheet" in row.source or "white paper" in row.source
    assert capability_of_name(row.driver_name or row.name) == row.compute_capability


def test_a_full_sequence_rooflines_caches_cost_the_bytes_that_they_move() -> None:
    card, llada = gpu("RTX4090"), model("LLaDA-8B")
    graphs, eager = (roofline(card, llada, graphs=captured).latency.cache_overhead for captured in (True, False))
    bandwidth = card.bandwidth * card.bandwidth_efficiency
    pack = next(part for part in graphs if (part.cache, part.phase) == ("SparseCache", "pack"))
    # Two copies, a read of the keys, and a copy of half: 5.5 x 512 KiB a token.
    assert (pack.row, pack.token) == (0.0, pytest.approx(5.5 * 524288 / bandwidth, rel=1e-5))
    partial = next(part for part in graphs if (part.cache, part.phase) == ("PeriodicCache", "partial"))
    # Keys and values joined and keys turned; outputs of attention and feed-forward, as wide as keys and values here.
    assert partial.token == pytest.approx((3 + 1) * 524288 / bandwidth, rel=1e-5)
    assert next(part for part in graphs if part.cache == "MaskKV" and part.phase == "partial").row == pytest.approx(
        256 * 3 * 524288 / bandwidth, rel=1e-5
    )
    # An eager pass over a part of the sequence waits for its launches.
    assert {part.phase for part in eager} == {"full", "pack"}
    assert set(eager) < set(graphs)
    assert roofline(card, model("SDAR-4B")).latency.cache_overhead == ()
    for part in graphs:
        assert part.cache in CACHES
        assert part.phase in PHASES


def test_a_model_whose_layers_all_have_a_window_is_refused_in_a_line() -> None:
    shape = model("DiffusionGemma-26B-A4B")
    assert shape.windowed is not None
    windows = dataclasses.replace(shape, windowed=dataclasses.replace(shape.windowed, layers=shape.layers))
    with pytest.raises(ProfileError, match="keeps 0 bytes of keys and values a token in its 0 layers that see all"):
        roofline(gpu("H200"), windows, 2)
