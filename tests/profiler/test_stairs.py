"""A device that computes in tiles and waves is fitted as the staircase it is, and judged by the steps of serving."""

import numpy as np
import pytest

from dsim.engine.latency import Features, LatencyModel
from dsim.profiler.fit import fit_latency, predict
from dsim.profiler.profile import Fit
from dsim.profiler.samples import Floats, Samples, padded, samples, sequences
from dsim.profiler.stairs import levels

GRAPH_TOKENS = 8192
PAIR, KEY = 2e-10, 3e-9  # s: windows of less than 15 positions wait for their keys


def device(features: Floats) -> Floats:
    """Seconds on a wave-quantised device: tiles of 64 rows, 132 at a time, of matrices 50 tiles wide; and attention.

    Eager steps have gaps between their kernels. Attention is products or bytes, whichever take longer, and of prompts
    cheaper than over pages; each sequence of a bucket costs a little.
    """
    tokens, pairs, keys = padded(features, GRAPH_TOKENS)[:, :3].T
    eager = features[:, 6] > 0
    waves = np.ceil(np.ceil(tokens / 64) * 50 / 132)
    layers = np.maximum(3.6e-3, 7e-4 * waves) * np.where(eager, 1.04, 1.0)
    paged = np.maximum(PAIR * pairs, KEY * keys)
    return np.asarray(layers + np.where(eager, 0.6 * PAIR * pairs, paged) + 2e-6 * sequences(features, GRAPH_TOKENS))


def decode(batch: int, window: int, context: int) -> Features:
    tokens = batch * window
    return Features(tokens, tokens * context, batch * context, tokens, tokens, batch, 0)


def prefill(tokens: int, batch: int = 1) -> Features:
    return Features(tokens, tokens * tokens // batch // 2, tokens, 32 * batch, 32 * batch, batch, tokens)


def measured(features: list[Features], noise: float = 0.01, seed: int = 0, clock: Floats | None = None) -> Samples:
    """What the device says of these, in order; clock: how much slower it runs at each."""
    table = np.array(features, np.float64)
    chance = np.random.default_rng(seed)
    took = device(table) * np.exp(noise * chance.standard_normal(len(table)))
    took = took if clock is None else took * clock
    return samples(table, took + 1e-3 + 1e-5 * table[:, 5], took)


def lattice() -> list[Features]:
    """Every level: captured ones at three contexts, eager ones as prefills."""
    captured = [decode(max(1, n // 32), min(n, 32), c) for n in (2 ** np.arange(9)).tolist() for c in (64, 1024, 4096)]
    captured += [decode(n // 32, 32, c) for n in range(512, 8193, 256) for c in (64, 2048)]
    windows = [decode(b, w, c) for b in (16, 64, 128) for w in (1, 4, 8, 16) for c in (64, 1024, 4096)]
    prompts = [prefill(n) for n in range(64, 4097, 64)] + [prefill(n, 4) for n in range(256, 4097, 256)]
    return captured + windows + prompts


def journal(num: int = 600) -> Samples:
    """Steps of serving: batches of every size, blocks of 32, chunks, and prompts of any length."""
    chance = np.random.default_rng(1)
    found = []
    for _ in range(num):
        batch, context = int(chance.integers(1, 129)), int(chance.integers(64, 4096))
        kind = chance.integers(3)
        one = prefill(int(chance.integers(40, 4096))) if kind == 0 else decode(batch, (8, 32)[kind - 1], context)
        found.append(one)
    return measured(found, seed=2)


@pytest.fixture(scope="module")
def fitted() -> tuple[LatencyModel, Fit]:
    return fit_latency(measured(lattice()), graph_tokens=GRAPH_TOKENS, stairs=True, journal=journal())


def test_levels_are_the_captured_buckets_and_multiples_of_a_tile() -> None:
    assert levels(300).tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320]
    assert levels(64).tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert levels(3).tolist() == [1, 2, 4]


def test_stairs_are_right_between_powers_of_two_where_pieces_are_not(fitted: tuple[LatencyModel, Fit]) -> None:
    between = np.array([prefill(n) for n in range(513, 1025)], np.float64)
    exact = device(between) + 1e-3 + 1e-5
    worst = []
    for model, fit in (fitted, fit_latency(measured(lattice()), graph_tokens=GRAPH_TOKENS, journal=journal())):
        assert fit.held_out is not None
        off = np.abs(predict(model, between) / exact - 1.0)
        worst.append((float(np.quantile(off, 0.95)), fit.held_out.p95))
    (of_stairs, said_of_stairs), (of_pieces, said_of_pieces) = worst
    assert of_stairs < 0.03
    assert of_pieces > 0.05
    # What the journal says of either is what it is.
    assert said_of_stairs == pytest.approx(of_stairs, abs=0.01)
    assert said_of_pieces > 1.2 * said_of_stairs


def test_a_model_of_stairs_is_what_a_step_costs(fitted: tuple[LatencyModel, Fit]) -> None:
    model, fit = fitted
    table = np.array([decode(b, 32, 500) for b in range(1, 200, 7)] + [prefill(n) for n in range(40, 4000, 171)])
    one_by_one = [model.step(Features(*map(int, row))) for row in table]
    assert predict(model, table.astype(np.float64)) == pytest.approx(one_by_one, rel=1e-12)
    heights = [y for _, y in model.knots]
    assert heights == sorted(heights)
    assert [x for x, _ in model.knots] == sorted({x for x, _ in model.knots})
    assert fit.doubts == ()


def test_attention_is_of_its_products_or_of_its_bytes_and_of_prompts_apart(fitted: tuple[LatencyModel, Fit]) -> None:
    model = fitted[0]
    assert (model.attention, model.kv_read) == pytest.approx((PAIR, KEY), rel=0.05)
    assert model.prompt_attention == pytest.approx(0.6 * PAIR, rel=0.05)
    assert model.prompt_kv_read == 0.0  # no prompt waits for its keys
    assert model.sequence == pytest.approx(2e-6, rel=0.4)
    for window, cost in ((32, 32 * PAIR), (4, KEY)):  # s a key
        long, short = decode(64, window, 4000), decode(64, window, 100)
        assert model.step(long) - model.step(short) == pytest.approx(cost * 64 * 3900, rel=0.05)


def test_captured_steps_are_a_table_by_bucket_and_others_a_grid_of_64(fitted: tuple[LatencyModel, Fit]) -> None:
    model, fit = fitted
    buckets = [bucket for bucket, _ in model.graph_knots]
    assert buckets == [*(2 ** np.arange(9)).tolist(), *range(512, 8193, 256)]
    assert {x for x, _ in model.knots if x > 64} >= set(range(128, 4097, 64))
    assert {name.split("[")[0] for name in fit.standard_errors or {}} >= {"knots", "graph_knots"}
    # The same tokens, with gaps between the kernels and without.
    by_bucket, on_grid = (np.interp([1024, 2048], *np.array(x).T) for x in (model.graph_knots, model.knots))
    assert on_grid / by_bucket == pytest.approx([1.04, 1.04], abs=0.015)


def test_a_clock_that_falls_is_doubted_and_a_hiccup_is_not() -> None:
    shapes = 3 * lattice()
    slow = 1.0 + 0.1 * np.arange(len(shapes)) / len(shapes)
    hiccup = np.ones(len(shapes))
    hiccup[::41] = 20.0  # of three repeats one at the most: their median is what it was
    for clock, reasons in ((slow, ["drift"]), (hiccup, [])):
        taken = measured(shapes, clock=clock)
        fit = fit_latency(taken, graph_tokens=GRAPH_TOKENS, stairs=True, journal=measured(shapes))[1]
        assert [d.split(":")[0] for d in fit.doubts if d.startswith("drift") or d.startswith("held")] == reasons
