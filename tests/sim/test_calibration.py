"""The A100 profiles reproduce what they were calibrated to. Calibrated, not measured: no one ran this model here."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import curve_fit

from dsim.engine.policy import parse
from dsim.profiler.profile import load
from dsim.sim.twin import simulate
from dsim.traces import synth


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "calibration", Path(__file__).parents[2] / "benchmarks" / "calibration.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["a100-sdar-8b", "a100-llada2-mini"])
@pytest.mark.parametrize("concurrency", [64, 128, 256])
def test_closed_loops_give_the_published_throughput(bench: ModuleType, name: str, concurrency: int) -> None:
    got, _ = bench.closed_loop(load(name), bench.prompts(), concurrency)
    assert got == pytest.approx(bench.PUBLISHED[name][concurrency], rel=0.05)


@pytest.mark.parametrize("concurrency", [64, 128, 256])
def test_focus_at_its_own_threshold_gives_nearly_its_published_throughput(bench: ModuleType, concurrency: int) -> None:
    sdar = load("a100-sdar-8b")
    got, computed = bench.closed_loop(sdar, bench.prompts(), concurrency, "focus,threshold=0.8")
    assert got == pytest.approx(bench.PUBLISHED_FOCUS[concurrency], rel=0.08)
    # What is published is 3.12: drawn deltas know less of where the next tokens come than a model does.
    assert bench.PUBLISHED_COMPUTED < computed < 5


def test_blocks_win_at_small_batches_and_single_tokens_at_large_ones(bench: ModuleType) -> None:
    ratios = bench.decode_ratios(load("a100-sdar-8b"))
    assert ratios["B=32 / AR at batch 16"] == pytest.approx(3.0, rel=0.1)
    assert ratios["AR / B=32 at batch 512"] == pytest.approx(6.0, rel=0.1)
    assert 0.65 <= ratios["B=32 at batch 16 / at batch 256"] <= 0.75


def test_steps_have_the_published_floor_and_knee() -> None:
    # Steps of every size: a closed loop of each number of requests, under chunks of 2 to 32.
    trace = synth("constant", 1.0, lengths="sharegpt", num_requests=200, seed=1)
    points: list[tuple[int, float]] = []
    loads = ((2, "chunk:4"), (8, "chunk:8"), (16, "chunk:16"), (32, "lmdeploy-bd32"), (64, "chunk:32"))
    for concurrency, policy in loads:

        def keep(columns: dict[str, np.ndarray], _lists: object) -> None:
            rows = ~columns["prefill"]
            points.extend(zip(columns["tokens"][rows].tolist(), columns["latency"][rows].tolist(), strict=True))

        simulate(trace, load("a100-sdar-8b"), parse(policy), concurrency=concurrency, append=keep)
    tokens, latency = np.array(points).T

    def pieces(x: np.ndarray, floor: float, knee: float, slope: float) -> np.ndarray:
        return floor + slope * np.maximum(x - knee, 0.0)

    (floor, knee, _), _ = curve_fit(pieces, tokens, latency, p0=(0.03, 300.0, 5e-5))
    assert floor == pytest.approx(0.041, rel=0.02)
    assert 384 <= knee <= 768
