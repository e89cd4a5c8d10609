"""Padding to captured shapes: the same answers, the cache untouched, and few shapes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.engine import Limits
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.live import session
from dsim.live.cache import PagedCache
from dsim.live.forward import Batch, Forward
from dsim.live.graphs import GraphForward, recompute
from dsim.live.padding import padded_shape, prefill_shape, reachable, reachable_prefills
from dsim.live.prompts import random_prompts
from dsim.live.session import GraphCache
from dsim.live.weights import random_model

from .dense import SMALL, batch_of


def batch(chance: np.random.Generator, sequences: int) -> Batch:
    """Decode rows of sequences with histories and windows of their own, pages of 8 tokens."""
    windows = [np.sort(chance.choice(4, chance.integers(1, 5), replace=False)) for _ in range(sequences)]
    history = 4 * chance.integers(0, 12, sequences)
    return batch_of(chance, history, [h + w for h, w in zip(history, windows, strict=True)], 4)


def policy(spec: str) -> Policy:
    return parse(f"{spec},block_length=4,page_size=8")


def num_prepared(given: Policy, most: int, longest: int) -> int:
    """Graphs of a policy's steps and of its prefills."""
    return len(reachable(given, most)) + len(reachable_prefills(given, most, longest))


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


def prefill(chance: np.random.Generator, lengths: list[int], num_sampled: int) -> Batch:
    """Prompts of these lengths, the last rows of each sampled, pages of 8 tokens."""
    sampled = (np.cumsum(lengths)[:, None] - num_sampled + np.arange(num_sampled)).reshape(-1)
    return batch_of(chance, lengths, [np.arange(n) for n in lengths], 4, sampled=sampled, prefill=True)


@pytest.mark.parametrize("num_sampled", [4, 0])
@pytest.mark.parametrize("lengths", [[8], [40], [12, 32, 4], [16] * 2, [4] * 20, [4] * 65])
def test_a_captured_prefill_says_and_writes_what_the_eager_one_does(lengths: list[int], num_sampled: int) -> None:
    asked = prefill(np.random.default_rng(len(lengths)), lengths, num_sampled)
    device = Recorded()
    plain = Forward(DECODER, PagedCache(SMALL, 160, 8, "cpu", torch.float32))
    captured = GraphForward(DECODER, PagedCache(SMALL, 160, 8, "cpu", torch.float32), record=device)
    expected = plain.run(asked)
    for _ in range(2):  # captured and replayed
        found = captured.run(asked)
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.confidence, expected.confidence, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(captured.cache.keys, plain.cache.keys)
        torch.testing.assert_close(captured.cache.values, plain.cache.values)
    graphs = int(len(lengths) < 65)
    assert (captured.graphs.num_captures, device.launches) == (graphs, 2 * graphs)


def test_prefills_are_padded_to_few_shapes_and_every_one_of_them_is_prepared() -> None:
    assert prefill_shape(5, 1) == (32, 2)  # the padding is a sequence, too
    assert prefill_shape(60, 2) == prefill_shape(64, 16) == (64, 17)
    assert prefill_shape(1024, 17) == prefill_shape(1000, 64) == (1024, 65)
    assert prefill_shape(1025, 1) is prefill_shape(128, 65) is None
    given = policy("lmdeploy-bd32")
    for longest in (1100, 40, 33, 5):
        sizes = {(rows, n) for n in range(1, 21) for rows in range(n, min(n * longest, 1100) + 1)}
        every = {prefill_shape(*size) for size in sizes} - {None}
        assert sorted(every, reverse=True) == reachable_prefills(given, 20, longest)
    assert reachable_prefills(given, 1, 40) == [(64, 2), (32, 2)]


class Recorded:
    """A fake CUDA: it keeps what was captured, in order, and computes it again at every launch."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.launches = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Any:
        replay, answers = recompute(compute)
        self.rows.append(len(answers))

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
    assert device.rows == sorted(device.rows, reverse=True)
    plain = Forward(forward.model, PagedCache(SMALL, 40, 8, "cpu", torch.float32))
    chance = np.random.default_rng(3)
    for sequences in (4, 1, 3, 2, 4):
        asked = batch(chance, sequences)
        assert forward.run(asked).tokens.tolist() == plain.run(asked).tokens.tolist()
    assert (len(device.rows), device.launches) == (forward.graphs.num_captures, 5)  # no capture in mid-run
    assert len(device.rows) == num_prepared(policy("chunk:4"), 4, 8 * forward.pages)


def served(kept: GraphCache, num: int, prepared: bool = True) -> Any:
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


def answered(spec: str, graphs: GraphCache | None) -> tuple[Any, Any, Any]:
    """A run whose weights decide: its steps' features, their commits and what came of the requests."""
    requests = [Request(i, 0.0, 5 + i, 9) for i in range(5)]
    steps: list[Any] = []
    lists: list[Any] = []

    def append(columns: Any, of_steps: Any) -> None:
        steps.append(columns)
        lists.append(of_steps["commits"][0])

    given, prompts = policy(f"{spec},max_batch=3,threshold=0.02"), random_prompts(SMALL, 0)
    serving = session.Serving(DECODER, given, Limits(40, 64, 3), prompts, graphs=graphs)
    done = session.run(serving, requests, append=append)
    assert done.failure is None
    assert done.num_made_ready == 0
    return {n: np.concatenate([part[n] for part in steps]) for n in steps[0]}, np.concatenate(lists), done.table


@pytest.mark.parametrize("spec", ["lmdeploy-bd32", "chunk:3"])
def test_the_head_of_masks_alone_says_what_it_says_of_all_rows_captured_or_not(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, commits, _ = answered(spec, None)
    through: list[int] = []  # the head
    head = Forward._head
    monkeypatch.setattr(Forward, "_head", lambda self, h: (through.append(len(h)), head(self, h))[1])
    for graphs in (None, GraphCache()):
        steps, alone, table = answered(f"{spec},head=masks", graphs)
        assert (alone == commits).all()
        assert (table["status"] == 0).all()
        decode = ~steps["prefill"]
        assert (steps["tokens"] == every["tokens"]).all()
        assert (steps["head_rows"] == steps["sampled_rows"]).all()
        assert through[-len(decode) :] == steps["head_rows"].tolist()  # behind the warm-up's
        assert (steps["head_rows"][decode] < steps["tokens"][decode]).any()
        assert (steps["head_rows"][~decode] == every["head_rows"][~decode]).all()


def test_any_of_a_steps_rows_pass_the_head_behind_one_graph() -> None:
    device = Recorded()
    forward = GraphForward(DECODER, PagedCache(SMALL, 40, 8, "cpu", torch.float32), record=device)
    asked = batch(np.random.default_rng(3), 4)
    whole = Forward(DECODER, PagedCache(SMALL, 40, 8, "cpu", torch.float32)).run(asked)
    for num in (3, 1, 0):
        found = forward.run(replace(asked, sampled=np.arange(num)))
        assert found.tokens.tolist() == whole.tokens[:num].tolist()
    assert (forward.graphs.num_captures, device.launches) == (1, 3)


def test_larger_inputs_drop_the_graphs_that_read_the_smaller_ones() -> None:
    forward = GraphForward(DECODER, PagedCache(SMALL, 40, 8, "cpu", torch.float32), record=recompute)
    forward.prepare(policy("focus"), 2)
    small = forward.graphs.num_captures
    forward.prepare(policy("focus"), 2)
    assert forward.graphs.num_captures == small
    forward.prepare(policy("focus"), 4)
    assert len(forward.graphs.by_key) == forward.graphs.num_captures - small


def test_graphs_are_kept_for_the_next_run_of_as_many_pages() -> None:
    kept = GraphCache()
    first = served(kept, 6)
    forward = kept._forward
    assert forward is not None
    captured = forward.graphs.num_captures
    assert (first.num_made_ready, captured) == (0, num_prepared(policy("lmdeploy-bd32"), 3, 24))
    again = served(kept, 4)
    assert kept._forward is forward
    assert (again.num_made_ready, forward.graphs.num_captures) == (0, captured)
    assert (again.table["status"] == 0).all()


def test_a_shape_that_was_not_prepared_is_counted_where_it_is_captured() -> None:
    kept = GraphCache()
    done = served(kept, 6, prepared=False)
    assert kept._forward is not None
    assert done.num_made_ready == kept._forward.graphs.num_captures > 0


def test_a_kept_forward_of_too_few_pages_or_of_another_model_is_made_anew() -> None:
    kept, given = GraphCache(), policy("lmdeploy-bd32")
    first = kept.forward(DECODER, given, 20, 64, 8192)
    assert kept.forward(DECODER, given, 18, 40, 8192) is first
    assert kept.forward(DECODER, given, 21, 40, 8192) is not first
    other = random_model(SMALL, "cpu", torch.float32, seed=4)
    assert kept.forward(other, given, 5, 40, 8192).model is other
