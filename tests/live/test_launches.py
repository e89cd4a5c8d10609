"""What a step launches, and the bytes that it moves between the host and the device: held, so that neither grows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.benchmarks.counted import Launches
from dsim.live import forward as forward_module
from dsim.live.cache import PagedCache
from dsim.live.canvas_forward import CanvasCache, Turn
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import ConfigJson, Experts, Settings
from dsim.live.forward import Batch, Forward
from dsim.live.weights import random_model

from .dense import SMALL, batch_of
from .test_random_weights import GEMMA


def decode(sequences: int) -> Batch:
    """A whole block each, of four positions, behind eight keys, in pages of eight."""
    return batch_of(np.random.default_rng(0), [8] * sequences, [8 + np.arange(4)] * sequences, 4)


def launches(layers: int, batch: Batch, experts: Experts | None = None) -> Counter[str]:
    config = replace(SMALL, layers=layers, experts=experts)
    forward = Forward(random_model(config, "cpu", torch.float32), PagedCache(config, 20, 8, "cpu", torch.float32))
    return counted(lambda: forward.run(batch))


def counted(run: Callable[[], object]) -> Counter[str]:
    """What the second of two calls launches."""
    run()
    with Launches().of_kernels() as mode:
        run()
    return mode.counted


def of_canvases(layers: int, canvases: int) -> Counter[str]:
    """Launches of a step of canvases behind five tokens each."""
    text = {**GEMMA["text_config"], "num_hidden_layers": layers, "layer_types": None}
    source = ConfigJson(Path("config.json"), {**GEMMA, "text_config": text}, {}, "gemma")
    model = random_canvas_model(source, "cpu", torch.float32, 0, Settings(random_weights=True))
    cache = CanvasCache(model, (40, 40), 4, "cpu", torch.float32)
    length = model.config.canvas_length
    for slot in range(canvases):
        cache.encode({slot: torch.arange(5)})
        cache.begin(slot, np.arange(length))
    turns = {slot: Turn(0.5, np.full(length, 0.5), np.arange(length)) for slot in range(canvases)}
    return counted(lambda: cache.denoise(turns))


def test_a_step_of_canvases_launches_as_much_for_one_as_for_many() -> None:
    six, seven = (of_canvases(n, 3) for n in (6, 7))
    layer = seven - six
    kernels = {"linear": 5, "ragged_paged_attention": 1, "qk_norm_rope": 1, "grouped_experts": 1}
    assert {name: layer[name] for name in kernels} == kernels
    assert sum(layer.values()) <= 32, layer
    rest = {name: six[name] - 6 * (seven - six)[name] for name in six}
    assert sum(rest.values()) <= 50, rest
    assert rest["read_logits"] == 1
    assert of_canvases(6, 1) == six


def test_a_layer_is_four_products_attention_and_few_small_kernels() -> None:
    two, three = (launches(n, decode(3)) for n in (2, 3))
    norms = {"rms_norm": 2, "add": 2, "silu": 1, "mul": 1}
    assert three - two == {"linear": 4, "ragged_paged_attention": 1, "qk_norm_rope": 1, **norms}
    beside = {name: two[name] - 2 * (three - two)[name] for name in two}
    shown = ("linear", "rms_norm", "confidence_of_hidden", "silu")
    assert {name: beside[name] for name in shown if beside.get(name)} == {"rms_norm": 1, "confidence_of_hidden": 1}
    # Inputs of each kind, angles, the rows of the head, and the answers put together.
    assert sum(beside.values()) <= 24, beside
    assert launches(2, decode(5)) == two  # whatever the batch


def test_a_layer_with_experts_is_three_products_attention_and_a_router_before_its_experts() -> None:
    two, three = (launches(n, decode(3), Experts(8, 2, 16)) for n in (2, 3))
    norms = {"rms_norm": 2, "add": 3}
    routing = {"softmax": 1, "topk": 1, "gather": 1, "sum": 1, "div": 1, "mul": 1}
    kernels = {"linear": 3, "ragged_paged_attention": 1, "qk_norm_rope": 1, "grouped_experts": 1}
    assert three - two == kernels | norms | routing


def test_a_step_brings_one_array_there_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(random_model(SMALL, "cpu", torch.float32), PagedCache(SMALL, 20, 8, "cpu", torch.float32))
    there: list[int] = []
    flatten = forward_module.flattened
    monkeypatch.setattr(
        forward_module, "flattened", lambda arrays: (there.append(flatten(arrays)[0].nbytes), flatten(arrays))[1]
    )
    asked = decode(3)
    said = forward.run(asked)
    # 8 bytes a number: starts, histories, two pages and four columns a sequence; four numbers a row.
    assert there == [8 * (4 + 4 + 6 + 12 + 4 * 12)]
    assert (len(said.tokens), len(said.confidence)) == (12, 12)
    masks = forward.run(replace(asked, sampled=np.array([1, 6])))
    assert masks.tokens.tolist() == said.tokens[[1, 6]].tolist()
    assert there[1] == 8 * (4 + 4 + 6 + 12 + 3 * 12 + 2)
