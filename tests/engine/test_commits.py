"""What a step yields: commits of a model or a law, importance, and commits among what an eviction leaves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.commits import CanvasLaw, CommitDraws, CommitModel, ImportanceDeltas, LawDraws, TokenDraws, choose
from dsim.engine.draw import delta_row, row_of
from dsim.engine.errors import ProfileError
from dsim.engine.policies.focus import Focus
from dsim.engine.state import CACHED, MASKED
from dsim.engine.step import Evicting, StepPlan

from ..checks import cases
from ..worlds import plan_of, refusal

N = 20_000
PLAIN = CommitModel("toy", 4, 0.9, None, (0.9, 0.6, 0.3, 1.0))
SPREAD = replace(
    PLAIN, pass_probability=(0.7, 0.3, 0.2, 0.1), request_spread=0.8, block_spread=0.5, step_spread=0.3, stage_gain=1.0
)


def draws(model: CommitModel, n: int, width: int = 4, prompt: int = 8, output: int = 40, seed: int = 0) -> CommitDraws:
    return CommitDraws(model, seed, np.full(n, prompt), np.full(n, output), width)


def plan(
    requests: npt.ArrayLike, width: int = 4, start: int = 8, status: object = 0, seen: int = 0, **more: Any
) -> StepPlan:
    """Rows whose block at `start` is computed where it is not cached, all of it masks unless a status is given."""
    who = np.atleast_1d(np.asarray(requests, np.int32))
    states = np.broadcast_to(np.array(status, np.uint8), (len(who), width)).copy()
    return plan_of(
        requests=who, status=states, window=states != CACHED, evaluations=np.full(states.shape, seen, np.uint16),
        block_start=np.full(len(who), start, np.int32), **more,
    )  # fmt: skip


def test_without_spread_each_distance_passes_as_often_as_the_table_says() -> None:
    # The last position always passes, so no commit is forced.
    rate = draws(PLAIN, N).draw(plan(np.arange(N))).mean(axis=0)
    p = np.array(PLAIN.pass_probability)
    assert (np.abs(rate - p) < 4 * np.sqrt(p * (1 - p) / N) + 1e-12).all()


def test_draws_do_not_depend_on_who_else_is_in_the_batch_nor_on_the_order() -> None:
    d = draws(SPREAD, 500)
    together = d.draw(plan(np.arange(500)))
    shuffled = np.random.default_rng(0).permutation(500)
    assert np.array_equal(d.draw(plan(shuffled)), together[shuffled])
    assert np.array_equal(np.concatenate([d.draw(plan(i)) for i in range(500)]), together)
    assert np.array_equal(d.draw(plan(np.arange(500))), together)  # asking twice changes nothing
    assert np.array_equal(draws(SPREAD, 1000).draw(plan(np.arange(500))), together)  # nor does a longer trace


def test_a_step_that_computes_a_mask_commits_at_least_the_best() -> None:
    rare = replace(PLAIN, pass_probability=(1e-6, 1e-6, 1e-6, 1e-6))
    committed = draws(rare, N).draw(plan(np.arange(N)))
    assert (committed.sum(axis=1) == 1).all()
    # Equal chances: the best is anywhere. Unequal ones: it is where the odds are.
    assert np.abs(committed.mean(axis=0) - 0.25).max() < 0.015
    near = replace(PLAIN, pass_probability=(1e-3, 1e-9, 1e-9, 1e-9))
    assert draws(near, N).draw(plan(np.arange(N)))[:, 0].mean() > 0.99


def test_requests_blocks_and_steps_differ_by_their_spreads() -> None:
    of_each: dict[str, Callable[[int], StepPlan]] = {
        "request_spread": lambda i: plan(i, 64, start=64),
        "block_spread": lambda i: plan(0, 64, start=64 * (i + 1)),
        "step_spread": lambda i: plan(0, 64, start=64, seen=i),
    }
    for name, ith in of_each.items():
        model = replace(PLAIN, block_length=64, pass_probability=(0.5,) * 64, **{name: 2.0})
        d = draws(model, 400, width=64, prompt=64, output=64 * 500)
        rates = np.array([d.draw(ith(i)).mean() for i in range(400)])
        # A logistic of a normal of deviation 2 has deviation 0.32; 64 coin tosses alone have 0.06.
        assert 0.27 < rates.std() < 0.37, name


def test_a_fuller_block_passes_more_easily() -> None:
    model = replace(PLAIN, pass_probability=(0.5, 0.5, 0.5, 0.5), stage_gain=2.0)
    rate = draws(model, N).draw(plan(np.arange(N), status=[1, 1, 0, 0])).mean(axis=0)
    odds = np.exp(2.0 * 2 / 4)
    p, q = odds / (1 + odds), 1 / (1 + odds)
    assert np.abs(rate[2:] - (p + q * q / 2)).max() < 0.015  # forced when both fail, either as likely


def test_padding_blocks_commit_whole_and_are_the_last() -> None:
    # 8 prompt tokens and 40 to return: 10 blocks from the one at 8. A share of 0.25 is 2.5 of them.
    model = replace(PLAIN, pass_probability=(1e-9,) * 4, padding_share=0.25)
    d = draws(model, 4000)
    who = np.arange(4000)
    whole = np.array([d.draw(plan(who, start=8 + 4 * b)).all(axis=1) for b in range(10)])
    assert not whole[:7].any()
    assert whole[8:].all()
    assert abs(whole[7].mean() - 0.5) < 0.03


MODELS = (
    CommitModel("chat", 32, 0.9, 0.8, (0.9,) * 32),
    CommitModel("chat", 8, 0.9, 0.8, (0.8,) * 8),
    CommitModel("chat", 32, 0.8, 1.0, (0.7,) * 32),
    CommitModel("code", 32, 0.9, None, (0.6,) * 32),
)


def test_the_first_workload_is_the_default() -> None:
    assert choose(MODELS, "p", None, 32, 0.9) is MODELS[0]
    assert choose(MODELS, "p", "code", 32, 0.9) is MODELS[3]
    assert choose(MODELS, "p", "chat", 32, 0.8, 1.0) is MODELS[2]
    assert choose(MODELS, "p", "chat", 8, 0.9) is MODELS[1]


@cases(
    "ask message",
    (("poetry", 32, 0.9), "p holds commit models of workload chat, code; this run asks for poetry"),
    (("chat", 32, 0.7), "p holds commit models of threshold 0.9, 0.8; this run asks for 0.7"),
    (("chat", 32, 0.8, 0.5), "p holds commit models of temperature 1.0; this run asks for 0.5"),
    (("code", 32, 0.9, 0.5), "p holds commit models of temperature None; this run asks for 0.5"),
)
def test_a_model_that_is_lacking_is_refused_by_listing_those_held(ask: tuple[object, ...], message: str) -> None:
    assert refusal(ProfileError, choose, MODELS, "p", *ask) == message


def test_a_profile_without_models_says_what_it_can_run() -> None:
    assert "p holds no commit model (commits is empty)" in refusal(ProfileError, choose, (), "p", None, 32, 0.9)


def test_another_block_size_is_taken_from_the_nearest_and_marked() -> None:
    got = choose(MODELS, "p", "chat", 16, 0.9)
    assert (got.block_length, got.extrapolated_from, len(got.pass_probability)) == (16, 8, 16)
    assert choose(MODELS, "p", "chat", 64, 0.9).extrapolated_from == 32
    assert choose(MODELS, "p", "chat", 20, 0.9).extrapolated_from == 32  # as near as 8: the larger
    assert choose(MODELS, "p", "chat", 32, 0.9).extrapolated_from is None


def test_a_table_is_cut_or_continued_with_the_ratio_of_its_end() -> None:
    model = CommitModel("toy", 3, 0.9, None, (0.8, 0.4, 0.2))
    assert model.for_block(3) is model
    assert model.for_block(2).pass_probability == (0.8, 0.4)
    assert model.for_block(5).pass_probability == pytest.approx((0.8, 0.4, 0.2, 0.1, 0.05))


def forwards(
    law: CanvasLaw, num: int, index: int, seed: int = 0, begin: int = 10, cap: npt.ArrayLike | None = None
) -> npt.NDArray[np.int64]:
    """The forwards that the canvas of this index takes, of requests 0 to num - 1 with prompts of 10 tokens."""
    drawn = LawDraws(law, seed, num, cap)
    columns = (num, law.canvas_length)
    taken = np.zeros(num, np.int64)
    for seen in range(law.most):
        committed = drawn.draw(
            plan_of(
                status=np.zeros(columns, np.uint8), evaluations=np.full(columns, seen, np.uint16),
                window=np.ones(columns, np.bool_), requests=np.arange(num, dtype=np.int32),
                block_start=np.full(num, begin + index * law.canvas_length, np.int32),
                prompt=np.full(num, 10, np.int32),
            )
        )  # fmt: skip
        assert (committed.all(axis=1) == committed.any(axis=1)).all()  # all of a canvas at once
        assert (committed.all(axis=1) >= (taken > 0)).all()
        taken[(taken == 0) & committed.all(axis=1)] = seen + 1
    return taken


def test_a_law_without_spread_is_its_median_and_its_drift() -> None:
    law = CanvasLaw("fixed", 2, 4.0, drift=2.0)
    assert [forwards(law, 3, index).tolist() for index in range(3)] == [[4] * 3, [8] * 3, [16] * 3]


def test_the_first_block_of_a_grid_may_begin_within_the_prompt() -> None:
    law = CanvasLaw("blocks", 4, 3.0, drift=3.0, most=30)
    # A prompt of 10: blocks begin at 8, 12 and 16.
    assert [forwards(law, 1, index)[0] for index in (0, 1)] == [3, 9]
    assert [forwards(law, 1, index, begin=8)[0] for index in (0, 1, 2)] == [3, 9, 27]


def test_a_law_s_mean_and_spreads_are_found_again_in_what_it_draws() -> None:
    law = CanvasLaw("wide", 1, 20.0, request_spread=0.3, canvas_spread=0.2, least=1, most=90)
    first, second = (np.log(forwards(law, 600, index)) for index in (0, 1))
    for logs in (first, second):
        assert logs.mean() == pytest.approx(np.log(20), abs=3 * 0.36 / 600**0.5)
        assert logs.std() == pytest.approx((0.3**2 + 0.2**2) ** 0.5, rel=0.1)
    # What two canvases of a request have in common is the request's.
    assert np.cov(first, second)[0, 1] == pytest.approx(0.3**2, abs=0.02)
    assert (first != np.log(forwards(law, 600, 0, seed=1))).any()


def test_drafts_are_accepted_as_often_as_is_said_and_only_behind_accepted_ones() -> None:
    num = 4000
    drawn = TokenDraws((1.0, 0.7, 0.7), seed=3)
    steps = plan_of(
        window=np.ones((num, 3), np.bool_), block_start=np.arange(num, dtype=np.int32),
        requests=np.arange(num, dtype=np.int32) % 7, status=np.zeros((num, 3), np.uint8),
        evaluations=np.zeros((num, 3), np.uint16),
    )  # fmt: skip
    took = drawn.draw(steps)
    assert took[:, 0].all()
    assert (took[:, 1] >= took[:, 2]).all()
    assert took.mean(axis=0) == pytest.approx([1.0, 0.7, 0.49], abs=0.025)
    assert not drawn.draw(replace(steps, window=np.zeros((num, 3), np.bool_))).any()


def test_a_cap_on_steps_holds_whatever_the_law_says() -> None:
    law = CanvasLaw("fixed", 2, 48.0)
    assert forwards(law, 2, 0, cap=16).tolist() == [16, 16]
    assert forwards(law, 1, 0, cap=1).tolist() == [1]
    assert forwards(law, 3, 0, cap=[60, 16, 1]).tolist() == [48, 16, 1]


@pytest.mark.parametrize(
    ("on_a_grid", "answer", "padding"), [(True, 20, 4), (True, 14, 5), (False, 20, 5), (False, 33, 4)]
)
def test_blocks_behind_the_one_that_an_answer_ends_in_are_padding(on_a_grid: bool, answer: int, padding: int) -> None:
    # A prompt of 50 and a limit of 160 in blocks of 32: the last is number 6. On the grid an answer of 20 ends at 69,
    # in number 2, and one of 14 in number 1; blocks that begin where the prompt ends hold 32 tokens of it each.
    model = replace(PLAIN, block_length=32, pass_probability=(0.5,) * 32, padding_share=0.9)
    lengths = np.array([50]), np.array([answer])
    draws = CommitDraws(model, 0, *lengths, 32, max_tokens=np.array([160]), on_a_grid=on_a_grid)
    assert draws.arrays.requests["last_block"].tolist() == [6]
    assert draws.num_padding.tolist() == [padding]


WIDTH = 8
EVICTED = CommitModel("toy", WIDTH, 0.9, None, (0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05), request_spread=0.5)
DELTAS = ImportanceDeltas(1.5, 0.7, -0.25, 1.2, 0.1)


def evicting_draws(
    deltas: ImportanceDeltas = DELTAS, model: CommitModel = EVICTED, n: int = N, seed: int = 0
) -> CommitDraws:
    return CommitDraws(model, seed, np.full(n, 16), np.full(n, 80), WIDTH, deltas=deltas)


def evicting_plan(
    who: npt.ArrayLike, status: object = 0, decoded: int = 0, steps: int = 0, progress: int = -1,
    rule: Focus = Focus(),  # noqa: B008
) -> StepPlan:  # fmt: skip
    evicting = Evicting(rule, *(np.full(np.size(who), value, np.int32) for value in (decoded, steps, progress)))
    return plan(who, WIDTH, 16, status, evicting=evicting)


def importance(p: StepPlan, **how: Any) -> npt.NDArray[np.float32]:
    """The importance deltas that are drawn for a plan, [rows, width]."""
    d = evicting_draws(n=len(p.requests), **how)
    decodable, delta = d.draw(p), np.zeros(p.window.shape, np.float32)
    for i in range(len(delta)):
        delta_row(row_of(p.masks, i), decodable[i], d.arrays, delta[i])
    return delta


def test_importance_tells_the_decodable_from_the_others_by_the_means_and_deviations_given() -> None:
    # Columns 0 and 2 are committed: the frontier is 1, and distance is counted from there.
    p = evicting_plan(np.arange(N), status=[1, 0, 1, 0, 0, 0, 0, 0])
    delta = importance(p)
    decodable = evicting_draws().draw(p)
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
    p = evicting_plan(who, status, progress=3)
    for model in (EVICTED, replace(EVICTED, pass_probability=(1e-9,) * WIDTH), replace(EVICTED, padding_share=0.5)):
        d = evicting_draws(model=model, n=2000)
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
    d = evicting_draws()
    p = evicting_plan(np.arange(N))
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
        p = evicting_plan(np.arange(2000), decoded=decoded, steps=steps, progress=7, rule=Focus(alpha=alpha))
        retained, _ = evicting_draws(ImportanceDeltas(0.0, 1.0, 0.0, 1.0)).draw_evicting(p)
        num = retained.sum(axis=1)
        assert num.min() == least
        assert (num < WIDTH).any()
