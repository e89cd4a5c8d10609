"""Steps of a wanted shape: what was measured has the shape that was asked for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.latency import Features
from dsim.live.cache import PagedCache
from dsim.live.forward import Forward
from dsim.live.measure import (
    MOST_STEPS,
    Shape,
    fill_with_text,
    level_shapes,
    measure,
    measure_evicting,
    pages_of,
    shapes,
    uneven,
)
from dsim.live.weights import random_model

from .dense import SMALL

BLOCK = SMALL.block_length


def features_of(shape: Shape, block: int) -> Features:
    n, keys = shape.batch, shape.context + (shape.window or 0)
    if shape.window == 0:
        qk_pairs = n * shape.context * (shape.context + block) // 2
        return Features(shape.tokens, qk_pairs, n * keys, n * block, n * block, n, shape.tokens)
    return Features(shape.tokens, shape.tokens * keys, n * keys, shape.tokens, shape.tokens, n, 0)


@pytest.fixture(scope="module")
def forward() -> Forward:
    return Forward(random_model(SMALL, "cpu", torch.float32), PagedCache(SMALL, 120, 8, "cpu", torch.float32))


@pytest.mark.parametrize("shape", [Shape(1, 4, 8), Shape(3, 4, 40), Shape(3, 2, 40), Shape(5, 1, 16), Shape(2, 3, 64)])
def test_a_decode_step_has_the_batch_window_and_context_asked_for(forward: Forward, shape: Shape) -> None:
    found = measure(forward, shape, BLOCK, 5)
    assert len(found.latency) == len(found.device) == 5
    assert (found.device > 0).all()
    assert (found.device <= found.latency).all()
    expected = features_of(shape, BLOCK)
    assert found.features[0] == shape.batch * shape.window
    assert (found.features.batch, found.features.prefill_tokens) == (shape.batch, 0)
    # A sequence moves on by a token or so a step: its keys are those of the context, and at most two blocks more.
    assert expected.sum_kv - shape.batch * BLOCK <= found.features.sum_kv <= expected.sum_kv + 2 * shape.batch * BLOCK


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_device_settles_in_steps_that_do_not_count_as_far_as_there_are_pages(forward: Forward, window: int) -> None:
    context = 40
    soon, late = (measure(forward, Shape(2, window, context), BLOCK, 5, settled=s) for s in (0.0, 1e9))
    assert len(soon.latency) == len(late.latency) == 5
    assert soon.features.tokens == late.features.tokens == 2 * window
    # One token a step commits, but in a block's last of five; the middle one of the last five steps is shown.
    assert (late.features.sum_kv - soon.features.sum_kv) / 2 >= 0.8 * (MOST_STEPS - 5) - BLOCK
    assert pages_of(context, BLOCK, 8) * 8 >= late.features.sum_kv / 2 + BLOCK


def test_sequences_of_a_decode_step_differ_as_those_of_a_server_and_have_the_mean_asked_for(forward: Forward) -> None:
    assert sorted(uneven(Shape(5, 4, 40), BLOCK, 200)) == [20, 32, 40, 48, 60]
    assert sorted(uneven(Shape(4, 4, 40), BLOCK, 48)) == [32, 36, 44, 48]  # no context is beyond the longest
    assert uneven(Shape(3, 4, 40), BLOCK, 40).tolist() == [40, 40, 40]
    assert uneven(Shape(1, 4, 40), BLOCK, 200).tolist() == [40]
    found = measure(forward, Shape(5, 4, 40), BLOCK, 5, max_context=200)
    assert len(found.latency) == 5
    assert (found.features.tokens, found.features.batch) == (20, 5)
    assert 5 * 40 <= found.features.sum_kv <= 5 * (40 + 3 * BLOCK)


@pytest.mark.parametrize("shape", [Shape(1, 0, 8), Shape(4, 0, 24)])
def test_a_prefill_has_the_prompts_asked_for(forward: Forward, shape: Shape) -> None:
    found = measure(forward, shape, BLOCK, 3)
    assert len(found.latency) == 3
    assert found.features == features_of(shape, BLOCK)


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_that_evict_say_what_they_planned_and_what_was_left(batch: int) -> None:
    config = replace(SMALL, block_length=16)
    forward = Forward(random_model(config, "cpu", torch.float32), PagedCache(config, 40, 16, "cpu", torch.float32))
    found = measure_evicting(forward, batch, 16, 16, 6)
    assert 3 <= len(found) <= 6
    for planned, left, latency in found:
        assert (planned.batch, planned.prefill_tokens) == (batch, 0)
        assert batch * 2 <= left.tokens < planned.tokens <= batch * 16
        assert left.sum_q_kv < planned.sum_q_kv
        assert left.sum_kv <= planned.sum_kv
        assert left.head_rows == left.sampled_rows == left.tokens
        assert latency > 0


def test_the_shapes_cover_every_axis_within_what_fits() -> None:
    found = shapes(block=4, most_batch=12, most_tokens=40, most_context=100, page=8, num_pages=150)
    assert {s.batch for s in found} == {1, 2, 3, 4, 6, 8, 12}
    assert {s.window for s in found} == {0, 1, 2, 3, 4}
    assert {s.context for s in found} == {4, 8, 12, 16, 24, 32, 48, 64, 96, 100}
    assert all(s.context % 4 == 0 and s.tokens <= 40 for s in found)
    assert all(s.batch * pages_of(s.context, 4, 8) <= 150 for s in found)
    assert [s.tokens for s in found] == sorted(s.tokens for s in found)
    assert len(set(found)) == len(found)


def test_every_level_has_a_decode_step_and_a_prefill_of_its_size() -> None:
    found = level_shapes(4, most_batch=12, most_tokens=40, most_context=20, tokens=[1, 2, 4, 8, 16, 24, 32, 40, 48])
    assert [(s.batch, s.window, s.context) for s in found] == [
        (1, 1, 4), (1, 2, 4), (1, 0, 4), (1, 4, 4), (1, 0, 8), (2, 4, 4), (1, 0, 16), (4, 4, 4), (2, 0, 12), (6, 4, 4),
        (2, 0, 16), (8, 4, 4), (2, 0, 20), (10, 4, 4),
    ]  # fmt: skip


def test_a_cache_is_filled_with_a_text_s_keys_and_values_in_their_order(forward: Forward) -> None:
    asked: list[int] = []

    def text(request: int, length: int) -> Any:
        asked.append(length)
        return np.arange(length, dtype=np.int32) * 5 % 60

    cache = PagedCache(SMALL, 11, 8, "cpu", torch.float32)
    fill_with_text(Forward(forward.model, cache), text, 30)
    assert set(asked) == {24}  # whole pages
    alone = PagedCache(SMALL, 3, 8, "cpu", torch.float32)
    measure(Forward(forward.model, alone), Shape(1, 0, 24), BLOCK, 1, text)
    for page in range(11):
        assert torch.equal(cache.keys[:, page], alone.keys[:, page % 3])
        assert torch.equal(cache.values[:, page], alone.values[:, page % 3])
    assert cache.num_free == 11
