"""The latency of a device as a staircase: one level for every size that it computes, and attention on top.

Matrix products are computed in tiles and waves of tiles, captured graphs in buckets: the layers' time rises in steps,
and an affine piece over many of them is wrong between those measured. Levels are the captured buckets and a grid of 64
tokens; the time of a level is fitted, never less than the one's below it, and those nobody measured lie on a line
between their neighbours. Attention, head and host are linear, as in pieces.py.
"""

from dataclasses import dataclass

import numpy as np

from ..engine.latency import LatencyModel
from .pieces import SHORT, Problem, Solution, _identified, _settle, digits
from .samples import Bools, Floats, Points, Samples, padded

GRID = 64  # tokens: the least tile of a large matrix product


def levels(most: float) -> Floats:
    """Tokens of the levels up to the one that holds `most`: powers of two to 64, then multiples of it."""
    small = 2.0 ** np.arange(7)
    large = GRID * np.arange(2, int(np.ceil(most / GRID)) + 1)
    found = np.append(small, large)
    return np.asarray(found[: int(np.searchsorted(found, most)) + 1], np.float64)


class Stairs(Problem):
    """Points to fit whose tokens are rounded up to their level; the `bends` are the levels where the stairs rise."""

    def __init__(
        self, fitted: Points, target: Floats, with_host: bool, graph_tokens: int = 0, share: Floats | None = None
    ) -> None:
        """share [points]: how much of the traffic each point stands for; None: all as much."""
        super().__init__(fitted, target, with_host, graph_tokens)
        if share is not None:
            self.weight = self.weight * np.sqrt(share)
            self.target = target * self.weight
        every = levels(float(self.tokens.max()))
        self.tokens = every[np.searchsorted(every, self.tokens)]

    def columns(self, bends: Floats, names: tuple[str, ...], floor: Bools) -> Floats:
        rises = (self.tokens[:, None] > bends).astype(np.float64)
        device = np.column_stack([self.forwards, self.forwards[:, None] * rises])
        device[floor] = 0.0
        others = [self.linear[name] * (1.0 if name == "host_request" else ~floor) for name in names]
        table: Floats = np.column_stack([device, *others, self.forwards * floor]) * self.weight[:, None]
        return table


@dataclass(frozen=True)
class StairSolution(Solution):
    """Coefficients (the first level's time, rises, names, launch)."""

    @property
    def num_coefficients(self) -> int:
        return 1 + len(self.bends) + len(self.names) + int(self.floored)

    @property
    def num_levels(self) -> int:
        return 1 + len(self.bends)

    def heights(self) -> Floats:
        """Seconds of every level, those in between on a line."""
        every, seen = levels(float(self.problem.tokens.max())), np.unique(self.problem.tokens)
        return np.interp(every, seen, np.cumsum(self.values[: 1 + len(self.bends)]))

    def model(self, host_step: float, host_request: float) -> LatencyModel:
        every, heights = levels(float(self.problem.tokens.max())), self.heights()
        knots: list[tuple[float, float]] = []
        for i, (level, height) in enumerate(zip(every.tolist(), heights.tolist(), strict=True)):
            first = every[i - 1] + 1.0 if i else 1.0
            knots += [(x, digits(height)) for x in dict.fromkeys((float(first), level))]
        # Beyond the last level, as from the half of it on.
        half = int(np.searchsorted(every, every[-1] / 2))
        slope = (heights[-1] - heights[half]) / max(1.0, every[-1] - every[half])
        return LatencyModel(
            knots=tuple(knots),
            slope=digits(slope),
            host_step=digits(host_step),
            host_request=digits(host_request),
            **self.beside_layers(),
        )

    def jacobian(self) -> Floats:
        return self.problem.columns(self.bends, self.names, self.floor())

    def standard_errors(self) -> dict[str, float]:
        """Of each coefficient; a level's are of its time, those in between have none of their own."""
        table = self.jacobian()
        norms = np.linalg.norm(table, axis=0)
        free, scale = norms > 0.0, np.where(norms > 0.0, norms, 1.0)
        inverse = np.linalg.pinv((table / scale).T @ (table / scale), rcond=1e-12)
        covariance = self.squares / max(1, len(table) - int(free.sum())) * inverse / np.outer(scale, scale)
        num, every = 1 + len(self.bends), levels(float(self.problem.tokens.max()))
        seen = np.unique(self.problem.tokens)
        stated = {}
        place = 0
        for i, level in enumerate(every.tolist()):
            place += 2 if i and level > every[i - 1] + 1 else 1
            if level in seen:
                up_to = (np.arange(table.shape[1]) <= np.searchsorted(seen, level)) & (np.arange(table.shape[1]) < num)
                stated[f"knots[{place - 1}][1]"] = up_to.astype(float)
        stated |= self.stated_beside(num, table.shape[1])
        if free[-1]:
            stated["launch"] = np.eye(table.shape[1])[-1]
        return {name: float(np.sqrt(max(0.0, v @ covariance @ v))) for name, v in stated.items()}


def climb(problem: Stairs) -> StairSolution:
    """The stairs of least squares, with a launch floor where points run into one."""
    nowhere = np.zeros(len(problem.points), np.bool_)
    names, seen = _identified(problem, nowhere), np.unique(problem.tokens)
    found = [
        StairSolution(s.problem, s.bends, s.names, s.values, s.unidentified) for s in _settle(problem, seen[:-1], names)
    ]
    best = min(found, key=lambda s: s.bic)
    missing = [name for name in problem.linear if name not in (*names, SHORT)] + ([] if best.floored else ["launch"])
    return StairSolution(best.problem, best.bends, best.names, best.values, tuple(missing))


def traffic(points: Points, journal: Samples, graph_tokens: int) -> Floats:
    """The share of a serving journal's steps on each point's level, [points], 1 on average: what a fit must get right.

    Levels that the journal never met count a tenth of the mean.
    """
    tokens = [padded(x.features, graph_tokens) for x in (points, journal)]
    mine, theirs = (table[:, 0] / table[:, 7] for table in tokens)
    every = levels(float(max(mine.max(), theirs.max())))
    at, met = (np.searchsorted(every, x) for x in (mine, theirs))
    count = np.bincount(met, minlength=len(every))[at] / np.bincount(at, minlength=len(every))[at]
    share = count / count.sum() * len(points) if count.any() else np.ones(len(points))
    found: Floats = np.maximum(share, 0.1)
    return np.asarray(found / found.mean(), np.float64)
