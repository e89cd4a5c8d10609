"""Padding to captured shapes: the same answers, the cache untouched, and few shapes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.engine import Limits
from dsim.engine.policy import Policy, parse
from dsim.engine.request import Request
from dsim.live import session
from dsim.live.cache import PagedCache
from dsim.live.forward import Batch, Forward
from dsim.live.graphs import GraphForward, recompute
from dsim.live.padding import MAX_ROWS, padded_shape, reachable
from dsim.live.prompts import random_prompts
from dsim.live.session import Kept
from dsim.live.weights import random_model

from .dense import SMALL


def batch(chance: np.random.Generator, sequences: int) -> Batch:
    """Decode rows of sequences with histories and windows of their own, pages of 8 tokens."""
    windows = [np.sort(chance.choice(4, chance.integers(1, 5), replace=False)) for _ in range(sequences)]
    history = 4 * chance.integers(0, 12, sequences)
    table = chance.permutation(7 * sequences).reshape(sequences, 7).astype(np.int32)
    rows = np.repeat(np.arange(sequences), [len(w) for w in windows])
    positions = np.concatenate([h + w for h, w in zip(history, windows, strict=True)])
    listed = np.zeros((sequences, 4), np.bool_)
    for s, window in enumerate(windows):
        listed[s, window] = True
    starts = np.concatenate([[0], np.cumsum([len(w) for w in windows])])
    places = table[rows, positions // 8].astype(np.int64) * 8 + positions % 8
    return Batch(
        chance.integers(0, 96, len(rows)), positions, places, starts, table, history, listed, 4, np.arange(len(rows))
    )


@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_a_padded_batch_says_and_writes_what_the_plain_one_does(sequences: int) -> None:
    model = random_model(SMALL, "cpu", torch.float32, seed=1)
    chance = np.random.default_rng(sequences)
    plain, padded = (
        kind(model, PagedCache(SMALL, 7 * sequences, 8, "cpu", torch.float32)) for kind in (Forward, GraphForward)
    )
    for _ in range(4):
        asked = batch(chance, sequences)
        expected, found = plain.run(asked), padded.run(asked)
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.confidence, expected.confidence, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(padded.cache.keys, plain.cache.keys)
        torch.testing.assert_close(padded.cache.values, plain.cache.values)


def policy(spec: str) -> Policy:
    return parse(f"{spec},block_length=4,page_size=8")


@pytest.mark.parametrize(("spec", "width"), [("lmdeploy-bd32", 4), ("chunk:4", 4), ("ar", 1), ("optimus", 4)])
def test_every_step_of_a_policy_is_of_a_reachable_shape_and_every_reachable_shape_of_a_step(
    spec: str, width: int
) -> None:
    given = parse(f"{spec},page_size=8") if spec == "ar" else policy(spec)
    windows = [width] if spec == "lmdeploy-bd32" else range(1, width + 1)
    assert given.width == width
    steps = {padded_shape(r, n) for n in range(1, 41) for r in range(n * min(windows), n * max(windows) + 1)}
    if spec == "lmdeploy-bd32":
        steps = {padded_shape(4 * n, n) for n in range(1, 41)}
    found = reachable(given, 40)
    assert set(found) == steps
    assert found == sorted(found, reverse=True)  # smaller ones lie where the largest's intermediate results did


def test_steps_of_more_rows_than_are_captured_are_no_shape() -> None:
    found = reachable(parse("lmdeploy-bd32"), 1024)
    assert max(rows for rows, _ in found) == MAX_ROWS
    assert len(found) < 50


class Recorded:
    """A fake CUDA: it keeps what was captured, in order, and computes it again at every launch."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.launches = 0

    def __call__(self, compute: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        replay, answers = recompute(compute)
        self.rows.append(answers[0].shape[-1])

        def launch() -> None:
            self.launches += 1
            replay()

        return launch, answers


def test_the_largest_shape_is_captured_first_and_a_step_is_one_launch_of_one_graph() -> None:
    device = Recorded()
    cache = PagedCache(SMALL, 40, 8, "cpu", torch.float32)
    forward = GraphForward(random_model(SMALL, "cpu", torch.float32, seed=1), cache, record=device)
    forward.prepare(policy("chunk:4"), 4)
    assert not cache.keys.any()
    steps = device.rows[: len(reachable(policy("chunk:4"), 4))]
    assert steps == sorted(steps, reverse=True)
    plain = Forward(forward.model, PagedCache(SMALL, 40, 8, "cpu", torch.float32))
    chance = np.random.default_rng(3)
    for sequences in (4, 1, 3, 2, 4):
        asked = batch(chance, sequences)
        assert forward.run(asked).tokens.tolist() == plain.run(asked).tokens.tolist()
    assert (len(device.rows), device.launches) == (forward.num_captures, 5)  # no capture in mid-run
    assert len(device.rows) == len(reachable(policy("chunk:4"), 4))


def served(kept: Kept, num: int, prepared: bool = True) -> Any:
    """A run of `num` requests, their graphs kept."""
    requests = [Request(i, 0.0, 5 + i, 9) for i in range(num)]
    model = CommitModel("toy", 4, 0.9, None, (0.5,) * 4)
    lengths = tuple(np.array([getattr(r, name) for r in requests]) for name in ("input_length", "output_length"))
    draws = CommitDraws(model, 0, *lengths, 4)
    with pytest.MonkeyPatch.context() as patch:
        if not prepared:
            patch.setattr(GraphForward, "prepare", lambda *_: None)
            patch.setattr(session.Serving, "warm_up", lambda *_: None)
        prompts, limits = random_prompts(SMALL, 0), Limits(40, 64, 3)
        serving = session.Serving(DECODER, policy("lmdeploy-bd32,max_batch=3"), limits, prompts, draws, graphs=kept)
        return session.run(serving, requests)


DECODER = random_model(SMALL, "cpu", torch.float32)


def test_graphs_are_kept_for_the_next_run_of_as_many_pages() -> None:
    kept = Kept()
    first = served(kept, 6)
    forward = kept._forward
    assert forward is not None
    captured = forward.num_captures
    assert (first.num_made_ready, captured) == (0, len(reachable(policy("lmdeploy-bd32"), 3)))
    again = served(kept, 4)
    assert kept._forward is forward
    assert (again.num_made_ready, forward.num_captures) == (0, captured)
    assert (again.table["status"] == 0).all()


def test_a_shape_that_was_not_prepared_is_counted_where_it_is_captured() -> None:
    kept = Kept()
    done = served(kept, 6, prepared=False)
    assert kept._forward is not None
    assert done.num_made_ready == kept._forward.num_captures > 0


def test_a_kept_forward_of_too_few_pages_or_of_another_model_is_made_anew() -> None:
    kept, given = Kept(), policy("lmdeploy-bd32")
    first = kept.forward(DECODER, given, 20, 64, 8192)
    assert kept.forward(DECODER, given, 18, 40, 8192) is first
    assert kept.forward(DECODER, given, 21, 40, 8192) is not first
    other = random_model(SMALL, "cpu", torch.float32, seed=4)
    assert kept.forward(other, given, 5, 40, 8192).model is other
