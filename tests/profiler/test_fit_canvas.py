"""A law of steps a canvas from counted canvases: a histogram where there are enough of them."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw
from dsim.engine.draw import CELLS, CELLS_PER_STD
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.fit_canvas import fit_canvas_law
from dsim.profiler.logged import NO_LIMIT, Canvases

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
