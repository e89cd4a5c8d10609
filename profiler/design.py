"""Choose the step shapes to measure next: those whose latency the fit is least sure of.

The fit is linearised and gets more bends than were found, in case one was missed. Each coefficient has a wide prior, so
that what no step has shown counts as unsure. A chosen shape counts as measured for the next choice, which spreads them.
Captured graphs of one bucket count as the same shape.
"""

from collections.abc import Sequence

import numpy as np

from ..engine.latency import Features
from .fit import MIN_POINTS
from .pieces import Problem, Solution, search
from .samples import FEATURES, Floats, Points, Samples, points

BENDS = 6  # further ones, at equal ratios of tokens
PRIOR = 1.0  # standard deviation of what a coefficient adds to the typical shape, relative to its latency
LEAST_NOISE = 0.005


def next_shapes(candidates: Sequence[Features], taken: Samples, num: int, graph_tokens: int = 0) -> list[int]:
    """Indices of `num` candidates to measure next, the most informative first; measured ones are left out.

    Decode steps of at most `graph_tokens` are captured graphs.
    """
    measured = {tuple(row) for row in taken.features.tolist()}
    left = [i for i, shape in enumerate(candidates) if tuple(map(float, shape)) not in measured]
    if not left:
        return []
    table = np.array([candidates[i] for i in left], np.float64).reshape(-1, len(FEATURES))
    seen = points(taken)
    if len(seen) < MIN_POINTS:
        order = np.lexsort(table.T[::-1])
        spread = np.linspace(0, len(order) - 1, min(num, len(order))).round().astype(int)
        return [left[order[i]] for i in dict.fromkeys(spread.tolist())]
    found = search(Problem(seen, seen.latency, with_host=True, graph_tokens=graph_tokens))
    noise = max(LEAST_NOISE, float(np.sqrt(np.mean(found.residuals() ** 2))))
    # Together: which coefficients there are depends on the shapes.
    old, new = np.split(_rows(found, np.vstack([seen.features, table])), [len(seen)])
    # In units of what each adds to a typical candidate, or where that is nothing to a measured shape: coefficients are
    # of very different sizes, and elimination would round some away.
    scale, measured_scale = (np.sqrt((rows**2).mean(axis=0)) for rows in (new, old))
    scale = np.where(scale > 0, scale, np.where(measured_scale > 0, measured_scale, 1.0))
    old, new = old / scale, new / scale
    information = old.T @ old / noise**2 + np.eye(len(scale)) / PRIOR**2
    chosen: list[int] = []
    for _ in range(min(num, len(left))):
        unsure = np.einsum("ij,ij->i", new, np.linalg.solve(information, new.T).T)
        unsure[chosen] = -1.0
        best = int(np.argmax(unsure))
        chosen.append(best)
        information += np.outer(new[best], new[best]) / noise**2
    return [left[i] for i in chosen]


def _rows(found: Solution, features: Floats) -> Floats:
    """The share of each coefficient in each shape's latency."""
    none = np.full(len(features), np.nan)
    ones = np.ones(len(features), np.int64)
    shapes = Points(features, np.ones(len(features)), none, np.zeros(len(features)), ones, none)
    problem = Problem(shapes, shapes.latency, with_host=True, graph_tokens=found.problem.graph_tokens)
    on = found.on(problem)
    latency = problem.columns(found.bends, found.names, on.floor) @ found.values
    further = np.geomspace(max(1.0, found.problem.tokens.min()), max(2.0, found.problem.tokens.max()), BENDS + 2)[1:-1]
    bends = np.unique(np.concatenate([found.bends, further]))
    rows = problem.columns(bends, tuple(problem.linear), on.floor)
    return np.asarray(rows / np.maximum(latency, 1e-12)[:, None], np.float64)
