"""A step of the live executor that evicts, by the Triton kernels, says what it says by the references."""

import numpy as np
import pytest
import torch

from dsim.engine.policies.focus import Focus
from dsim.kernels import taken, use
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.evicting import Evict
from dsim.live.forward import Batch, Forward
from dsim.live.weights import random_model

WIDE = ModelConfig("wide", 3, 128, 4, 2, 64, 96, 131, 256, 8, 130)
CALLS = {
    "ragged_paged_attention": 2 * WIDE.layers, "kv_scatter": 2 * WIDE.layers, "focus_importance": 2, "focus_select": 1,
    "compact": 1,
}  # fmt: skip


def batches() -> list[Batch]:
    """The prefill of two prompts of 8 and 16 tokens, and a step on the block after each that may evict."""
    chance = np.random.default_rng(1)
    history = np.array([8, 16])
    table = np.array([[3, -1], [0, 2]], np.int32)
    masked = [np.array([1, 2, 4, 5, 6, 7]), np.array([0, 3, 4, 5])]
    made = []
    for windows in ([np.arange(8), np.arange(16)], [8 + np.array([0, 1, 2, 4, 5, 6, 7]), 16 + np.arange(6)]):
        rows = np.repeat(np.arange(2), [len(w) for w in windows])
        positions = np.concatenate(windows)
        columns = positions - history[rows]
        listed = np.zeros((2, 8), np.bool_)
        evict = None
        if made:
            listed[rows, columns] = True
            is_mask = np.array([c in masked[r] for r, c in zip(rows, columns, strict=True)])
            num = np.array([len(m) for m in masked])
            evict = Evict(
                Focus(visible="listed", alpha=1.0), np.flatnonzero(is_mask), np.concatenate([[0], num.cumsum()]),
                rows * 8 + columns, np.array([0, 4], np.int32), np.array([0, 2], np.int32), history + 7,
            )  # fmt: skip
        made.append(
            Batch(
                chance.integers(0, 130, len(rows)), positions,
                table[rows, positions // 16].astype(np.int64) * 16 + positions % 16,
                np.concatenate([[0], np.bincount(rows).cumsum()]), table, history, listed, 8, np.arange(len(rows)),
                evict,
            )
        )  # fmt: skip
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/live/test_focus.py says it of the GPU")
def test_a_step_that_evicts_by_the_kernels_says_what_one_by_the_references_says() -> None:
    model = random_model(WIDE, "cpu", torch.float32, seed=1)
    said = {}
    for path in ("reference", "triton"):
        forward = Forward(model, PagedCache(WIDE, 4, 16, "cpu", torch.float32))
        before = taken.copy()
        with use(path):  # type: ignore[arg-type]
            out = [forward.run(batch) for batch in batches()][-1]
        now = taken - before
        assert {o: now[o, path] for o in CALLS} == CALLS  # type: ignore[index]
        assert {taken_path for _, taken_path in now} == {path}
        said[path] = (out, forward.cache.keys.numpy())
    (found, keys), (expected, wanted) = said["triton"], said["reference"]
    assert expected.rows is not None
    assert found.rows is not None
    assert found.rows.tolist() == expected.rows.tolist()
    assert len(found.rows) < 13
    np.testing.assert_allclose(found.confidence, expected.confidence, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(keys, wanted, rtol=1e-4, atol=1e-5)
