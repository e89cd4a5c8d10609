"""Calibrated commit models yield what was published: on other dice than those that fitted them, and on the engine's."""

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from dsim.engine.commits import CommitDraws, LawDraws
from dsim.engine.draw import steps_of_law
from dsim.engine.state import MASKED, PENDING
from dsim.profiler.calibrate import (
    ALIKE,
    REQUEST_SPREAD,
    STD_PER_MEAN,
    calibrate_commits,
    per_denoise_step,
    simulate,
    solve,
)
from dsim.profiler.canvas_law import mean_at, mean_forwards
from dsim.profiler.profile import load
from dsim.profiler.published import CANVAS_LAWS, editing_laws, published_commits
from dsim.research.calibration.publications import EDITING, SOLVED, YIELDS

from ..worlds import plan_of

# SDAR-8B: printed mean and std, ordinary mean, share of whole-block steps, std of the mixture.
TABLE_2 = {
    "sharegpt": (5.29, 9.44, 2.2, 0.104),
    "lmsys": (4.81, 8.80, 2.2, 0.088),
    "longbench": (6.06, 10.74, 2.2, 0.130),
    "gsm8k": (3.20, 5.68, 2.2, 0.034),
    "humaneval": (3.75, 5.96, 2.6, 0.039),
    "mbpp": (1.96, 3.33, 1.67, 0.0097),
    "ifeval": (1.88, 3.90, 1.5, 0.013),
}


def test_blocks_have_a_mean_in_closed_form() -> None:
    assert simulate((0.0,) * 8, 0.0, 0.0, 0.0, num_blocks=50) == (1.0, 0.0)
    assert simulate((1.0,) * 8, 0.0, 0.0, 0.0, num_blocks=50) == (8.0, 0.0)
    # Both pass with p * q; otherwise one commits and a second step takes the other.
    mean, _ = simulate((0.6, 0.5), 0.0, 0.0, 0.0, num_blocks=200_000)
    assert mean == pytest.approx(2 / (2 - 0.6 * 0.5), rel=3e-3)


@pytest.mark.parametrize("mean", SOLVED)
def test_solved_models_yield_their_mean_on_other_dice(mean: float) -> None:
    y = next(y for _, yields in YIELDS.values() for y in yields if y.mean == mean)
    m = calibrate_commits(y.mean, workload="", threshold=0.9, solved=SOLVED[mean])
    spreads = (m.request_spread, m.block_spread, m.step_spread)
    other, std = simulate(m.pass_probability, *spreads, seed=7)
    assert other == pytest.approx(mean, rel=1e-2)
    assert m.request_spread == REQUEST_SPREAD > ALIKE
    assert std > STD_PER_MEAN * mean  # which is that of requests of one kind


def test_solving_again_gives_the_stored_answer() -> None:
    assert solve(4.31) == SOLVED[4.31]


@pytest.mark.parametrize("model", EDITING)
def test_laws_of_editing_blocks_take_as_many_forwards_as_were_published(model: str) -> None:
    laws = {law.workload: law for law in editing_laws(model)}
    for workload, (tokens, *_) in EDITING[model].items():
        law = laws[workload]
        draws = LawDraws(law, 0, 1).arrays
        requests = np.exp(law.request_spread / law.canvas_spread * np.log(draws.factors[0]))
        steps = np.floor(law.median * np.outer(requests, draws.factors[0]) + 0.5).clip(law.least, law.most)
        assert steps.mean() == pytest.approx(32 / tokens, rel=1e-3)


def test_llada2_2_borrows_the_laws_that_its_report_lacks_and_takes_one_forward_more_at_most() -> None:
    mini, flash = editing_laws("LLaDA2.2-mini"), editing_laws("LLaDA2.2-flash")
    assert [law.workload for law in mini[:2]] == ["chat", "gsm8k"]
    assert not mini[0].source.startswith("borrowed")
    assert all(law.source.startswith("borrowed from LLaDA2.1-mini: ") for law in mini[1:])
    assert [law.median for law in flash] == [law.median for law in editing_laws("LLaDA2.1-flash")]
    assert {law.most for law in mini + flash} == {50}


def test_the_law_of_an_evaluation_has_the_published_distribution() -> None:
    law, requests, canvases = CANVAS_LAWS[0], 4000, 11  # 2,115 canvases, of which about one in 10.7 was a first one
    draws = LawDraws(law, 5, requests).arrays
    steps = np.array([[steps_of_law(draws, r, i) for i in range(canvases)] for r in range(0, requests, 20)])
    assert (law.workload, law.most) == ("evaluation", 48)
    assert steps.mean() == pytest.approx(26.6, rel=0.04)
    assert (steps == 48).mean() == pytest.approx(0.213, abs=0.04)
    assert np.quantile(steps, [0.1, 0.5, 0.9]) == pytest.approx([10, 23, 48], abs=2)
    assert (mean_at(law, law.by_canvas[0]), mean_forwards(law)) == pytest.approx((22.7, 27.0), rel=2e-3)
    counted = np.array([share for _, share in law.histogram])
    alike = law.forwards()[(np.arange(2000) + 0.5) / 200 - 5 < 9]  # every cell
    at = np.array([NormalDist().pdf((i + 0.5) / 200 - 5) for i in range(2000)])
    edges = [0, *(most for most, _ in law.histogram)]
    drawn = np.array([at[(alike > low) & (alike <= high)].sum() for low, high in pairwise(edges)])
    assert drawn / drawn.sum() == pytest.approx(counted / counted.sum(), abs=0.002)


def test_a_cap_below_the_law_s_takes_no_more_and_a_higher_one_has_what_was_counted() -> None:
    law = CANVAS_LAWS[0]
    for cap, most in ((20, 20), (90, 48)):
        draws = LawDraws(law, 0, 50, cap).arrays
        assert max(steps_of_law(draws, r, 0) for r in range(50)) == most


def test_a_shorter_block_can_be_calibrated_too() -> None:
    m = calibrate_commits(1.8, block_length=8, workload="w", threshold=0.9)
    assert len(m.pass_probability) == 8
    mean, _ = simulate(m.pass_probability, m.request_spread, m.block_spread, m.step_spread)
    assert mean == pytest.approx(1.8, rel=2e-3)


def mixture(mean: float, std: float, steps: float, block_length: int) -> tuple[float, float]:
    """Mean and std over all steps, where the share `steps` commits a whole block and the others mean ± std."""
    total = (1.0 - steps) * mean + steps * block_length
    square = (1.0 - steps) * (mean**2 + std**2) + steps * block_length**2
    return total, float(np.sqrt(square - total**2))


@pytest.mark.parametrize("workload", TABLE_2)
def test_mixtures_have_the_published_mean_and_std(workload: str) -> None:
    mean, std, ordinary, steps = TABLE_2[workload]
    total, total_std = mixture(ordinary, STD_PER_MEAN * ordinary, steps, 32)
    assert total == pytest.approx(mean, abs=0.06)
    assert total_std == pytest.approx(std, rel=0.06)
    model = next(m for m in published_commits("SDAR-8B") if m.workload == f"{workload}-fixed")
    # From the share of blocks back to that of steps: an ordinary block takes 32 / mean of them.
    q = model.padding_share
    assert q / (q + (1 - q) * 32 / ordinary) == pytest.approx(steps, rel=1e-3)


def test_published_figures_per_forward_become_per_denoise_step() -> None:
    assert per_denoise_step(3.8, 32) == pytest.approx(4.31, abs=0.005)
    assert per_denoise_step(32 / 15.02, 32) == pytest.approx(2.28, abs=0.005)


def test_each_commit_model_names_its_source_and_what_it_was_borrowed_from() -> None:
    assert published_commits("Qwen3-8B") == ()
    assert [m.workload for m in published_commits("SDAR-8B")][:3] == ["sharegpt-focus", "sharegpt", "sharegpt-fixed"]
    for name in ("SDAR-4B", "LLaDA2.0-flash"):
        models = published_commits(name)
        assert models[0].workload == "sharegpt-focus"
        assert all(m.source.startswith("borrowed from ") for m in models)
    assert {m.threshold for m in published_commits("LLaDA-8B")} == {0.5, 0.6, 0.7, 0.8, 0.9}
    assert all(m.source.startswith("borrowed from LLaDA-8B") for m in published_commits("Dream-7B"))
    [assumed] = [m for m in published_commits("LLaDA2.0-mini") if m.threshold == 0.8]
    assert assumed.source.startswith("assumed, nothing is published")


NUM_REQUESTS, NUM_BLOCKS, BLOCK = 32_000, 4, 32  # requests differ so much that 2,000 of them miss the mean by 2 %


def decode(workload: str) -> np.ndarray:
    """Tokens that each denoise step commits, of requests of NUM_BLOCKS whole blocks."""
    model = load("a100-sdar-8b").commit_model(workload, BLOCK, 0.9)
    lengths = np.zeros(NUM_REQUESTS, np.int64), np.full(NUM_REQUESTS, NUM_BLOCKS * BLOCK)
    draws = CommitDraws(model, 1, *lengths, BLOCK)
    counts = []
    for block in range(NUM_BLOCKS):
        status = np.full((NUM_REQUESTS, BLOCK), MASKED, np.uint8)
        evaluations = np.zeros((NUM_REQUESTS, BLOCK), np.uint16)
        rows = np.arange(NUM_REQUESTS, dtype=np.int32)
        while len(rows):
            plan = plan_of(
                requests=rows, status=status[rows], evaluations=evaluations[rows], window=status[rows] == MASKED,
                block_start=np.full(len(rows), block * BLOCK, np.int32),
            )  # fmt: skip
            committed = draws.draw(plan)
            counts.append(committed.sum(axis=1))
            evaluations[rows] += status[rows] == MASKED
            status[rows] = np.where(committed, PENDING, status[rows])
            rows = rows[(status[rows] == MASKED).any(axis=1)]
    return np.concatenate(counts)


@pytest.mark.parametrize(("workload", "mean"), [("sharegpt-focus", 2.28), ("sharegpt-fixed", 5.29)])
def test_the_twin_commits_what_was_published(workload: str, mean: float) -> None:
    assert decode(workload).mean() == pytest.approx(mean, rel=0.015)
