"""A law of steps a canvas from counted canvases: a histogram where there are enough of them."""

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw
from dsim.engine.draw import CELLS, CELLS_PER_STD
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.fit_canvas import fit_canvas_law
from dsim.profiler.logged import Canvases

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
    assert law.source == "log; 2000 canvases of 400 requests: at least 200 canvases and 30 requests, a histogram"


@pytest.mark.parametrize(("num_requests", "num_canvases"), [(39, 5), (29, 10)])
def test_few_canvases_or_requests_keep_a_log_normal(num_requests: int, num_canvases: int) -> None:
    law = law_of(drawn(num_requests, num_canvases))
    assert law.histogram == law.by_canvas == ()
    assert law.source.endswith("requests: a histogram takes 200 canvases and 30 requests, log-normal")


def test_canvases_that_all_took_one_number_of_steps_are_no_histogram() -> None:
    canvases = drawn(40, 10)
    canvases.num_steps[:] = 48
    law = law_of(canvases)
    assert (law.histogram, law.median, law.canvas_spread) == ((), 48.0, 0.0)
    assert law.source.endswith(": all took 48, log-normal")
