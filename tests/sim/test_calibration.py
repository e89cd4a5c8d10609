"""The A100 profiles reproduce what they were calibrated to. Calibrated, not measured: no one ran this model here."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from dsim.engine.policy import parse
from dsim.profiler.profile import load
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import synth

from ..research.experiments import part, rows

pytestmark = pytest.mark.slow
AT = ("64", "256")
BASELINE, FOCUS = "LMDeploy, threshold 0.9", "FOCUS, threshold 0.8"


@pytest.mark.parametrize(
    ("name", "series", "error"),
    [("focus-throughput", BASELINE, 0.05), ("focus-llada2", BASELINE, 0.05), ("focus-throughput", FOCUS, 0.08)],
)
def test_closed_loops_give_the_published_throughput(name: str, series: str, error: float) -> None:
    found = rows(part(name, [series], AT))
    for at in AT:
        row = found[series, at, "output_throughput"]
        assert row.predicted == pytest.approx(row.published, rel=error)
    if series == FOCUS:  # drawn deltas know less of where the next tokens come than a model does
        computed = found[series, "256", "computed_per_token"]
        assert 3.12 == computed.published < (computed.predicted or 0.0) < 5


def test_blocks_win_at_small_batches_and_single_tokens_at_large_ones() -> None:
    found = rows(part("optimus-batch", ["AR", "B=32"], ("16", "512")))
    assert found["B=32", "16", "decode_throughput / AR"].predicted == pytest.approx(3.2, rel=0.05)
    assert found["AR", "512", "decode_throughput / B=32"].predicted == pytest.approx(6.2, rel=0.05)


def test_steps_have_the_published_floor_and_knee() -> None:
    # Steps of every size: a closed loop of each number of requests, under chunks of 2 to 32.
    trace = synth("constant", 1.0, lengths="sharegpt", num_requests=200, seed=1)
    points: list[tuple[int, float]] = []
    loads = ((2, "chunk:4"), (8, "chunk:8"), (16, "chunk:16"), (32, "lmdeploy-bd32"), (64, "chunk:32"))
    for concurrency, policy in loads:

        def keep(columns: dict[str, np.ndarray], _lists: object) -> None:
            rows = ~columns["prefill"]
            points.extend(zip(columns["tokens"][rows].tolist(), columns["latency"][rows].tolist(), strict=True))

        simulate(trace, Setting(parse(policy), load("a100-sdar-8b")), concurrency=concurrency, append=keep)
    tokens, latency = np.array(points).T

    def pieces(x: np.ndarray, floor: float, knee: float, slope: float) -> np.ndarray:
        return floor + slope * np.maximum(x - knee, 0.0)

    (floor, knee, _), _ = curve_fit(pieces, tokens, latency, p0=(0.03, 300.0, 5e-5))
    assert floor == pytest.approx(0.041, rel=0.02)
    assert 384 <= knee <= 768
