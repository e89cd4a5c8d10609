"""Measured steps: features and latency. A point is the median of a shape's repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..engine.errors import ProfileError
from ..engine.latency import Features
from ..engine.step import Phase

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FEATURES = Features._fields
# By phase, tokens and batch: a latency model is judged and doubted by kind.
SMALL_DECODE = 256  # tokens
SMALL_BATCH = 8  # sequences
KINDS_OF_STEPS = tuple(
    f"{phase} ({batch})"
    for phase in ("prefills", f"decode steps up to {SMALL_DECODE} tokens", f"decode steps above {SMALL_DECODE} tokens")
    for batch in ("1 sequence", f"2 to {SMALL_BATCH} sequences", f"more than {SMALL_BATCH} sequences")
)


@dataclass(frozen=True, eq=False)
class Points:
    """Steps as columns."""

    features: Floats  # [steps, features], columns as in Features
    latency: Floats  # s, host time included
    device: Floats  # s between the device's first and last work; NaN: not measured

    def column(self, name: str) -> Floats:
        """A feature's column, by its name in Features."""
        return self.features[:, FEATURES.index(name)]

    def __len__(self) -> int:
        return len(self.latency)

    def __getitem__(self, keep: "Bools | Ints | slice") -> Self:
        return type(self)(*(getattr(self, f.name)[keep] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Samples(Points):
    """Measured steps, in order."""

    group: Ints  # equal for repeats of a shape


def samples(
    features: Sequence[Features] | Floats, latency: npt.ArrayLike, device: npt.ArrayLike | None = None
) -> Samples:
    """Measured steps in order; equal features are repeats of one shape."""
    table = np.asarray(features, np.float64).reshape(-1, len(FEATURES))
    latencies = np.asarray(latency, np.float64).reshape(-1)
    within = np.full(len(latencies), np.nan) if device is None else np.asarray(device, np.float64).reshape(-1)
    if not len(table) == len(latencies) == len(within):
        raise ProfileError(f"{len(table)} steps have {len(latencies)} latencies and {len(within)} device times")
    for name, values in (("latency", latencies), ("device", np.where(np.isnan(within), 1.0, within))):
        bad = np.flatnonzero(~((values > 0) & (values < np.inf)))
        if len(bad):
            raise ProfileError(f"step {bad[0]}: {name} is {values[bad[0]]:g} s, expected more than 0")
    _, group = np.unique(table, axis=0, return_inverse=True)
    return Samples(table, latencies, within, group.reshape(-1))


def joined(*parts: Points) -> Points:
    """One after the other."""
    return Points(*(np.concatenate([getattr(piece, f.name) for piece in parts]) for f in fields(Points)))


def step_features(steps: Mapping[str, Any], lists: Mapping[str, Any], mixed: bool) -> list[Features]:
    """The features of a journal's steps; mixed: a step may prefill some of its rows, which their phases tell."""
    prefill = np.where(steps["prefill"], steps["tokens"], 0)
    if mixed:
        (tokens, offsets), (phases, _) = lists["num_tokens"], lists["phases"]
        of_rows = np.where(phases == Phase.PREFILL, tokens, 0)
        prefill = np.diff(np.concatenate([[0], np.cumsum(of_rows)])[offsets])
    columns = {**steps, "prefill_tokens": prefill}
    rows = zip(*(columns[name].tolist() for name in FEATURES), strict=True)
    return [Features(**dict(zip(FEATURES, row, strict=True))) for row in rows]


def points(steps: Samples) -> Points:
    """Step shapes in the order of their features, each the median of its repeats."""
    order = np.argsort(steps.group, kind="stable")
    ends = np.flatnonzero(np.diff(steps.group[order], append=-1)) + 1
    groups = np.split(order, ends[:-1]) if len(order) else []
    first = [g[0] for g in groups]
    latency, device = (np.array([np.median(column[g]) for g in groups]) for column in (steps.latency, steps.device))
    return Points(steps.features[first].reshape(-1, len(FEATURES)), latency, device)


def kinds_of(prefill: Bools, tokens: npt.NDArray[Any], batch: npt.NDArray[Any]) -> Ints:
    """Each step's place in KINDS_OF_STEPS."""
    phase = np.where(prefill, 0, 1 + (tokens > SMALL_DECODE))
    return np.asarray(3 * phase + (batch > 1) + (batch > SMALL_BATCH), np.int64)
