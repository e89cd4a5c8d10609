"""What a step launches, and the bytes that it moves between the host and the device: held, so that neither grows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsim.live.cache import PagedCache
from dsim.live.canvas import CanvasCache, Turn
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import Experts
from dsim.live.config_file import ConfigJson, Given
from dsim.live.forward import Batch, Forward
from dsim.live.weights import random_model

from .dense import SMALL
from .test_random_weights import GEMMA

# Each kernel of ours, where the executor calls it.
OURS = {
    "forward": ("ragged_paged_attention", "confidence_of_hidden"),
    "model": ("add_rms_norm", "qk_norm_rope_scatter", "swiglu"),
    "experts": ("grouped_experts", "route_experts"),
}
OF_CANVASES = {
    "canvas": ("window_attention", "read_logits"),
    "canvas_model": (
        "add_rms_norm", "qk_norm_rope_scatter", "sandwich_norm", "swiglu", "grouped_experts", "route_experts",
    ),
}  # fmt: skip
# Of PyTorch's operations those that launch nothing.
VIEWS = (
    "view", "_unsafe_view", "slice", "t", "transpose", "unsqueeze", "expand", "detach", "alias", "split", "select",
    "split_with_sizes", "reshape", "permute", "empty", "new_empty", "_reshape_alias", "lift_fresh",
    "unbind",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts launches by their names; what one of our kernels' references computes is one launch of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and name not in VIEWS:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))

    def of_kernel(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.counted[name] += 1
            self.inside = True
            try:
                return kernel(*args, **kwargs)
            finally:
                self.inside = False

        return called


def decode(sequences: int) -> Batch:
    """A whole block each, of four positions, behind eight keys, in pages of eight."""
    row, column = np.divmod(np.arange(4 * sequences), 4)
    table = np.arange(2 * sequences, dtype=np.int32).reshape(sequences, 2)
    return Batch(
        np.full(len(row), 5), 8 + column, table[row, 1].astype(np.int64) * 8 + column, np.arange(sequences + 1) * 4,
        table, np.full(sequences, 8), np.ones((sequences, 4), np.bool_), 4, np.arange(len(row)),
    )  # fmt: skip


def launches(
    layers: int, batch: Batch, monkeypatch: pytest.MonkeyPatch, experts: Experts | None = None
) -> Counter[str]:
    config = replace(SMALL, layers=layers, experts=experts)
    forward = Forward(random_model(config, "cpu", torch.float32), PagedCache(config, 20, 8, "cpu", torch.float32))
    return counted(lambda: forward.run(batch), OURS, monkeypatch)


def counted(
    run: Callable[[], object], ours: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """What the second of two calls launches. ours: kernels, by the module that calls them."""
    run()
    with monkeypatch.context() as patch, Launches() as mode:
        for module, names in ours.items():
            for name in names:
                where = f"dsim.live.{module}.{name}"
                patch.setattr(
                    where, mode.of_kernel(name, getattr(__import__(f"dsim.live.{module}", fromlist=[name]), name))
                )
        run()
    return mode.counted


def of_canvases(layers: int, canvases: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of a step of canvases behind five tokens each."""
    text = {**GEMMA["text_config"], "num_hidden_layers": layers, "layer_types": None}
    source = ConfigJson(Path("config.json"), {**GEMMA, "text_config": text}, {}, "gemma")
    model = random_canvas_model(source, "cpu", torch.float32, 0, Given(random_weights=True))
    cache = CanvasCache(model, (40, 40), 4, "cpu", torch.float32)
    length = model.config.canvas_length
    for slot in range(canvases):
        cache.encode({slot: torch.arange(5)})
        cache.begin(slot, np.arange(length))
    turns = {slot: Turn(0.5, np.full(length, 0.5), np.arange(length)) for slot in range(canvases)}
    return counted(lambda: cache.denoise(turns), OF_CANVASES, monkeypatch)


def test_a_step_of_canvases_launches_as_much_for_one_as_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    six, seven = (of_canvases(n, 3, monkeypatch) for n in (6, 7))
    layer = seven - six
    # A CPU converts the router's input and weight: a GPU multiplies them as they are.
    assert layer.pop("to") == 2
    assert layer == {
        "linear": 5, "window_attention": 1, "sandwich_norm": 2, "qk_norm_rope_scatter": 1, "swiglu": 1,
        "route_experts": 1, "grouped_experts": 1,
    }  # fmt: skip
    rest = {name: six[name] - 6 * (seven - six)[name] for name in six}
    assert sum(rest.values()) <= 80, rest
    assert rest["read_logits"] == 1
    assert of_canvases(6, 1, monkeypatch) == six


def test_a_layer_is_four_products_attention_and_four_small_kernels_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, three = (launches(n, decode(3), monkeypatch) for n in (2, 3))
    assert three - two == {
        "linear": 4, "ragged_paged_attention": 1, "add_rms_norm": 2, "qk_norm_rope_scatter": 1, "swiglu": 1,
    }  # fmt: skip
    beside = {name: two[name] - 2 * (three - two)[name] for name in two}
    assert {name: num for name, num in beside.items() if num and name in ("linear", *sum(OURS.values(), ()))} == {
        "add_rms_norm": 1, "confidence_of_hidden": 1,
    }  # fmt: skip
    # Inputs of each kind, angles, the rows of the head, and the answers put together.
    assert sum(beside.values()) <= 24, beside
    assert launches(2, decode(5), monkeypatch) == two  # whatever the batch


def test_a_layer_with_experts_is_three_products_attention_and_three_small_kernels_and_two_of_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, three = (launches(n, decode(3), monkeypatch, Experts(8, 2, 16)) for n in (2, 3))
    layer = three - two
    # A CPU converts the router's input and weight: a GPU multiplies them as they are.
    assert layer.pop("to") == 2
    assert layer == {
        "linear": 3, "ragged_paged_attention": 1, "add_rms_norm": 2, "qk_norm_rope_scatter": 1, "route_experts": 1,
        "grouped_experts": 1,
    }  # fmt: skip


def test_a_step_brings_one_array_there_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(random_model(SMALL, "cpu", torch.float32), PagedCache(SMALL, 20, 8, "cpu", torch.float32))
    there: list[int] = []
    flatten = Forward._flatten
    monkeypatch.setattr(
        Forward, "_flatten", staticmethod(lambda b: (there.append(flatten(b)[0].nbytes), flatten(b))[1])
    )
    asked = decode(3)
    said = forward.run(asked)
    # 8 bytes a number: starts, histories, two pages and four columns a sequence; four numbers a row.
    assert there == [8 * (4 + 4 + 6 + 12 + 4 * 12)]
    assert (len(said.tokens), len(said.confidence)) == (12, 12)
    masks = forward.run(replace(asked, sampled=np.array([1, 6]), own_head=True))
    assert masks.tokens.tolist() == said.tokens[[1, 6]].tolist()
    assert there[1] == 8 * (4 + 4 + 6 + 12 + 3 * 12 + 2)
