"""FOCUS's forward: all rows up to the second layer's keys, then retained rows alone.

The rule runs on the host (engine/policies/focus.py), which waits for importance once a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..engine.policies.focus import Focus
from ..kernels.focus_importance import focus_importance
from ..kernels.qk_norm_rope import Turns
from .model import Layer

if TYPE_CHECKING:
    from .forward import Batch, Forward

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


class Half(NamedTuple):
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
    listed: Bools  # [sequences, width], visible keys of the block

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in Retained.__slots__}


def through_two(forward: "Forward", inputs: Inputs, batch: "Batch") -> tuple[Half, Tensor]:
    """All rows up to the second layer's projections, and each mask's growth of importance (focus.md 3.2).

    KV of all rows is written: later layers may see evicted ones.
    """
    first, second = forward.layers[:2]
    x, turns = forward.model.enter(inputs["tokens"], inputs["positions"])
    q, before = _scored(forward, first, inputs, x, turns)
    x = first.finish(x, forward.attend(0, q, inputs, batch))
    q, after = _scored(forward, second, inputs, x, turns)
    return Half(x, q, *turns), after - before


def _scored(forward: "Forward", layer: Layer, inputs: Inputs, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
    """A layer's queries, and the importance of masks."""
    pages = forward.pages_of(layer.index, inputs)
    q = layer.project_to(pages, x, turns)
    k = pages.keys.flatten(0, 1)[pages.slots]
    return q, focus_importance(q, k, inputs["masked"], inputs["masked_start"])


def keep(batch: "Batch", growth: Floats) -> Retained:
    """A batch's retained rows, from its masks' growth of importance [M]."""
    assert batch.evict is not None
    retained = batch.evict.retain(growth)
    sequence = np.repeat(np.arange(len(batch.history)), np.diff(batch.query_start))
    # Visible keys (engine/rows/blocks.py): without evicted ones if listed; otherwise up to the last retained one.
    is_listed = batch.evict.rule.visible == "listed"
    keys = batch.listed & is_listed
    keys[sequence, batch.positions - batch.history[sequence]] = retained
    if not is_listed:
        keys = np.logical_or.accumulate(keys[:, ::-1], axis=1)[:, ::-1]
    rows = np.flatnonzero(retained)
    starts = np.concatenate([[0], np.cumsum(retained)])[batch.query_start]
    return Retained(rows, batch.positions[rows], batch.places[rows], query_start=starts, listed=keys)


def finish_rows(forward: "Forward", half: Half, inputs: Inputs, batch: "Batch") -> Tensor:
    """Normed final hidden states of the retained rows, [R, hidden]; inputs: a batch's, with `Retained` over them."""
    x, q, cos, sin = (rows[inputs["rows"]] for rows in half)
    x = forward.layers[1].finish(x, forward.attend(1, q, inputs, batch))
    return forward.through(forward.layers[2:], x, Turns(cos, sin), inputs, batch)
