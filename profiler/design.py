"""Choose the step shapes to measure next: those whose latency the fit is least sure of.

Optimal design on the linearised fit, with additional bends and a wide prior, so that unmeasured directions count as
unsure. A chosen shape counts as measured for the next choice. Captured graphs of one bucket are one shape.
"""

from collections.abc import Sequence

import numpy as np

from ..engine.latency import Features
from .fit import MIN_POINTS
from .pieces import Problem, Solution, search
from .samples import FEATURES, Floats, Points, Samples, points

BENDS = 6  # additional ones, at equal ratios of tokens
PRIOR = 1.0  # prior std of a coefficient's share of the typical latency
LEAST_NOISE = 0.005


def next_shapes(candidates: Sequence[Features], taken: Samples, num: int, graph_tokens: int = 0) -> list[int]:
    """Indices of the `num` most informative unmeasured candidates, best first.

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
    found = search(Problem(seen, with_host=True, graph_tokens=graph_tokens))
    noise = max(LEAST_NOISE, float(np.sqrt(np.mean(found.residuals() ** 2))))
    # In one call: the set of coefficients depends on the shapes.
    old, new = np.split(_rows(found, np.vstack([seen.features, table])), [len(seen)])
    # Scale each column by its share of a typical candidate (of a measured shape if that is 0): coefficients' sizes
    # differ so much that elimination would round small ones away.
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
    """Each coefficient's share of each shape's latency."""
    none = np.full(len(features), np.nan)
    shapes = Points(features, np.ones(len(features)), none, np.zeros(len(features)))
    problem = Problem(shapes, with_host=True, graph_tokens=found.problem.graph_tokens)
    on = found.on(problem)
    latency = problem.columns(found.bends, found.names, on.floor) @ found.values
    further = np.geomspace(max(1.0, found.problem.tokens.min()), max(2.0, found.problem.tokens.max()), BENDS + 2)[1:-1]
    bends = np.unique(np.concatenate([found.bends, further]))
    rows = problem.columns(bends, tuple(problem.linear), on.floor)
    return np.asarray(rows / np.maximum(latency, 1e-12)[:, None], np.float64)
