"""What a scaler sees of a pool: counts, and totals and means since the last tick."""

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.state import COMPLETED, COUNTERS, UNFINISHED
from .scalers.scaler import PoolView, ReplicaLoads
from .servers import Members

# Fields of state.Counters, read as changes.
_TOTALS = (
    "num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time", "total_prefill_tokens", "page_time",
    "forwards", "total_committed",
)  # fmt: skip
_ZERO = np.zeros(len(_TOTALS))


class PoolWatch:
    """Watches a pool.

    due: [requests] s, when each may come at the earliest, rising. handed_over: [requests] NaN until a link has brought
    the request; None: it comes by no link. cached: each request's prefix-cached prompt tokens, or None. role: of
    PoolView.
    """

    def __init__(
        self, members: Members, due: npt.NDArray[np.float64], *, handed_over: npt.NDArray[np.float64] | None = None,
        cached: npt.NDArray[Any] | None = None, role: str = "both",
    ) -> None:  # fmt: skip
        self.role = role
        self._pool, self._table, self._numbers = members.pool, members.table, members.numbers
        self._due, self._handed_over, self._cached = due, handed_over, cached
        self._num_due = 0  # first requests that may have come
        self._to_come = np.zeros(0, np.int64)  # of these, no replica has had
        self._open = np.zeros(0, np.int64)  # unfinished at the last tick
        self._before: dict[int, npt.NDArray[np.float64]] = {}  # _TOTALS by replica at the last tick
        self._last = 0.0  # s, the last tick
        self._forwards = self._committed = 0.0  # since the run began

    def _new_requests(self, now: float) -> npt.NDArray[np.int64]:
        """Requests that the pool's replicas had since the last tick."""
        num_due = int(np.searchsorted(self._due, now, side="right"))
        candidates = np.concatenate([self._to_come, np.arange(self._num_due, num_due)])
        self._num_due = num_due
        replicas = self._table["replica"][candidates]
        entered = replicas >= 0
        if self._handed_over is not None:
            entered &= ~np.isnan(self._handed_over[candidates])
        self._to_come = candidates[~entered]
        new: npt.NDArray[np.int64] = candidates[entered & np.isin(replicas, self._numbers)]
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
        requests, queues = self._requests(now)
        self._last = now
        tokens_per_forward = nan
        if self._forwards and self._committed:
            tokens_per_forward = self._committed / self._forwards
        return PoolView(
            name=pool.name,
            ready=len(engines),
            starting=starting,
            draining=len(members.draining),
            waiting=int(counters["num_waiting"].sum()),
            running=int(counters["num_running"].sum()),
            tokens=int(counters["expected_tokens"].sum()),
            pages_held=int(counters["pages_held"].sum()),
            num_pages=len(engines) * limits.num_pages,
            tokens_per_forward=tokens_per_forward,
            block_length=policy.block_length,
            page_size=policy.memory.page_size,
            max_batch=limits.max_batch,
            max_prefill=limits.max_prefill_tokens or policy.batching.max_prefill_tokens,
            context_limit=limits.context_limit,
            gpus=pool.setting.profile.device.count,
            role=self.role,
            loads=self._loads(steps[: len(engines)], counters, engines, *queues),
            **requests,
        )

    def _requests(self, now: float) -> tuple[dict[str, Any], tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """PoolView's fields on requests; the replica and prompt tokens of each queued request."""
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
            "input_length": _mean(lengths.input_length[new]),
            "expected_length": _mean(lengths.estimate[new]),
            "output_length": _mean(rows["num_tokens"][done]),
            "ttft": _mean((first - arrival)[emitted]),
            "itl": _mean(((last - first) / (rows["num_tokens"] - rows["num_first"]).clip(min=1))[several]),
            "e2el": _mean((rows["finish"] - arrival)[done]),
        }
        if self._cached is not None:
            looked_up = ~waits & (rows["scheduled"] > self._last) & (rows["arrived"] == 0)
            if total := prompts[looked_up].sum():
                fields["hit_rate"] = float(self._cached[indices][looked_up].sum() / total)
        self._open = indices[active]
        return fields, (rows["replica"][queued], prompts[queued])

    def _steps(self, counters: Any, replicas: Sequence[int]) -> npt.NDArray[np.float64]:
        """Growth of _TOTALS since the last tick, [replicas, totals]."""
        if not replicas:
            return np.zeros((0, len(_TOTALS)))
        totals = np.stack([counters[name] for name in _TOTALS], axis=1).astype(np.float64)
        before = np.stack([self._before.get(replica, _ZERO) for replica in replicas])
        self._before = dict(zip(replicas, totals, strict=True))
        grown: npt.NDArray[np.float64] = totals - before
        self._forwards += float(grown[:, -2].sum())
        self._committed += float(grown[:, -1].sum())
        return grown

    def _loads(
        self, grown: npt.NDArray[np.float64], counters: Any, engines: Sequence[Engine], replica: npt.NDArray[Any],
        prompts: npt.NDArray[Any],
    ) -> ReplicaLoads:  # fmt: skip
        """grown: of _TOTALS. replica, prompts: of each queued request."""
        page = self._pool.setting.policy.memory.page_size
        total = dict(zip(_TOTALS, grown.T, strict=True))
        steps = total["num_decode_steps"] + total["num_prefill_steps"]
        time = total["prefill_time"] + total["decode_time"]
        numbers = np.array([engine.replica for engine in engines], np.int64)
        queued_tokens = np.bincount(replica, prompts, int(numbers.max(initial=-1)) + 1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return ReplicaLoads(
                waiting=counters["num_waiting"].astype(np.float64),
                queued_tokens=queued_tokens[numbers],
                kv_tokens=counters["pages_held"] * float(page),
                steps=steps,
                step_time=time / steps,
                step_prefill=total["total_prefill_tokens"] / steps,
                step_kv=total["page_time"] / time * page,
                step_rows=total["forwards"] / total["num_decode_steps"],
                forwards=total["forwards"],
            )


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else nan
