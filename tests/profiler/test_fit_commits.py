"""Commit logs: read from journals, and drawn from a known commit model or law of steps, which a fit gives back."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw, CommitDraws, CommitModel
from dsim.engine.draw import CELLS, CELLS_PER_STD
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import ProfileError
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.state import MASKED
from dsim.engine.step import StepOutcome
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.commit_log import CommitLog, from_journal
from dsim.profiler.fit_canvas import fit_canvas_law
from dsim.profiler.fit_commits import fit_commits
from dsim.profiler.likelihood import STEP, Likelihood, Variances
from dsim.profiler.logged import NO_LIMIT, Canvases
from dsim.profiler.profile import load
from dsim.profiler.yields import Blocks, draw, figures, prefix_curve, quantile

REQUESTS = ((5, 90), (64, 40), (130, 200), (1, 33), (31, 65))


def journal(policy: str, num_pages: int) -> tuple[dict[str, Any], list[Any], Any]:
    """A run's list columns, the rows of its plans, and its request table."""
    chosen = parse(policy)
    inputs, outputs = np.array(REQUESTS).T
    draws = CommitDraws(load("a100-sdar-8b").commits[1], 3, inputs, outputs, 32)
    table = RequestTable(len(REQUESTS))
    engine = Engine(chosen, Limits(num_pages, 4096, 8), table)
    for i, (length, more) in enumerate(REQUESTS):
        engine.submit(Request(i, 0.0, length, more))
    lists: dict[str, Any] = {}
    recorder = StepRecorder(lambda _, found: lists.update({k: v for k, (v, _) in found.items()}), 32)
    rows, now = [], 0.0
    while (plan := engine.schedule(now)) is not None:
        outcome = StepOutcome(1.0, draws.draw(plan))
        now += 1.0
        rows.append((plan.requests, plan.block_start, plan.status, plan.window, outcome.committed))
        recorder.record(0, plan, outcome, engine.commit(outcome, now))
    recorder.flush()
    return lists, rows, table


@pytest.mark.parametrize("policy", ["lmdeploy-bd32", "chunk:8", "delayed-cache-plus"])
@pytest.mark.parametrize("num_pages", [100, 7])  # 7: sequences are preempted
def test_a_journal_tells_the_blocks_that_the_engine_had(policy: str, num_pages: int) -> None:
    lists, rows, table = journal(policy, num_pages)
    assert (table["num_preemptions"].sum() > 0) == (num_pages == 7)
    found = from_journal(32, np.array(REQUESTS)[:, 0], *(lists[name] for name in ("requests", "window", "commits")))
    request, start, status, window, committed = (np.concatenate(column) for column in zip(*rows, strict=True))
    masked = status == MASKED
    computes = (window & masked).any(axis=1)
    expected = {"request": request, "block_start": start, "masked": masked, "window": window & masked,
                "committed": committed}  # fmt: skip
    for name, column in expected.items():
        assert np.array_equal(getattr(found, name), column[computes]), name
    # Every output token was a mask once, and the last block's tail with them.
    whole = [-(-(p + n) // 32) * 32 - p for p, n in REQUESTS]
    assert np.bincount(found.request, found.committed.sum(axis=1)).tolist() == whole


def test_a_commit_of_what_was_not_computed_is_refused() -> None:
    words = np.array([[0b0001], [0b0010]], np.uint64)
    with pytest.raises(ProfileError, match="request 0 committed what is not a computed mask"):
        from_journal(4, np.array([0]), np.array([0], np.int32), words[:1], words[1:])
    with pytest.raises(ProfileError, match="the journal's windows reach beyond the block"):
        from_journal(65, np.array([0]), np.array([0], np.int32), words[:1], words[:1])


def test_rows_that_compute_no_mask_are_left_out() -> None:
    windows, commits = np.array([[0b11], [0b11]], np.uint64), np.array([[0], [0b01]], np.uint64)
    log = from_journal(2, np.array([0, 0]), np.array([0, 1], np.int32), windows, commits)
    assert (log.request.tolist(), log.window.tolist()) == ([1], [[True, True]])


def known(p0: float, reach: float, block_length: int = 16, **spreads: float) -> CommitModel:
    table = tuple(float(p) for p in p0 * np.exp(-np.arange(block_length) / reach))
    return CommitModel("known", block_length, 0.9, None, table, **spreads)


def whole_blocks(block_length: int, num_requests: int, each: int) -> Blocks:
    request = np.repeat(np.arange(num_requests), each)
    start = np.tile(np.arange(each) * block_length, num_requests)
    masked = np.ones((len(request), block_length), np.bool_)
    return Blocks(block_length, request, start, masked, np.full((len(request), 1), block_length))


SPREADS = {"request_spread": 0.35, "block_spread": 0.25, "step_spread": 0.9}
KNOWN = {
    1.05: known(0.02, 4.0, **SPREADS),
    2: known(0.40, 8.0, **SPREADS),  # windows of a few masks are fitted to it
    4: known(0.80, 10.0, **SPREADS, stage_gain=0.8),
    8: known(0.95, 24.0, 32, **SPREADS),
}


@pytest.mark.parametrize(
    "tokens", [pytest.param(1.05, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_known_commit_model_is_given_back(tokens: float) -> None:
    model = KNOWN[tokens]
    size = model.block_length
    log = draw(model, whole_blocks(size, 300, 2 if tokens < 2 else 3), seed=7)
    truth = figures(draw(model, whole_blocks(size, 5000, 1), seed=8))
    assert truth["tokens per step, mean"] == pytest.approx(tokens, rel=0.12)
    fitted, fit = fit_commits(log, workload="known", threshold=0.9)
    mine = figures(draw(fitted, whole_blocks(size, 5000, 1), seed=9))
    # 300 requests know the mean to about 1.5 %.
    assert mine["tokens per step, mean"] == pytest.approx(truth["tokens per step, mean"], rel=0.03)
    assert mine["steps per block, p90"] == pytest.approx(truth["steps per block, p90"], rel=0.05)
    for c in (4, 8, 16):
        name = f"commits of the first {c} masks"
        assert mine[name] == pytest.approx(truth[name], rel=0.05)
    for name in ("request_spread", "block_spread", "step_spread", "stage_gain"):
        error = fit.standard_errors[name]
        assert abs(getattr(fitted, name) - getattr(model, name)) < 3 * error + 0.03, name  # 0.03 and less is none
    assert fit.doubts == ()
    assert {p.name for p in fit.predictions} >= {"tokens per step, mean", "steps per block, p90"}
    assert (fit.num_requests + fit.num_held_out, fit.num_steps < len(log)) == (300, True)


@pytest.mark.slow
def test_windows_of_a_few_masks_are_fitted_as_well() -> None:
    model = KNOWN[2]
    found = whole_blocks(16, 300, 3)
    few = Blocks(16, found.request, found.block_start, found.masked, np.full((len(found.request), 1), 4))
    log = draw(model, few, seed=7)
    assert log.window.sum(axis=1).max() == 4
    fitted, fit = fit_commits(log, workload="known", threshold=0.9)
    truth, mine = (figures(draw(m, few, seed=9))["tokens per step, mean"] for m in (model, fitted))
    assert mine == pytest.approx(truth, rel=0.03)
    assert fit.doubts == ()


def test_the_likelihoods_of_all_that_may_happen_add_up_to_one() -> None:
    # Three masks: any one, two or all of them commit. Without spreads t is 0.
    masked = np.ones((1, 3), np.bool_)
    log_odds = np.array([0.4, -0.5, -1.5])
    total = 0.0
    for bits in range(1, 8):
        committed = np.array([[bool(bits >> i & 1) for i in range(3)]])
        log = CommitLog(3, np.zeros(1, np.int64), np.zeros(1, np.int64), masked, masked, committed)
        total += np.exp(Likelihood(log).value(log_odds, 0.0, Variances(0.0, 0.0, 0.0)))
    # The trapezium rule's error: STEP^2 / 12 of the integrand's slope.
    assert total == pytest.approx(1.0, abs=STEP**2 / 12)


def test_whole_blocks_alone_are_counted_and_few_requests_doubted() -> None:
    log = draw(KNOWN[2], whole_blocks(16, 12, 3), seed=2)
    fit = fit_commits(log, workload="known", threshold=0.9)[1]
    assert fit.doubts
    assert fit.doubts[0] == "too few requests: 12, expected at least 20"
    with pytest.raises(ProfileError, match="the log holds whole blocks of 0 requests, expected at least 20"):
        fit_commits(log[np.zeros(len(log), np.bool_)], workload="known", threshold=0.9)


@pytest.mark.slow
def test_a_log_that_no_commit_model_fits_is_refused() -> None:
    # Blocks alternate between one token a step and all at once: no normal spread does that.
    log = draw(KNOWN[1.05], whole_blocks(16, 200, 4), seed=3)
    odd = log.block_start // 16 % 2 == 1
    first = np.flatnonzero(odd & (log.masked.all(axis=1)))
    log.committed[first] = log.masked[first]
    keep = ~odd
    keep[first] = True
    fit = fit_commits(log[keep], workload="known", threshold=0.9)[1]
    assert fit.doubts
    assert any("held out" in line and "predicted" in line for line in fit.doubts)


def test_figures_are_those_of_a_log_counted_by_hand() -> None:
    # One block of four: two tokens, then one, then one; the second step computes the first mask alone.
    masked = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0]], np.bool_)
    window = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]], np.bool_)
    committed = np.array([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]], np.bool_)
    zero = np.zeros(3, np.int64)
    log = CommitLog(4, zero, zero, masked, window, committed)
    found = figures(log)
    assert found["tokens per step, mean"] == pytest.approx(4 / 3)
    assert found["steps per block, mean"] == 3.0
    # One mask: each step commits one (the first is forced to). Four: only the first step computed as many.
    assert prefix_curve(log)[1:].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert quantile(np.array([1, 1, 1, 3]), 0.5) == pytest.approx(0.5 + 2 / 3)


def test_padding_plays_no_part_in_drawn_blocks() -> None:
    found = whole_blocks(16, 50, 2)
    plain, padded = (figures(draw(m, found, 1)) for m in (KNOWN[2], replace(KNOWN[2], padding_share=1.0)))
    assert plain == padded


HUMPS = CanvasLaw(
    "text", 256, 20.0, request_spread=0.8, canvas_spread=0.5568, least=4, most=48,
    histogram=((8, 0.1), (16, 0.35), (24, 0.25), (40, 0.05), (47, 0.05), (48, 0.2)), by_canvas=(-0.25, 0.2),
)  # fmt: skip


def drawn(num_requests: int, num_canvases: int) -> Canvases:
    """Canvases of requests as the twin draws them (draw.py)."""
    rng = np.random.default_rng(1)
    own = HUMPS.request_spread * rng.standard_normal((num_requests, 1))
    each = HUMPS.canvas_spread * rng.standard_normal((num_requests, num_canvases))
    moved = np.where(np.arange(num_canvases) == 0, *HUMPS.by_canvas)
    cells = np.floor((own + each + moved) * CELLS_PER_STD).astype(int) + CELLS // 2
    steps = HUMPS.forwards()[cells.clip(0, CELLS - 1)].astype(np.int64).ravel()
    return Canvases(np.repeat(np.arange(num_requests), num_canvases), steps, np.zeros(len(steps), np.bool_))


def law_of(canvases: Canvases) -> CanvasLaw:
    law, doubts = fit_canvas_law(canvases, workload="text", canvas_length=256, late=False, source="log")
    assert doubts == []
    return law


def test_many_canvases_give_back_both_humps_and_how_requests_differ() -> None:
    canvases = drawn(400, 5)
    law, steps = law_of(canvases), canvases.num_steps
    shares = dict(law.histogram)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    assert shares[48] == pytest.approx((steps == 48).mean(), abs=1e-6)
    assert min(shares.values()) > 0
    assert (law.least, law.most, law.median) == (steps.min(), 48, np.median(steps))
    # Standard errors over 400 requests: 5 % of a spread, and 0.03 of what moves a canvas.
    assert law.request_spread == pytest.approx(HUMPS.request_spread, abs=0.12)
    assert law.by_canvas[1] - law.by_canvas[0] == pytest.approx(0.45, abs=0.1)
    share = 0.2 * law.by_canvas[0] ** 2 + 0.8 * law.by_canvas[1] ** 2
    assert law.request_spread**2 + law.canvas_spread**2 + share == pytest.approx(1, abs=1e-4)
    later = steps.reshape(-1, 5)[:, 1:].mean()
    assert mean_forwards(law) == pytest.approx(later, rel=0.03)
    assert law.source == "log; 2000 canvases of 400 requests"


def test_canvases_that_limits_ended_count_as_the_longer_ones_that_they_may_have_been() -> None:
    canvases = drawn(800, 5)
    limit = np.repeat(np.random.default_rng(2).choice([6, 12, 24, 40, NO_LIMIT], 800), 5)
    cut = replace(canvases, num_steps=np.minimum(canvases.num_steps, limit), limit=limit)
    law, whole, unaware = law_of(cut), law_of(canvases), law_of(replace(cut, limit=None))
    ended = int((canvases.num_steps >= limit).sum())
    assert f"4000 canvases of 800 requests, {ended} ended by their requests' limits" in law.source
    assert mean_forwards(unaware) < 0.7 * mean_forwards(whole)
    assert mean_forwards(law) == pytest.approx(mean_forwards(whole), rel=0.04)
    for most in (8, 16, 24, 40):  # standard errors are 1.1 points, of canvases without a limit alone 1.8
        share, given = (sum(s for count, s in held.histogram if count <= most) for held in (law, whole))
        assert share == pytest.approx(given, abs=0.035), most


def test_where_limits_ended_all_canvases_the_law_is_the_largest_limit() -> None:
    limit = np.repeat([2, 5, 12], 20)
    canvases = Canvases(np.repeat(np.arange(12), 5), limit, np.zeros(60, np.bool_), limit)
    law = law_of(canvases)
    assert (law.least, law.most, law.median, law.request_spread, law.canvas_spread) == (12, 12, 12.0, 0.0, 0.0)
    assert "60 canvases of 12 requests, 60 ended by their requests' limits" in law.source


def test_canvases_that_all_took_one_number_of_steps_are_no_histogram() -> None:
    canvases = drawn(40, 10)
    canvases.num_steps[:] = 48
    law = law_of(canvases)
    assert (law.histogram, law.median, law.canvas_spread) == ((), 48.0, 0.0)
