"""The choice between our product of experts and PyTorch's: timed, compared, and followed by the number of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsim.kernels import taken
from dsim.kernels.grouped_experts import library
from dsim.live import expert_product
from dsim.live.canvas import CanvasCache
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import Experts, ModelConfig
from dsim.live.config_file import ConfigJson, Given
from dsim.live.expert_product import ExpertProduct, Matrices, Timed, choose
from dsim.live.experts import MixedFeedForward
from dsim.live.graphs import recompute

from .test_random_weights import GEMMA

CONFIG = ModelConfig("mixed", 1, 32, 2, 1, 16, 48, 67, 128, 4, 66, experts=Experts(4, 2, 16))
pytestmark = pytest.mark.skipif(library.at_hand() is None, reason="this PyTorch has no grouped product")


def layer(dtype: torch.dtype = torch.bfloat16) -> MixedFeedForward:
    assert CONFIG.experts is not None
    found = MixedFeedForward(CONFIG, CONFIG.experts).to(dtype)
    for weight in found.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return found.requires_grad_(False)


def matrices(module: MixedFeedForward) -> Matrices:
    return Matrices(module.gate_up, module.down, module.about.top_k)


def took(module: MixedFeedForward, rows: int) -> int:
    before = taken.copy()
    module(torch.ones(rows, CONFIG.hidden, dtype=module.gate_up.dtype))
    return (taken - before)["grouped_experts", "grouped_mm"]


def test_a_layer_takes_the_one_that_was_faster_at_its_number_of_rows() -> None:
    module = layer()
    assert took(module, 9) == 0
    module.product = ExpertProduct([Timed(32, 1.0, 2.0), Timed(64, 2.0, 1.0), Timed(128, 1.0, 3.0)])
    assert [took(module, rows) for rows in (1, 32, 33, 64, 65, 999)] == [0, 0, 1, 1, 0, 0]
    assert module.product.settings["grouped_mm_at"] == [64]
    assert module.product.settings["steps"][0] == {"rows": 32, "ours_us": 1e6, "grouped_mm_us": 2e6}


@pytest.mark.parametrize("record", [None, recompute])
def test_both_are_timed_and_compared_at_every_number_of_rows(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_product, "ROWS", (2, 4, 8))
    times = iter([5.0, 4.0, 1.0, 2.0, 3.0, 3.0])  # the largest step first

    def time_of(call: Callable[[], object]) -> float:
        call()
        return next(times)

    found = choose(matrices(layer()), time_of, record)
    assert found == ExpertProduct([Timed(2, 3.0, 3.0), Timed(4, 1.0, 2.0), Timed(8, 5.0, 4.0)])
    assert [rows for rows in (1, 2, 4, 5, 8, 9) if found.takes(rows)] == [5, 8, 9]


def test_a_product_that_fails_or_differs_or_has_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(matrices(layer(torch.float32)), lambda _: 1.0).settings == {
        "refused": "experts in torch.float32, expected bf16"
    }
    plain = library.grouped_experts
    monkeypatch.setattr(library, "grouped_experts", lambda *given: 2 * plain(*given))
    refused = choose(matrices(layer()), lambda _: 1.0)
    assert refused.refused is not None
    assert "PyTorch's grouped product differs by" in refused.refused
    assert not refused.takes(64)

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(library, "grouped_experts", fails)
    assert choose(matrices(layer()), lambda _: 1.0).settings == {"refused": "no kernel image is available"}


def test_a_canvas_model_takes_it_likewise() -> None:
    given = Given(random_weights=True)
    model = random_canvas_model(ConfigJson(Path("config.json"), GEMMA, {}, "gemma"), "cpu", torch.bfloat16, 0, given)
    cache = CanvasCache(model, (9, 9), 4, "cpu", torch.bfloat16)
    cache.begin(0, np.arange(model.config.canvas_length))
    assert choose(Matrices(*model.experts(), model.config.top_k, "gelu"), lambda _: 1.0).refused is None
    for faster, took in ((False, 0), (True, len(model.config.layers))):
        model.product = ExpertProduct([Timed(8, 1.0, 0.5 if faster else 2.0)])
        before = taken.copy()
        cache.states([0])
        assert (taken - before)["grouped_experts", "grouped_mm"] == took
