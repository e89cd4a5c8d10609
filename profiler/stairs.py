"""A device's latency as a staircase: a time for every size that it computes, plus attention.

Matrix products run in tiles and waves, captured graphs in buckets: the layers' time rises in steps. One table holds
captured steps by bucket, another all others on a grid of 64 tokens. Levels never fall within a table; unmeasured ones
are interpolated. Head, sequences and attention are added; attention takes the larger of its pairs' and its keys' time,
with own terms for prompts, whose keys are read sequentially.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engine.latency import LatencyModel
from .pieces import SHORT, Problem, Solution, _identified, _settle, _solve
from .profile import rounded
from .samples import Bools, Floats, Points, buckets, sequences

GRID = 64  # tokens: the smallest tile of a large matrix product


def levels(largest: float) -> Floats:
    """Tokens of the levels up to the one that holds `largest`: powers of two to 64, then multiples of 64."""
    small = 2.0 ** np.arange(7)
    large = GRID * np.arange(2, int(np.ceil(largest / GRID)) + 1)
    every = np.append(small, large)
    return np.asarray(every[: int(np.searchsorted(every, largest)) + 1], np.float64)


CAPTURED = 1e9  # offset of captured steps on the tables' common axis
CUTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # initial shares of points whose keys set attention's time
ROUNDS = 8


class Stairs(Problem):
    """Points to fit with tokens rounded up to their level; `bends` are the levels where the stairs rise.

    level: a point's level on the tables' common axis. by_pairs [points]: pairs, not keys, set attention's time.
    """

    def __init__(self, fitted: Points, with_host: bool, graph_tokens: int = 0, by_pairs: Bools | None = None) -> None:
        super().__init__(fitted, with_host, graph_tokens)
        every = levels(float(self.tokens.max()))
        self.tokens = every[np.searchsorted(every, self.tokens)]
        self.level = self.tokens + CAPTURED * self.captured
        self.linear.pop(SHORT, None)
        pairs, keys = (fitted.column(name) for name in ("sum_q_kv", "sum_kv"))
        self.dense = fitted.column("prefill_tokens") == fitted.column("tokens")
        self.by_pairs = np.ones(len(fitted), np.bool_) if by_pairs is None else by_pairs
        for kind, prefix in ((~self.dense, ""), (self.dense, "prompt_")):
            self.linear[f"{prefix}attention"] = pairs * (kind & self.by_pairs)
            self.linear[f"{prefix}kv_read"] = keys * (kind & ~self.by_pairs)
        if not with_host:  # otherwise host_request covers it
            self.linear["sequence"] = sequences(fitted.features, graph_tokens)

    def _layers(self, bends: Floats) -> tuple[Floats, Floats]:
        rises = (self.level[:, None] > bends) & (self.captured[:, None] == (bends >= CAPTURED))
        return self.forwards * ~self.captured, self.forwards[:, None] * rises

    def rises(self) -> Floats:
        """Per table, the levels below each measured one but the first; captured ones start at 0."""
        eager, graphs = (np.unique(self.tokens[rows]) for rows in (~self.captured, self.captured))
        return np.concatenate([eager[:-1], CAPTURED + np.append(0.0, graphs[:-1])[: len(graphs)]])


@dataclass(frozen=True)
class StairSolution(Solution):
    """Coefficients: the first level's time, rises, names, launch."""

    problem: Stairs

    @property
    def num_coefficients(self) -> int:
        return self.num_levels + len(self.names) + int(self.floored)

    @property
    def num_levels(self) -> int:
        return len(np.unique(self.problem.level))

    def sums(self, graphs: bool) -> tuple[Floats, Floats]:
        """A table's measured levels, and the coefficients that sum to each [levels, coefficients]."""
        of_table = np.append(~graphs, (self.bends >= CAPTURED) == graphs)
        measured = np.unique(self.problem.tokens[self.problem.captured == graphs])
        behind = np.append(-1.0, self.bends - CAPTURED * (self.bends >= CAPTURED))
        table = np.zeros((len(measured), len(self.values)))
        table[:, : len(of_table)] = of_table & (behind < measured[:, None])
        return measured, table

    def table(self, graphs: bool) -> tuple[Floats, Floats]:
        """All levels of a table up to the largest measured one, and their seconds."""
        measured, sums = self.sums(graphs)
        every = levels(float(measured.max()))
        if graphs:
            every = every[buckets(every) == every]
        return every, np.interp(every, measured, sums @ self.values)

    def model(self, **host: float) -> LatencyModel:
        captured = self.problem.captured
        every, heights = self.table(graphs=bool(captured.all()))
        knots: list[tuple[float, float]] = []
        for i, (level, height) in enumerate(zip(every.tolist(), heights.tolist(), strict=True)):
            first = every[i - 1] + 1.0 if i else 1.0
            knots += [(x, height) for x in dict.fromkeys((float(first), level))]
        # Beyond the last level, continue the slope of the upper half.
        half = int(np.searchsorted(every, every[-1] / 2))
        slope = (heights[-1] - heights[half]) / max(1.0, every[-1] - every[half])
        graph_knots = zip(*self.table(graphs=True), strict=True) if captured.any() else ()
        terms: dict[str, Any] = dict.fromkeys(TERMS, 0.0) | self.coefficients() | host
        return rounded(
            LatencyModel(
                knots=tuple(knots), slope=slope, graph_tokens=self.problem.graph_tokens, larger=True,
                graph_knots=tuple(graph_knots), **terms,
            )
        )  # fmt: skip

    def jacobian(self) -> Floats:
        return self.problem.columns(self.bends, self.names, self.floor)

    def stated(self, size: int) -> dict[str, Floats]:
        """Profile coefficients except launch; of levels only measured ones."""
        stated: dict[str, Floats] = {}
        for name, graphs in (("knots", False), ("graph_knots", True)):
            if not (self.problem.captured == graphs).any():
                continue
            knots = [x for x, _ in getattr(self.model(), name)]
            for level, sums in zip(*self.sums(graphs), strict=True):
                stated[f"{name}[{knots.index(level)}][1]"] = sums
        num = 1 + len(self.bends)
        return stated | {name: np.eye(size)[num + i] for i, name in enumerate(self.names)}


TERMS = ("attention", "kv_read", "prompt_attention", "prompt_kv_read", "sequence", "head", "sample")


def climb(problem: Stairs) -> StairSolution:
    """The least-squares stairs, with a launch floor if points are on it."""
    problem = _bound(problem)
    nowhere = np.zeros(len(problem.points), np.bool_)
    names = _identified(problem, nowhere)
    settled = _settle(problem, problem.rises(), names)
    solutions = [StairSolution(problem, s.bends, s.names, s.values, s.unidentified) for s in settled]
    best = min(solutions, key=lambda s: s.bic)
    missing = [name for name in problem.linear if name not in names] + ([] if best.floored else ["launch"])
    return replace(best, unidentified=tuple(missing))


def _bound(problem: Stairs) -> Stairs:
    """Choose each point's attention, the longer of pairs and keys, by alternation."""
    nowhere, bends = np.zeros(len(problem.points), np.bool_), problem.rises()
    pairs, keys = (problem.points.column(name) for name in ("sum_q_kv", "sum_kv"))
    ratio = pairs / np.maximum(keys, 1.0)
    best, least = problem, np.inf
    for cut in CUTS:
        by_pairs = np.ones(len(ratio), np.bool_)
        for kind in (problem.dense, ~problem.dense):
            if kind.any():
                by_pairs[kind] = ratio[kind] >= np.quantile(ratio[kind], cut) if cut < 1.0 else False
        for _ in range(ROUNDS):
            now = Stairs(problem.points, problem.with_host, problem.graph_tokens, by_pairs)
            names = _identified(now, nowhere)
            values = _solve(now, bends, names, nowhere)
            squares = float(((now.columns(bends, names, nowhere) @ values - now.target) ** 2).sum())
            if squares < least:
                best, least = now, squares
            coefficients = dict(zip(names, values[1 + len(bends) : -1].tolist(), strict=True))
            a, k = (
                np.where(problem.dense, coefficients.get(f"prompt_{name}", 0.0), coefficients.get(name, 0.0))
                for name in ("attention", "kv_read")
            )
            again = a * pairs >= k * keys
            if (again == by_pairs).all():
                break
            by_pairs = again
    return best
