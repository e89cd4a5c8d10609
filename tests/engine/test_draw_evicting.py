"""What a step that evicts yields: importance drawn by what could be decoded, and commits among what is left."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.commits import CommitDraws, CommitModel, ImportanceDeltas
from dsim.engine.draw import delta_row
from dsim.engine.policies.focus import Focus
from dsim.engine.state import MASKED
from dsim.engine.step import Evicting, StepPlan

from ..worlds import plan_of

N = 20_000
WIDTH = 8
MODEL = CommitModel("toy", WIDTH, 0.9, None, (0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05), request_spread=0.5)
DELTAS = ImportanceDeltas(1.5, 0.7, -0.25, 1.2, 0.1)
APART = ImportanceDeltas(1000.0, 1.0, 0.0, 1.0)


def draws(deltas: ImportanceDeltas = DELTAS, model: CommitModel = MODEL, n: int = N, seed: int = 0) -> CommitDraws:
    return CommitDraws(model, seed, np.full(n, 16), np.full(n, 80), WIDTH, deltas)


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
        delta_row(
            p.status[i], p.evaluations[i], p.window[i], decodable[i], int(p.block_start[i]), int(p.requests[i]),
            d.arrays, delta[i],
        )  # fmt: skip
    return delta


def test_draws_do_not_depend_on_who_else_is_in_the_batch_nor_on_the_order() -> None:
    d = draws(n=100)
    together = d.draw_evicting(plan(np.arange(100)))
    shuffled = np.random.default_rng(0).permutation(100)
    for a, b in zip(d.draw_evicting(plan(shuffled)), together, strict=True):
        assert np.array_equal(a, b[shuffled])
    alone = [d.draw_evicting(plan(i)) for i in range(100)]
    for k in range(2):
        assert np.array_equal(np.concatenate([one[k] for one in alone]), together[k])
    for again in (d, draws(n=100), draws(n=999)):
        for a, b in zip(again.draw_evicting(plan(np.arange(100))), together, strict=True):
            assert a.tobytes() == b.tobytes()


def test_another_seed_request_block_or_step_draws_other_importance() -> None:
    # Nothing is decodable but what is forced: deltas are normal draws, and unrelated ones.
    never = replace(MODEL, pass_probability=(1e-9,) * WIDTH, request_spread=0.0)
    who = np.arange(4000)
    same = ImportanceDeltas(0.0, 1.0, 0.0, 1.0)
    first = importance(plan(who), deltas=same, model=never)
    assert np.array_equal(first, importance(plan(who), deltas=same, model=never))
    others = [
        importance(plan(who), deltas=same, model=never, seed=1),
        importance(plan(who, seen=1), deltas=same, model=never),
        importance(plan(who, start=24), deltas=same, model=never), np.roll(first, 1, axis=0), np.roll(first, 1, axis=1),
    ]  # fmt: skip
    for other in others:
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(first.size)


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


def test_far_apart_importance_evicts_nothing_decodable_while_they_are_fewer_than_half() -> None:
    # k of n at one value far above the rest lie (n - k) / n above the mean, and the deviation is sqrt(k (n - k)) / n:
    # all pass it while k <= n / 2. The budget of a first step is 2, so that beyond half fewer go on.
    d = draws(APART)
    p = plan(np.arange(N), progress=7)
    plain = d.draw(p)
    retained, committed = d.draw_evicting(p)
    few = plain.sum(axis=1) < WIDTH // 2
    assert 0.5 < few.mean() < 1
    assert np.array_equal(committed[few], plain[few])
    assert (retained[few].sum(axis=1) <= 2 * np.maximum(2, plain[few].sum(axis=1))).all()
    many = plain.sum(axis=1) > WIDTH // 2
    assert many.any()
    assert (committed[many].sum(axis=1) < plain[many].sum(axis=1)).all()
    assert committed.sum() > 0.8 * plain.sum()


def test_a_first_step_loses_nothing_left_of_what_it_selects() -> None:
    # Progress -1: all masks left of the rightmost go on. With one decodable, so does all up to it.
    one = replace(MODEL, pass_probability=(1e-9,) * WIDTH, request_spread=0.0)
    d = draws(APART, one)
    p = plan(np.arange(2000), rule=Focus(alpha=1.0))
    plain = d.draw(p)
    assert (plain.sum(axis=1) == 1).all()
    retained, committed = d.draw_evicting(p)
    assert np.array_equal(committed, plain)
    at = np.argmax(plain, axis=1)
    assert np.array_equal(retained, np.arange(WIDTH) <= at[:, None])
    # Once all were computed, only it and its left neighbour do.
    retained, committed = d.draw_evicting(plan(np.arange(2000), rule=Focus(alpha=1.0), progress=7))
    assert np.array_equal(committed, plain)
    columns = np.arange(WIDTH)
    assert np.array_equal(retained, (columns == at[:, None]) | (columns == at[:, None] - 1))


def test_the_budget_is_of_what_the_plan_says_was_decoded() -> None:
    # All equally important by their draws: 7 in 2 steps and alpha 1.5 ask for 6 of 8.
    for decoded, steps, alpha, least in ((0, 0, 1.5, 2), (7, 2, 1.5, 6), (7, 2, 1.0, 4), (1, 4, 1.0, 1)):
        p = plan(np.arange(2000), decoded=decoded, steps=steps, progress=7, rule=Focus(alpha=alpha))
        retained, _ = draws(ImportanceDeltas(0.0, 1.0, 0.0, 1.0)).draw_evicting(p)
        num = retained.sum(axis=1)
        assert num.min() == least
        assert (num < WIDTH).any()
