"""The yield of blocks: statistics of a commit log, and the log of a commit model's draws."""

from dataclasses import dataclass, replace

import numpy as np

from ..engine.commits import CommitDraws, CommitModel
from ..engine.draw import draw_plan
from ..engine.rows.blocks import count_prefixes
from ..engine.state import MASKED, PENDING, Masks
from .commit_log import CommitLog
from .samples import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Blocks:
    """Whole blocks of a log, one a row, to be denoised again."""

    block_length: int
    request: Ints  # from 0, in the order of the log's request numbers
    block_start: Ints
    masked: Bools  # [blocks, block_length] before its first step
    reach: Ints  # [blocks, steps] leftmost masks that a step may compute; the last value repeats


def complete(log: CommitLog) -> CommitLog:
    """Rows of completed blocks, by request and block."""
    log = log.sorted()
    block = block_of(log)
    remaining = log.masked.sum(axis=1) - log.committed.sum(axis=1)
    last = np.append(np.flatnonzero(np.diff(block)), len(block) - 1)
    return log[(remaining[last] == 0)[block]] if len(log) else log


def block_of(log: CommitLog) -> Ints:
    """Each row's block number from 0; the log must be sorted."""
    new = (np.diff(log.request, prepend=-1) != 0) | (np.diff(log.block_start, prepend=-1) != 0)
    return np.asarray(np.cumsum(new) - 1, np.int64)


def blocks(log: CommitLog) -> Blocks:
    """The blocks of a complete log."""
    block = block_of(log)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    step = np.arange(len(log)) - first[block]
    reach = np.zeros((len(first), int(step.max(initial=0)) + 1), np.int64)
    # A window of every mask has no limit.
    unlimited = (log.window == log.masked).all(axis=1)
    reach[block, step] = np.where(unlimited, log.block_length, log.window.sum(axis=1))
    reach = np.where(reach > 0, reach, reach[np.arange(len(first)), np.bincount(block) - 1][:, None])
    request = np.unique(log.request[first], return_inverse=True)[1]
    return Blocks(
        block_length=log.block_length,
        request=np.asarray(request, np.int64),
        block_start=log.block_start[first],
        masked=log.masked[first],
        reach=reach,
    )


def draw(model: CommitModel, source: Blocks, seed: int) -> CommitLog:
    """The log of the model's keyed draws for the same blocks, as different requests."""
    num, length = source.masked.shape
    requests = int(source.request.max(initial=0)) + 1
    none = np.zeros(requests, np.int64)
    draws = CommitDraws(model, seed, none, none, length).arrays
    # Without padding, which depends on a request's last block, maybe not in the log.
    draws.requests["last_block"], draws.requests["num_padding"] = 2**30, 0
    status = np.where(source.masked, np.uint8(MASKED), np.uint8(PENDING))
    evaluations = np.zeros((num, length), np.uint16)
    start = source.block_start.astype(np.int32)
    alive, step = np.arange(num), 0
    rows: list[tuple[Ints, Bools, Bools, Bools]] = []
    while len(alive):
        masked = status[alive] == MASKED
        reach = source.reach[alive, min(step, source.reach.shape[1] - 1)]
        window = masked & (np.cumsum(masked, axis=1) <= reach[:, None])
        masks = Masks(
            status=status[alive],
            evaluations=evaluations[alive],
            window=window,
            start=start[alive],
            prompt=np.zeros(len(alive), np.int32),
            request=source.request[alive].astype(np.int32),
        )
        committed = draw_plan(masks, draws, np.zeros((len(alive), 0)))
        rows.append((alive, masked, window, committed))
        evaluations[alive] += window
        status[alive] = np.where(committed, np.uint8(PENDING), status[alive])
        alive, step = alive[(status[alive] == MASKED).any(axis=1)], step + 1
    block = np.concatenate([r[0] for r in rows])
    masked, window, committed = (np.concatenate([r[i] for r in rows]) for i in (1, 2, 3))
    return CommitLog(
        block_length=length,
        request=source.request[block],
        block_start=source.block_start[block],
        masked=masked,
        window=window,
        committed=committed,
    ).sorted()


def repeated(source: Blocks, times: int) -> Blocks:
    """The same blocks for `times` times as many requests."""
    requests = int(source.request.max(initial=0)) + 1
    request = np.concatenate([source.request + i * requests for i in range(times)])
    return replace(
        source,
        request=request,
        block_start=np.tile(source.block_start, times),
        masked=np.concatenate([source.masked] * times),
        reach=np.concatenate([source.reach] * times),
    )


def figures(log: CommitLog) -> dict[str, float]:
    """A complete log's yields by name, in reading order."""
    commits = log.committed.sum(axis=1)
    steps = np.bincount(block_of(log))
    request = np.unique(log.request, return_inverse=True)[1]
    of_requests = np.bincount(request, commits) / np.bincount(request)
    by_name: dict[str, float] = {}
    for name, values in (("tokens per step", commits), ("steps per block", steps)):
        by_name[f"{name}, mean"] = float(values.mean())
        for percent in (50, 90):
            by_name[f"{name}, p{percent}"] = quantile(values, percent / 100)
    for percent in (10, 90):
        by_name[f"tokens per step of a request, p{percent}"] = float(np.quantile(of_requests, percent / 100))
    curve = prefix_curve(log)
    for c in (2, 4, 8, 16, 32, 64):
        if c <= log.block_length and np.isfinite(curve[c]):
            by_name[f"commits of the first {c} masks"] = float(curve[c])
    return by_name


def prefix_curve(log: CommitLog) -> Floats:
    """[block_length + 1] mean commits among the first m computed masks; NaN: no step computed m."""
    counts, sums = np.zeros((2, log.block_length + 1), np.int64)
    status = np.where(log.masked, np.uint8(MASKED), np.uint8(PENDING))
    for row in zip(status, log.window, log.committed, strict=True):
        count_prefixes(*row, counts, sums)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / counts, np.float64)


def quantile(values: Ints, q: float) -> float:
    """A quantile of integers, each spread evenly over one unit: it changes smoothly."""
    counts = np.bincount(values)
    shares = np.cumsum(counts) / counts.sum()
    k = int(np.searchsorted(shares, q))
    below = shares[k - 1] if k else 0.0
    return float(k - 0.5 + (q - below) / (shares[k] - below))
