"""FOCUS's forward: all rows up to the second layer's keys, then retained rows alone.

The rule runs on the host (engine/policies/focus.py), which waits for importance once a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..engine.policies.focus import Focus
from ..kernels.focus_importance import focus_importance
from .model import Decoder, Layer, Pages

if TYPE_CHECKING:
    from .forward import Batch

Array = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Inputs = dict[str, Tensor]  # a batch on the device


@dataclass(frozen=True, slots=True, eq=False)
class Evict:
    """FOCUS's choice among decode rows, all sampled (focus.md 3.4)."""

    rule: Focus
    masked: Array  # [M], rows that are masks, ascending
    masked_start: Array  # [sequences + 1]
    retain: Callable[[Floats], Bools]  # masks' growth of importance [M] -> retained [rows]


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """Rows after the second layer's projections."""

    x: Tensor  # [rows, hidden], before the second attention
    q: Tensor  # [rows, heads, head_dim]
    cos: Tensor  # [rows, head_dim / 2]
    sin: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """A batch's retained rows, on the host."""

    rows: Array  # [R], in the batch
    positions: Array  # [R]
    places: Array  # [R]
    query_start: Array  # [sequences + 1]
    visible: Bools  # [sequences, width], visible keys of the block

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in Retained.__slots__}


Attend = Callable[[int, Tensor, Inputs], Tensor]
PagesOf = Callable[[int, Inputs], Pages]


def through_two(model: Decoder, inputs: Inputs, pages: PagesOf, attend: Attend) -> tuple[Half, Tensor]:
    """`Decoder.forward` up to the second layer's projections, and each mask's growth of importance (focus.md 3.2).

    attend(layer, q, inputs) is attention. KV of all rows is written: later layers may see evicted ones.
    """
    first, second = cast(list[Layer], list(model.layers))[:2]
    x, cos, sin = model.enter(inputs["tokens"], inputs["positions"])
    x, q, before = _scored(first, inputs, pages, x, cos, sin)
    x, added = first.finish(x, attend(0, q, inputs))
    x, q, after = _scored(second, inputs, pages, x, cos, sin, added)
    return Half(x, q, cos, sin), after - before


def _scored(
    layer: Layer, inputs: Inputs, pages: PagesOf, x: Tensor, cos: Tensor, sin: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's stream, queries and importance of masks."""
    target = pages(layer.index, inputs)
    x, q = layer.project_to(target, x, cos, sin, added)
    k = target.keys.flatten(0, 1)[target.slots]
    return x, q, focus_importance(q, k, inputs["masked"], inputs["masked_start"])


def keep(batch: "Batch", growth: Floats) -> Retained:
    """A batch's retained rows, from its masks' growth of importance [M]."""
    assert batch.evict is not None
    retained = batch.evict.retain(growth)
    sequence = np.repeat(np.arange(len(batch.history)), np.diff(batch.query_start))
    cells = sequence, batch.positions - batch.history[sequence]
    rows = np.flatnonzero(retained)
    starts = np.concatenate([[0], np.cumsum(retained)])[batch.query_start]
    visible = _visible_keys(batch.listed, cells, retained, batch.evict.rule.visible)
    return Retained(rows, batch.positions[rows], batch.places[rows], starts, visible)


def _visible_keys(listed: Bools, cells: tuple[Array, Array], retained: Bools, visible: str) -> Bools:
    """`visible` (engine/rows/blocks.py) after an eviction, [sequences, width].

    Without evicted keys if listed; otherwise up to the last retained one.
    """
    if visible == "listed":
        keys = listed.copy()
        keys[cells] = retained
        return keys
    keys = np.zeros_like(listed)
    keys[cells] = retained
    prefix: Bools = np.logical_or.accumulate(keys[:, ::-1], axis=1)[:, ::-1]
    return prefix


def finish_rows(model: Decoder, half: Half, inputs: Inputs, retained: Inputs, pages: PagesOf, attend: Attend) -> Tensor:
    """Normed final hidden states of the retained rows, [R, hidden]. retained: on the device."""
    _, second, *layers = cast(list[Layer], list(model.layers))
    x, q, cos, sin = (rows[retained["rows"]] for rows in (half.x, half.q, half.cos, half.sin))
    remaining = inputs | {name: retained[name] for name in ("query_start", "positions", "places")}
    remaining["listed"] = retained["visible"]
    x, added = second.finish(x, attend(1, q, remaining))
    for layer in layers:
        x, q = layer.project_to(pages(layer.index, remaining), x, cos, sin, added)
        x, added = layer.finish(x, attend(layer.index, q, remaining))
    return model.leave(x, added)
