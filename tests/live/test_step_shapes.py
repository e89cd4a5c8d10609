"""Steps of a wanted shape: what was measured has the shape that was asked for."""

import pytest
import torch

from dsim.benchmarks.step_shapes import Shape, measure
from dsim.engine.latency import Features
from dsim.live.cache import PagedCache
from dsim.live.forward import Forward
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


@pytest.mark.parametrize("shape", [Shape(1, 0, 8), Shape(4, 0, 24)])
def test_a_prefill_has_the_prompts_asked_for(forward: Forward, shape: Shape) -> None:
    found = measure(forward, shape, BLOCK, 3)
    assert len(found.latency) == 3
    assert found.features == features_of(shape, BLOCK)
