"""FOCUS's forward: all rows up to the second layer's keys, then retained rows alone."""

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
from ..kernels.focus_select import Masks, focus_select
from .model import Decoder, Layer, Pages

Array = npt.NDArray[np.int64]
Inputs = dict[str, Tensor]  # a batch on the device


def check_evicts(policy: Policy) -> None:
    """PolicyError if a policy evicts by importance, not as FOCUS."""
    if policy.eviction.by_importance and not isinstance(policy.eviction, Focus):
        kind = type(policy.eviction).__name__
        raise PolicyError(f"{policy.name}: dsim live cannot evict as {kind} does: expected a kind of Focus")


@dataclass(frozen=True, slots=True, eq=False)
class Evict:
    """Input of FOCUS's choice among decode rows, all sampled (focus.md 3.4)."""

    rule: Focus
    masked: Array  # [M], rows that are masks, ascending
    masked_start: Array  # [sequences + 1]
    cells: Array  # [rows], place in `listed`: sequence x width + column
    num_decoded: npt.NDArray[np.int32]  # [sequences]
    num_steps: npt.NDArray[np.int32]  # [sequences]
    progress: Array  # [sequences], absolute: rightmost through all layers, or block start - 1
    forced: npt.NDArray[np.bool_] | None = None  # [rows], retained in place of the rule's choice
    there: npt.NDArray[np.bool_] | None = None  # [rows], False: padding


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """After the second layer's projections and the choice of rows."""

    x: Tensor  # [rows, hidden], before the second attention
    q: Tensor  # [rows, heads, head_dim]
    cos: Tensor  # [rows, head_dim / 2]
    sin: Tensor
    retained: Tensor  # [rows] bool
    delta: Tensor  # [M], importance, second layer minus first


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """The retained rows, packed."""

    x: Tensor  # [R, hidden]; so the next five, [R, ..]
    q: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    places: Tensor
    rows: Tensor  # [R], in the batch
    start: Tensor  # [sequences + 1]
    seen: Tensor  # [sequences, width] bool, visible keys of the block


Keep = Callable[[int, Tensor, Tensor, Inputs], None]
Attend = Callable[[int, Tensor, Inputs], Tensor]


def choose_rows(model: Decoder, inputs: Inputs, rule: Focus, keep: Keep, attend: Attend) -> Chosen:
    """`Decoder.forward` up to the second layer's projections, and the choice of rows (focus.md 3.2).

    keep(layer, k, v, inputs) writes KV; attend(layer, q, inputs) is attention.
    """
    first, second = cast(list[Layer], list(model.layers))[:2]
    x, cos, sin = model.enter(inputs["tokens"], inputs["positions"])
    x, q, k, v = first.project(x, cos, sin)
    before = _importance(q, k, inputs)
    keep(0, k, v, inputs)
    x, added = first.finish(x, attend(0, q, inputs))
    x, q, k, v = second.project(x, cos, sin, added)
    after = _importance(q, k, inputs)
    # Evicted rows, too: later layers may see them.
    keep(1, k, v, inputs)
    return Chosen(x, q, cos, sin, _select(before, after, inputs, rule), after - before)


def gather(chosen: Chosen, inputs: Inputs, rule: Focus, num_retained: int | None = None) -> Retained:
    """Pack the retained rows; num_retained None: the host waits for it."""
    start, rows, (x, q, cos, sin, positions, places) = compact(
        chosen.retained, inputs["query_start"], chosen.x, chosen.q, chosen.cos, chosen.sin, inputs["positions"],
        inputs["places"], num_retained=num_retained, check=False,
    )  # fmt: skip
    seen = _listed(inputs["listed"], inputs["cells"], chosen.retained, rule.visible == "listed")
    return Retained(x, q, cos, sin, positions, places, rows, start, seen)


def finish_rows(
    model: Decoder, kept: Retained, inputs: Inputs, rule: Focus, pages: Callable[[int, Inputs], Pages], attend: Attend
) -> Tensor:
    """Normed final hidden states, [R, hidden]."""
    _, second, *others = cast(list[Layer], list(model.layers))
    left = inputs | {"query_start": kept.start, "positions": kept.positions, "places": kept.places}
    if rule.second_layer_sees == "retained":
        left["listed"] = kept.seen
    x, added = second.finish(kept.x, attend(1, kept.q, left))
    left["listed"] = kept.seen
    for layer in others:
        x, q = layer.project_to(pages(layer.index, left), x, kept.cos, kept.sin, added)
        x, added = layer.finish(x, attend(layer.index, q, left))
    return model.leave(x, added)


def _importance(q: Tensor, k: Tensor, inputs: Inputs) -> Tensor:
    return focus_importance(q, k, inputs["masked"], inputs["masked_start"], check=False)


def _select(before: Tensor, after: Tensor, inputs: Inputs, rule: Focus) -> Tensor:
    """Retained rows; `forced` replaces the rule's choice, still made for its time."""
    masks = Masks(*(inputs[name] for name in Masks._fields))
    retained, _ = focus_select(before, after, masks, rule.alpha, sample_deviation=rule.sample_deviation, check=False)
    retained = inputs.get("forced", retained)
    return retained & inputs["there"] if "there" in inputs else retained


def _listed(listed: Tensor, cells: Tensor, retained: Tensor, by_list: bool) -> Tensor:
    """`visible` (engine/rows/blocks.py) on the device, after an eviction, [sequences, width].

    by_list: without evicted keys; otherwise up to the last retained one.
    """
    there = listed.clone() if by_list else torch.zeros_like(listed)
    there.view(-1)[cells] = retained
    return there if by_list else there.flip(1).cumsum(1).flip(1) > 0
