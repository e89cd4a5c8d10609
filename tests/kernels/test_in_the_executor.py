"""A whole forward of the live executor by the Triton kernels says what it says by the references."""

import numpy as np
import pytest
import torch

from dsim.kernels import taken, use
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.forward import Batch, Forward
from dsim.live.weights import random_model

WIDE = ModelConfig("wide", 2, 128, 4, 2, 64, 96, 131, 256, 4, 130)


def batch(prefill: bool) -> Batch:
    """Two sequences: prompts of 8 and 12 tokens, or scattered positions of a block after them."""
    chance = np.random.default_rng(1)
    history = np.array([8, 12])
    windows = [np.arange(8), np.arange(12)] if prefill else [8 + np.array([0, 2, 3]), np.array([13])]
    table = np.array([[3, -1], [0, 2]], np.int32)
    rows = np.repeat(np.arange(2), [len(w) for w in windows])
    positions = np.concatenate(windows)
    listed = np.zeros((2, 4), np.bool_)
    if not prefill:
        listed[0, [0, 2, 3]], listed[1, [0, 1]] = True, True
    places = table[rows, positions // 16].astype(np.int64) * 16 + positions % 16
    return Batch(
        chance.integers(0, 130, len(rows)), positions, places,
        np.concatenate([[0], np.bincount(rows).cumsum()]), table, history, listed, 4, np.arange(len(rows)),
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_gpu.py says it of the GPU")
def test_a_forward_by_the_kernels_says_what_one_by_the_references_says() -> None:
    model = random_model(WIDE, "cpu", torch.float32, seed=1)
    said = {}
    for path in ("reference", "triton"):
        forward = Forward(model, PagedCache(WIDE, 4, 16, "cpu", torch.float32))
        before = dict(taken)
        with use(path):  # type: ignore[arg-type]
            outs = [forward.run(batch(prefill)) for prefill in (True, False)]
        for operation in ("ragged_paged_attention", "kv_scatter", "qk_norm_rope", "swiglu"):
            assert taken[operation, path] - before.get((operation, path), 0) == 2 * WIDE.layers  # type: ignore[index]
        said[path] = [(out.tokens, out.confidence) for out in outs]
        said[path].append((forward.cache.keys.numpy(), forward.cache.values.numpy()))
    for (tokens, confidence), (theirs, wanted) in zip(said["triton"], said["reference"], strict=True):
        np.testing.assert_allclose(tokens, theirs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(confidence, wanted, rtol=1e-4, atol=1e-5)
