"""Attention whose kernel walks a row's keys: no faster with few rows than with as many as run at once."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.latency import Features, LatencyModel, window_pairs
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


GEMMA = load("h200x2-diffusiongemma/sglang").latency
TIMED = json.loads((Path(__file__).parents[2] / "research/calibration/sglang_attention.json").read_text())


def gemma(rows: int, queries: int, before: int, causal: bool) -> Features:
    """A forward of rows behind `before` keys, without head and sampler."""
    keys = before + queries
    pairs, seen = window_pairs(queries, keys, keys, causal), min(keys, 1024 + queries)
    in_windows = window_pairs(queries, keys, 1024, causal)
    return Features(rows * queries, rows * pairs, rows * keys, 0, 0, rows, 0, 1, rows * in_windows, rows * seen)


def timed(kind: str, **of: int) -> float:
    """The kernel's time in all 30 layers of a forward, in s."""
    found = [one for one in TIMED[kind] if all(one[name] == value for name, value in of.items())]
    return sum({"window": 25, "all": 5}[one["layer"]] * one["ms"] / 1e3 for one in found)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_sglang_s_attention_of_canvases_costs_what_its_kernel_took_on_an_h200(rows: int) -> None:
    short = timed("canvas", rows=rows, prefix=128), GEMMA.step(gemma(rows, 256, 128, False))
    for prefix in (512, 1024, 2048, 4096):
        measured = timed("canvas", rows=rows, prefix=prefix) - short[0]
        more = GEMMA.step(gemma(rows, 256, prefix, False)) - short[1]
        assert more == pytest.approx(measured, rel=0.16 if rows == 5 else 0.14 if rows == 6 else 0.11)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_sglang_s_attention_of_prompts_costs_what_its_kernel_took_on_an_h200(rows: int) -> None:
    for tokens in (2048, 4096):
        free = GEMMA.step(Features(rows * tokens, 0, 0, 0, 0, rows, 0))
        attention = GEMMA.step(gemma(rows, tokens, 0, True)) - free
        assert attention == pytest.approx(timed("prompt", rows=rows, tokens=tokens), rel=0.09)


def test_sglang_s_forwards_with_short_prompts_cost_what_was_published() -> None:
    for rows, published in ((1, 15.1e-3), (4, 28.8e-3), (8, 50.1e-3)):
        host = GEMMA.host_step + rows * GEMMA.host_request
        whole = gemma(rows, 256, 128, False)._replace(head_rows=256 * rows, sampled_rows=256 * rows)
        assert GEMMA.step(whole) - host == pytest.approx(published, rel=1e-4)
