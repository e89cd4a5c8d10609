"""Dynamo's regression for diffusion workers, fitted to measured runs: a baseline for the twin's error.

e2el = a * ceil(O / block) + b * n * (I + O / 2) + c with a, b >= 0 (`DllmRegressionModel` of ai-dynamo/dynamo's
planner): I, O are prompt and answer tokens, n the requests in flight on the replica. Dynamo fits runs' means; here each
request is an observation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.errors import PolicyError
from ..results.metrics import REJECTED, Columns, Floats
from ..results.run import Run
from .errors import Errors, errors, ks_distance
from .parts import Indices

PAGE = 32  # tokens, for policies without blocks
FEWEST = 8  # observations for three coefficients


@dataclass(frozen=True)
class Baseline:
    """The regression's errors in e2el next to the twin's."""

    block: int  # tokens
    per_block: float  # a, s
    per_token: float  # b, s a token of context in flight
    constant: float  # c, s
    pairs: list[int]  # indices of the fitted pairs
    in_sample: bool  # fitted to the judged run itself
    requests: Errors
    ks: float  # of e2el
    twin: Errors | None  # None: not paired
    twin_ks: float


@dataclass(frozen=True)
class Served:
    """Requests completed in both runs of a pair."""

    pair: int
    server: tuple[str, str]  # policy, predicting profile
    block: int
    features: Floats  # [requests, 2]
    measured: Floats  # s
    predicted: Floats  # s
    paired: bool


def served(
    pair: int, runs: tuple[Run, Run], policy: str, index: Indices, both: tuple[Floats, Floats], paired: bool
) -> Served | None:
    """The observations in a pair's second run; None if it is a twin's. both: e2el of `index` in both runs (s)."""
    predicted, measured = runs
    if measured.info.get("driver", "twin") == "twin":
        return None
    columns = measured.requests(policy)
    replicas = max(run.info.get("replicas", 1) for run in runs)
    block = _block(predicted, policy)
    order = np.argsort(columns["request"])
    rows = np.searchsorted(columns["request"], index, sorter=order)
    known = ~(np.isnan(both[0]) | np.isnan(both[1]))
    features = _features(columns, block, replicas)[order[rows]]
    server = policy, str(predicted.info.get("profile", {}).get("name"))
    return Served(pair, server, block, features[known], both[1][known], both[0][known], paired)


def baselines(found: Sequence[Served | None]) -> list[Baseline | None]:
    """Each pair's baseline, fitted to other measured runs of its server if there are any, else to the run itself."""
    return [None if own is None else _baseline(own, [other for other in found if other is not None]) for own in found]


def in_flight(columns: Mapping[str, Floats]) -> Floats:
    """The mean number in flight while each request was; NaN if it did not complete."""
    arrival, finish = columns["arrival"], columns["finish"]
    last = np.nanmax(finish, initial=float(arrival.max(initial=0.0)))
    ends = np.where(np.isnan(finish), last, finish)  # an unfinished request stays to the end
    times, place = np.unique(np.concatenate([arrival, ends]), return_inverse=True)
    changes = np.bincount(place, np.repeat([1.0, -1.0], len(arrival)), len(times))
    area = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(times))])
    begun, ended = place[: len(arrival)], place[len(arrival) :]
    stay = finish - arrival
    found: Floats = np.divide(area[ended] - area[begun], stay, out=np.ones(len(stay)), where=stay > 0)
    return found


def _features(columns: Columns, block: int, replicas: int) -> Floats:
    """Blocks, tokens of context in flight: [requests, 2]."""
    answer = columns["num_tokens"].astype(np.float64)
    context = columns["input_length"] + answer / 2
    taken = columns["status"] != REJECTED
    flying = np.ones(len(answer))
    flying[taken] = np.maximum(1.0, in_flight({k: columns[k][taken] for k in ("arrival", "finish")}) / replicas)
    return np.stack([np.ceil(answer / block), flying * context], axis=1)


def _baseline(own: Served, every: Sequence[Served]) -> Baseline | None:
    others = [s for s in every if s.server == own.server and s.pair != own.pair and len(s.measured) >= FEWEST]
    fitted = others or [own]
    x, y = (np.concatenate([getattr(s, name) for s in fitted]) for name in ("features", "measured"))
    if len(y) < FEWEST or not len(own.measured):
        return None
    (per_block, per_token), constant = _fit(x, y)
    predicted = np.maximum(own.features @ [per_block, per_token] + constant, 1e-6)
    return Baseline(
        own.block,
        float(per_block),
        float(per_token),
        constant,
        [s.pair for s in fitted],
        not others,
        errors(predicted, own.measured),
        ks_distance(predicted, own.measured),
        errors(own.predicted, own.measured) if own.paired else None,
        ks_distance(own.predicted, own.measured),
    )


def _fit(x: Floats, y: Floats) -> tuple[Floats, float]:
    """Least squares with slopes >= 0."""
    from scipy.optimize import nnls  # slow to import

    middle, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-12)
    slopes = nnls((x - middle) / scale, y - y.mean())[0] / scale
    return slopes, float(y.mean() - middle @ slopes)


def _block(run: Run, policy: str) -> int:
    try:
        block = run.policy(policy).block_length
    except PolicyError:  # a client's policy may be unknown
        return PAGE
    return block if block > 1 else PAGE
