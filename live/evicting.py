"""FOCUS's forward: of all rows the first layer and the second one's keys; of those that it retains, the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.errors import PolicyError
from ..engine.policies.focus import Focus
from ..engine.policy import Policy
from ..kernels.compact import compact
from ..kernels.focus_importance import focus_importance
from ..kernels.focus_select import focus_select
from .model import Decoder, Layer

Array = npt.NDArray[np.int64]
Inputs = dict[str, Tensor]  # a batch's arrays on the device, by their names


def check_evicts(policy: Policy) -> None:
    """PolicyError where a policy evicts by importance otherwise than FOCUS does."""
    if policy.eviction.by_importance and not isinstance(policy.eviction, Focus):
        kind = type(policy.eviction).__name__
        raise PolicyError(f"{policy.name}: dsim live cannot evict as {kind} does: expected a kind of Focus")


@dataclass(frozen=True, slots=True, eq=False)
class Evict:
    """What FOCUS goes by in a batch of decode rows, each of them sampled (focus.md 3.4)."""

    rule: Focus
    masked: Array  # [M], the rows that are masks, ascending
    masked_start: Array  # [sequences + 1], where each sequence's begin among them
    cells: Array  # [rows], the row's place in the batch's `listed`: sequence x width + column
    num_decoded: npt.NDArray[np.int32]  # [sequences]
    num_steps: npt.NDArray[np.int32]  # [sequences]
    progress: Array  # [sequences], absolute: the rightmost position that went through all layers, or what lies before
    forced: npt.NDArray[np.bool_] | None = None  # [rows], which go on whatever the rule says


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """What a forward that evicts has to say, all of it on the device."""

    hidden: Tensor  # [R, hidden], normed
    rows: Tensor  # [R], which of the batch's they are
    delta: Tensor  # [M], the masks' importance in the second layer less that in the first


def forward_evicting(
    model: Decoder,
    inputs: Inputs,
    evict: Evict,
    keep: Callable[[int, Tensor, Tensor, Inputs], None],
    attend: Callable[[int, Tensor, Inputs], Tensor],
) -> Retained:
    """`Decoder.forward` with an eviction between the second layer's projections and its attention (focus.md 3.2).

    keep(layer, k, v, rows) writes keys and values where `rows` has its places; attend(layer, q, rows) is what queries
    read, of the keys that `rows` lists. The host waits once, for the number of rows retained: what they see is worked
    out on the device.
    """
    first, second, *others = cast(list[Layer], list(model.layers))
    x, cos, sin = model.enter(inputs["tokens"], inputs["positions"])

    x, q, k, v = first.project(x, cos, sin)
    before = _importance(q, k, inputs)
    keep(0, k, v, inputs)
    x, added = first.finish(x, attend(0, q, inputs))

    x, q, k, v = second.project(x, cos, sin, added)
    after = _importance(q, k, inputs)
    # Of evicted rows too: some are seen later, by layers that need not be the first.
    keep(1, k, v, inputs)
    retained = _select(before, after, inputs, evict.rule)
    start, rows, (x, q, cos, sin, positions, places) = compact(
        retained, inputs["query_start"], x, q, cos, sin, inputs["positions"], inputs["places"], check=False
    )
    left = inputs | {"query_start": start, "positions": positions, "places": places}
    seen = _listed(inputs["listed"], inputs["cells"], retained, evict.rule.visible == "listed")
    if evict.rule.second_layer_sees == "retained":
        left["listed"] = seen
    x, added = second.finish(x, attend(1, q, left))

    left["listed"] = seen
    for layer in others:
        x, q, k, v = layer.project(x, cos, sin, added)
        keep(layer.index, k, v, left)
        x, added = layer.finish(x, attend(layer.index, q, left))
    return Retained(model.leave(x, added), rows, after - before)


def _importance(q: Tensor, k: Tensor, inputs: Inputs) -> Tensor:
    return focus_importance(q, k, inputs["masked"], inputs["masked_start"], check=False)


def _select(before: Tensor, after: Tensor, inputs: Inputs, rule: Focus) -> Tensor:
    """Which rows go on. Where they are forced the rule's choice is made all the same: it takes its time."""
    retained, _ = focus_select(
        before, after, inputs["masked"], inputs["masked_start"], inputs["positions"], inputs["num_decoded"],
        inputs["num_steps"], inputs["progress"], rule.alpha, sample_deviation=rule.sample_deviation, check=False,
    )  # fmt: skip
    return inputs.get("forced", retained)


def _listed(listed: Tensor, cells: Tensor, retained: Tensor, by_list: bool) -> Tensor:
    """`engine.block.visible` on the device: the block's keys that are there once rows are gone, [sequences, width].

    by_list: those of before without the evicted. Otherwise all up to the last retained.
    """
    there = listed.clone() if by_list else torch.zeros_like(listed)
    there.view(-1)[cells] = retained
    return there if by_list else there.flip(1).cumsum(1).flip(1) > 0
