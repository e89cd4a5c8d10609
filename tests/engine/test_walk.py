"""Attention whose kernel walks a row's keys: no faster with few rows than with as many as run at once."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.latency import Features, LatencyModel
from dsim.profiler.fit import predict
from dsim.profiler.profile import load

PLAIN = LatencyModel(((256.0, 0.01),), 0.0, attention=1e-9, kv_read=1e-9)
WALKS = replace(PLAIN, walk=2e-6, window_walk=1e-6, walk_rows=4)


def canvases(rows: int, keys: int) -> Features:
    return Features(256 * rows, 256 * rows * keys, rows * keys, 0, 0, rows, 0, 1, 256 * rows * 100, rows * 100)


@pytest.mark.parametrize(("rows", "waves"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_attention_takes_one_row_s_keys_for_each_wave_of_rows(rows: int, waves: int) -> None:
    step = canvases(rows, 2000)
    assert WALKS.step(step) == pytest.approx(0.01 + waves * (2e-6 * 2000 + 1e-6 * 100), rel=1e-12)
    assert predict(WALKS, np.array([step], float))[0] == pytest.approx(WALKS.step(step), rel=1e-12)


def test_many_rows_take_what_their_pairs_and_keys_take() -> None:
    fast = replace(WALKS, walk=1e-9, window_walk=0.0)
    assert fast.step(canvases(64, 2000)) == pytest.approx(PLAIN.step(canvases(64, 2000)), rel=1e-12)
    assert WALKS.scaled(2.0).step(canvases(3, 500)) == pytest.approx(2 * WALKS.step(canvases(3, 500)), rel=1e-12)


def test_sglang_s_long_prompts_cost_the_walk_and_short_ones_what_was_published() -> None:
    gemma = load("h200x2-diffusiongemma/sglang").latency
    free = replace(gemma, walk_rows=0)
    more = [gemma.step(f) - free.step(f) for rows in (1, 4, 8) for f in [_gemma(rows, 2048 + 256)]]
    assert more[0] == pytest.approx(25 * 4.1e-6 * 1280 / 64 + 5 * 4.9e-6 * 2304 / 64 - _pairs(1), rel=1e-3)
    assert more[0] > more[1] > 0 < more[2]
    for rows, published in ((1, 15.1e-3), (4, 28.8e-3), (8, 50.1e-3)):  # what its points are made of
        host = gemma.host_step + rows * gemma.host_request
        assert gemma.step(_gemma(rows, 384)) - host == pytest.approx(published, rel=1e-4)


def _gemma(rows: int, keys: int) -> Features:
    seen = min(keys, 1024 + 256)
    return Features(256 * rows, 256 * rows * keys, rows * keys, 0, 0, rows, 0, 1, 256 * rows * seen, rows * seen)


def _pairs(rows: int) -> float:
    free = replace(load("h200x2-diffusiongemma/sglang").latency, walk_rows=0)
    none = Features(256 * rows, 0, 0, 0, 0, rows, 0)
    return free.step(_gemma(rows, 2048 + 256)) - free.step(none)
