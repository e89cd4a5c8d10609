"""What a scaler sees of a pool: counts, and totals and means since the last tick."""

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.state import COMPLETED, COUNTERS, UNFINISHED
from ..traces.trace import Floats, Ints
from .scalers.scaler import PoolView, ReplicaLoads
from .servers import Members

# Fields of state.Counters, read as changes.
_TIMES = ("num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time")
_TOTALS = (*_TIMES, "forwards", "total_committed")
_SUMS = {"waiting": "num_waiting", "running": "num_running", "tokens": "expected_tokens", "pages_held": "pages_held"}
_ZERO = np.zeros(len(_TOTALS))


class PoolWatch:
    """Watches a pool.

    due: [requests] s, when each may come at the earliest, rising. handed_over: [requests] NaN until a link has brought
    the request; None: it comes by no link. role: of PoolView.
    """

    def __init__(self, members: Members, due: Floats, handed_over: Floats | None = None, role: str = "both") -> None:
        self.role = role
        self._pool, self._table, self._numbers = members.pool, members.table, members.numbers
        self._due, self._handed_over = due, handed_over
        self._num_due = 0  # first requests that may have come
        self._to_come = np.zeros(0, np.int64)  # of these, no replica has had
        self._open = np.zeros(0, np.int64)  # unfinished at the last tick
        self._before: dict[int, Floats] = {}  # _TOTALS by replica at the last tick
        self._last = 0.0  # s, the last tick
        self._forwards = self._committed = 0.0  # since the run began

    def _new_requests(self, now: float) -> Ints:
        """Requests that the pool's replicas had since the last tick."""
        num_due = int(np.searchsorted(self._due, now, side="right"))
        candidates = np.concatenate([self._to_come, np.arange(self._num_due, num_due)])
        self._num_due = num_due
        replicas = self._table["replica"][candidates]
        entered = replicas >= 0
        if self._handed_over is not None:
            entered &= ~np.isnan(self._handed_over[candidates])
        self._to_come = candidates[~entered]
        new: Ints = candidates[entered & np.isin(replicas, self._numbers)]
        return new

    def view(self, now: float, members: Members, starting: int) -> PoolView:
        """The pool now; starting: replicas."""
        pool = self._pool
        policy, limits = pool.setting.policy, pool.setting.limits
        engines = [replica.engine for replica in members.ready]
        every = [replica.engine for replica in members.replicas]
        # np.concatenate would compare the records' fields for each replica.
        counters = np.frombuffer(b"".join(engine.counters.tobytes() for engine in every), COUNTERS)
        steps = self._steps(counters, [engine.replica for engine in every])
        counters = counters[: len(engines)]
        requests = self._requests(now)
        self._last = now
        tokens_per_forward = nan
        if self._forwards and self._committed:
            tokens_per_forward = self._committed / self._forwards
        return PoolView(
            name=pool.name,
            ready=len(engines),
            starting=starting,
            draining=len(members.draining),
            num_pages=len(engines) * limits.num_pages,
            tokens_per_forward=tokens_per_forward,
            block_length=policy.block_length,
            max_batch=limits.max_batch,
            role=self.role,
            loads=self._loads(steps[: len(engines)], counters),
            **requests,
            **{field: int(counters[name].sum()) for field, name in _SUMS.items()},
        )

    def _requests(self, now: float) -> dict[str, Any]:
        """PoolView's fields on requests."""
        table, lengths, block = self._table, self._table.asked, self._pool.setting.policy.block_length
        new = self._new_requests(now)
        indices = np.concatenate([self._open, new])
        rows, arrival = table.rows[indices], table.arrival[indices]
        active, waits, done = rows["status"] == UNFINISHED, np.isnan(rows["scheduled"]), rows["status"] == COMPLETED
        first, last = rows["first_emission"], rows["last_emission"]
        emitted = (first > self._last) & (first <= now)
        several = done & (rows["num_tokens"] > rows["num_first"])
        blocks = -(-np.maximum(lengths.estimate[indices] - rows["num_tokens"], 1) // block)
        queued = active & waits
        prompts = lengths.input_length[indices] - rows["arrived"]
        fields = {
            "submitted": len(new),
            "completed": int(done.sum()),
            "queued_tokens": int(prompts[queued].sum()),
            "submitted_blocks": int((-(-np.maximum(lengths.estimate[new], 1) // block)).sum()),
            "waiting_blocks": int(blocks[queued].sum()),
            "running_blocks": int(blocks[active & ~waits].sum()),
            "ttft": _mean((first - arrival)[emitted]),
            "itl": _mean(((last - first) / (rows["num_tokens"] - rows["num_first"]).clip(min=1))[several]),
            "e2el": _mean((rows["finish"] - arrival)[done]),
        }
        self._open = indices[active]
        return fields

    def _steps(self, counters: Any, replicas: Sequence[int]) -> Floats:
        """Growth of _TOTALS since the last tick, [replicas, totals]."""
        if not replicas:
            return np.zeros((0, len(_TOTALS)))
        totals = np.stack([counters[name] for name in _TOTALS], axis=1).astype(np.float64)
        before = np.stack([self._before.get(replica, _ZERO) for replica in replicas])
        self._before = dict(zip(replicas, totals, strict=True))
        grown: Floats = totals - before
        self._forwards += float(grown[:, -2].sum())
        self._committed += float(grown[:, -1].sum())
        return grown

    def _loads(self, grown: Floats, counters: Any) -> ReplicaLoads:
        """grown: of _TOTALS."""
        total = dict(zip(_TOTALS, grown.T, strict=True))
        steps = total["num_decode_steps"] + total["num_prefill_steps"]
        with np.errstate(invalid="ignore", divide="ignore"):
            return ReplicaLoads(
                waiting=counters["num_waiting"].astype(np.float64),
                steps=steps,
                step_time=(total["prefill_time"] + total["decode_time"]) / steps,
                step_rows=total["forwards"] / total["num_decode_steps"],
                forwards=total["forwards"],
            )


def _mean(values: npt.NDArray[Any]) -> float:
    if not len(values):
        return nan
    return float(values.mean())
