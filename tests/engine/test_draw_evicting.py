"""What a step that evicts yields: importance drawn by what could be decoded, and commits among what is left."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.commits import CommitDraws, CommitModel, ImportanceDeltas
from dsim.engine.draw import delta_row, row_of
from dsim.engine.policies.focus import Focus
from dsim.engine.state import MASKED
from dsim.engine.step import Evicting, StepPlan

from ..worlds import plan_of

N = 20_000
WIDTH = 8
MODEL = CommitModel("toy", WIDTH, 0.9, None, (0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05), request_spread=0.5)
DELTAS = ImportanceDeltas(1.5, 0.7, -0.25, 1.2, 0.1)


def draws(deltas: ImportanceDeltas = DELTAS, model: CommitModel = MODEL, n: int = N, seed: int = 0) -> CommitDraws:
    return CommitDraws(model, seed, np.full(n, 16), np.full(n, 80), WIDTH, deltas=deltas)


def plan(
    who: npt.ArrayLike, status: object = 0, seen: int = 0, decoded: int = 0, steps: int = 0, progress: int = -1,
    rule: Focus = Focus(), start: int = 16,  # noqa: B008
) -> StepPlan:  # fmt: skip
    requests = np.atleast_1d(np.asarray(who, np.int32))
    n, shape = len(requests), (len(requests), WIDTH)
    states = np.broadcast_to(np.array(status, np.uint8), shape).copy()

    def each(value: int) -> npt.NDArray[np.int32]:
        return np.full(n, value, np.int32)

    return plan_of(
        requests=requests, status=states, window=states != 2, evaluations=np.full(shape, seen, np.uint16),
        block_start=each(start), evicting=Evicting(rule, each(decoded), each(steps), each(progress)),
    )  # fmt: skip


def importance(p: StepPlan, **how: Any) -> npt.NDArray[np.float32]:
    """The importance deltas that are drawn for a plan, [rows, width]."""
    d = draws(n=len(p.requests), **how)
    decodable, delta = d.draw(p), np.zeros(p.window.shape, np.float32)
    for i in range(len(delta)):
        delta_row(row_of(p.masks, i), decodable[i], d.arrays, delta[i])
    return delta


def test_importance_tells_the_decodable_from_the_others_by_the_means_and_deviations_given() -> None:
    # Columns 0 and 2 are committed: the frontier is 1, and distance is counted from there.
    p = plan(np.arange(N), status=[1, 0, 1, 0, 0, 0, 0, 0])
    delta = importance(p)
    decodable = draws().draw(p)
    distance = np.broadcast_to(np.arange(WIDTH) - 1, delta.shape)
    masked = p.status == MASKED
    for which, mean, std in ((decodable, 1.5, 0.7), (masked & ~decodable, -0.25, 1.2)):
        mine = delta[which] + 0.1 * distance[which]
        n = len(mine)
        assert n > 10_000
        # 1024 quantiles have the normal's mean, and a deviation less than 0.2 % below its own.
        assert abs(mine.mean() - mean) < 5 * std / np.sqrt(n)
        assert abs(mine.std() / std - 1) < 0.002 + 5 / np.sqrt(2 * n)
    for d in (0, 3, 6):
        column = delta[:, d + 1][masked[:, d + 1] & ~decodable[:, d + 1]]
        assert abs(column.mean() - (-0.25 - 0.1 * d)) < 5 * 1.2 / np.sqrt(len(column))


def test_a_row_with_masks_commits_at_least_one_and_only_what_went_on() -> None:
    rng = np.random.default_rng(0)
    who = np.arange(2000)
    status = rng.integers(0, 3, (2000, WIDTH))
    p = plan(who, status, progress=3)
    for model in (MODEL, replace(MODEL, pass_probability=(1e-9,) * WIDTH), replace(MODEL, padding_share=0.5)):
        d = draws(model=model, n=2000)
        retained, committed = d.draw_evicting(p)
        masks = p.window & (p.status == MASKED)
        assert not (retained & ~p.window).any()
        assert (retained | masks | ~p.window).all()  # committed positions all go on
        assert not (committed & ~(retained & masks)).any()
        assert (committed.any(axis=1) == masks.any(axis=1)).all()
        assert not (retained & masks).all(axis=1).all()
        num_masked = masks.sum(axis=1)
        assert ((retained & masks).sum(axis=1) >= np.minimum(2, num_masked)).all()  # ceil(1.5)


def test_what_goes_on_commits_as_it_would_in_the_plain_step() -> None:
    # The dice are the plain step's: of what is retained the same passes, and the best where nothing does.
    d = draws()
    p = plan(np.arange(N))
    plain = d.draw(p)
    retained, committed = d.draw_evicting(p)
    mine = plain & retained
    passed = mine.any(axis=1)
    assert 0.5 < passed.mean() < 1
    assert np.array_equal(committed[passed], mine[passed])
    assert (committed[~passed].sum(axis=1) == 1).all()


def test_the_budget_is_of_what_the_plan_says_was_decoded() -> None:
    # All equally important by their draws: 7 in 2 steps and alpha 1.5 ask for 6 of 8.
    for decoded, steps, alpha, least in ((0, 0, 1.5, 2), (7, 2, 1.5, 6), (7, 2, 1.0, 4), (1, 4, 1.0, 1)):
        p = plan(np.arange(2000), decoded=decoded, steps=steps, progress=7, rule=Focus(alpha=alpha))
        retained, _ = draws(ImportanceDeltas(0.0, 1.0, 0.0, 1.0)).draw_evicting(p)
        num = retained.sum(axis=1)
        assert num.min() == least
        assert (num < WIDTH).any()
