"""What a step costs, by hand: before an eviction and after it, eager and captured, and attention that walks keys."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.jit import plain
from dsim.engine.latency import Features, LatencyModel, bucket, window_pairs
from dsim.profiler.fit import predict
from dsim.profiler.profile import load

# 10 ms for up to 100 tokens, then 0.1 ms a token.
MODEL = LatencyModel(
    ((100.0, 0.010),), 1e-4, attention=1e-6, kv_read=1e-5, head=1e-4, sample=2e-4, launch=0.004, host_step=0.003,
    host_request=0.001, early=0.25, eviction=0.005,
)  # fmt: skip
BEFORE = Features(200, 5000, 300, 200, 256, 8, 0)
AFTER = Features(60, 1000, 200, 60, 256, 8, 0)


def test_a_step_that_evicts_pays_its_first_layers_for_all_and_the_rest_for_what_is_left() -> None:
    before = 0.010 + 100 * 1e-4 + 5000e-6 + 300e-5  # 28 ms
    after = 0.010 + 1000e-6 + 200e-5  # 13 ms
    device = 0.25 * before + 0.75 * after + 60 * 1e-4 + 256 * 2e-4
    assert MODEL.step(BEFORE, AFTER) == pytest.approx(device + 0.003 + 8 * 0.001 + 0.005, rel=1e-12)


def test_choosing_waits_for_the_device_and_is_hidden_by_nothing() -> None:
    slow_host = replace(MODEL, launch=1.0)
    assert slow_host.step(BEFORE, AFTER) == pytest.approx(1.0 + 0.003 + 0.008 + 0.005, rel=1e-12)


def test_a_step_without_an_eviction_knows_nothing_of_its_cost() -> None:
    plain = replace(MODEL, early=0.0, eviction=0.0)
    for f in (BEFORE, AFTER, Features(1000, 10**6, 1000, 32, 32, 4, 1000, 2)):
        assert MODEL.step(f) == plain.step(f)
    device = 0.028 + 200 * 1e-4 + 256 * 2e-4
    assert MODEL.step(BEFORE) == pytest.approx(device + 0.003 + 0.008, rel=1e-12)
    # An eviction that leaves all behind costs what choosing does.
    assert MODEL.step(BEFORE, BEFORE) == pytest.approx(MODEL.step(BEFORE) + 0.005, rel=1e-12)


def test_pairs_beyond_the_first_64_queries_of_a_key_take_a_share_of_a_pair_s_time() -> None:
    dense = replace(MODEL, dense=0.1, window_attention=1e-6)
    many = BEFORE._replace(sum_kv=50)  # 50 keys meet 5,000 queries, 100 each: 3,200 pairs of the first 64
    assert dense.step(many) == pytest.approx(MODEL.step(many) - 1800 * 0.9e-6, rel=1e-12)
    # 300 keys meet 16.7 each: a short window is what it was, to the bit.
    assert dense.step(BEFORE) == MODEL.step(BEFORE)
    # Layers with a window have keys of their own: 10 of 3,000 queries.
    windows = many._replace(window_q_kv=3000, window_kv=10)
    assert dense.step(windows) - dense.step(many) == pytest.approx(640 * 1e-6 + 2360 * 1e-7, rel=1e-9)


def test_a_captured_step_is_padded_to_its_bucket_and_an_evicting_one_in_both_stages() -> None:
    graphs = replace(MODEL, launch=1.0, graph_tokens=200)
    # 200 tokens are computed as 256, and so are the rows of the head; soft-max has 56 more.
    device = 0.010 + 156 * 1e-4 + 5000e-6 + 300e-5 + 256 * 1e-4 + 312 * 2e-4
    assert graphs.step(BEFORE) == pytest.approx(device + 0.003 + 0.008, rel=1e-12)
    assert graphs.step(BEFORE._replace(tokens=201)) > 1.0  # larger than any captured
    assert graphs.step(BEFORE._replace(prefill_tokens=200)) > 1.0
    before = 0.010 + 156 * 1e-4 + 5000e-6 + 300e-5
    device = 0.25 * before + 0.75 * (0.010 + 1000e-6 + 200e-5) + 64 * 1e-4 + 260 * 2e-4
    assert graphs.step(BEFORE, AFTER) == pytest.approx(device + 0.003 + 0.008 + 0.005, rel=1e-12)
    # A bucket of 8 sequences and a spare one, also if no row is padding.
    for batch, tokens, num in ((8, 200, 9), (8, 128, 9), (9, 200, 17)):
        step = BEFORE._replace(batch=batch, tokens=tokens)
        assert replace(graphs, sequence=1.0).step(step) - graphs.step(step) == pytest.approx(num)


def test_buckets_are_powers_of_two_and_then_multiples_of_256() -> None:
    for n in range(1, 1200):
        expected = 2 ** math.ceil(math.log2(n)) if n <= 256 else 256 * math.ceil(n / 256)
        assert bucket(n) == expected


def test_layers_with_a_window_are_charged_for_what_their_rows_see_of_it_alone() -> None:
    windowed = replace(MODEL, window_attention=1e-5, window_kv_read=1e-4)
    seen = {"window_q_kv": 700, "window_kv": 90}
    for left, first in ((None, None), (AFTER, None), (None, BEFORE._replace(tokens=300))):
        model, bare = (replace(m, layers=4) for m in (windowed, MODEL))
        more = model.step(BEFORE._replace(**seen), left, first) - bare.step(BEFORE, left, first)
        assert more == pytest.approx(700e-5 + 90e-4)
        assert model.step(BEFORE, left, first) == bare.step(BEFORE, left, first)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 9), (4, 4), (4, 7), (4, 12), (9, 9), (9, 30)])
def test_a_causal_query_sees_the_last_tokens_of_a_window_and_a_canvas_sees_all_of_itself_too(
    tokens: int, keys: int
) -> None:
    window, pairs = 6, plain(window_pairs)
    places = range(keys - tokens, keys)
    assert pairs(tokens, keys, window, True) == sum(min(place + 1, window) for place in places)
    both = sum(sum(other >= keys - tokens - window for other in range(keys)) for _ in places)
    assert pairs(tokens, keys, window, False) == both


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
