"""What a scaler sees of a pool: counts, and totals and means since the last tick."""

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import RequestTable
from ..engine.state import COMPLETED, COUNTERS, UNFINISHED
from .fleet import Pool
from .scalers.scaler import PoolView, ReplicaLoads

# Fields of state.Counters, read as changes.
_TOTALS = (
    "num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time", "total_prefill_tokens", "page_time",
    "forwards", "total_committed",
)  # fmt: skip
_ZERO = np.zeros(len(_TOTALS))


class PoolWatch:
    """Watches a pool.

    table: its requests. cached: each request's prefix-cached prompt tokens, or None. role: of PoolView.
    """

    def __init__(
        self, pool: Pool, table: RequestTable, cached: npt.NDArray[Any] | None, role: str = "both"
    ) -> None:  # fmt: skip
        self._pool, self._table, self._cached, self._role = pool, table, cached, role
        self._new: list[int] = []  # sent since the last tick
        self._open = np.zeros(0, np.int64)  # unfinished at the last tick
        self._before: dict[int, npt.NDArray[np.float64]] = {}  # _TOTALS by replica at the last tick
        self._last = 0.0  # s, the last tick
        self._forwards = self._committed = 0.0  # since the run began

    def sent(self, *requests: int) -> None:
        self._new += requests

    def view(self, now: float, engines: Sequence[Engine], starting: int, draining: Sequence[Engine]) -> PoolView:
        """The pool now; engines: of ready replicas."""
        pool = self._pool
        policy, limits = pool.setting.policy, pool.setting.limits
        every = [*engines, *draining]
        # np.concatenate would compare the records' fields for each replica.
        counters = np.frombuffer(b"".join(engine.counters.tobytes() for engine in every), COUNTERS)
        steps = self._steps(counters, [engine.replica for engine in every])
        counters = counters[: len(engines)]
        found = self._requests(now)
        loads = self._loads(steps[: len(engines)], counters, engines, found.pop("queues"))
        self._last = now
        return PoolView(
            pool.name, len(engines), starting, len(draining), int(counters["num_waiting"].sum()),
            int(counters["num_running"].sum()), int(counters["expected_tokens"].sum()),
            int(counters["pages_held"].sum()), len(engines) * limits.num_pages,
            tokens_per_forward=self._committed / self._forwards if self._forwards and self._committed else nan,
            block_length=policy.block_length, page_size=policy.memory.page_size, max_batch=limits.max_batch,
            max_prefill=limits.max_prefill_tokens or policy.batching.max_prefill_tokens,
            context_limit=limits.context_limit, gpus=pool.setting.profile.device.count, role=self._role, loads=loads,
            **found,
        )  # fmt: skip

    def _requests(self, now: float) -> dict[str, Any]:
        """PoolView's fields on requests."""
        table, asked = self._table, self._table.asked
        new = np.array(self._new, np.int64)
        mine = np.concatenate([self._open, new])
        rows, arrival = table.rows[mine], table.arrival[mine]
        expected = -(-np.maximum(asked.estimate[new], 1) // self._pool.setting.policy.block_length)
        going, waits = rows["status"] == UNFINISHED, np.isnan(rows["scheduled"])
        done = rows["status"] == COMPLETED
        first, last = rows["first_emission"], rows["last_emission"]
        emitted = (first > self._last) & (first <= now)
        more = done & (rows["num_tokens"] > rows["num_first"])
        left = np.maximum(asked.estimate[mine] - rows["num_tokens"], 1)
        blocks = -(-left // self._pool.setting.policy.block_length)
        queued = going & waits & (rows["replica"] >= 0)  # without those that left and return for their next block
        looked_up = ~waits & (rows["scheduled"] > self._last) & (rows["arrived"] == 0)
        prompts = asked.input_length[mine] - rows["arrived"]
        found = {
            "submitted": len(new), "completed": int(done.sum()),
            "queued_tokens": int(prompts[queued].sum()), "submitted_blocks": int(expected.sum()),
            "waiting_blocks": int(blocks[queued].sum()),
            "running_blocks": int(blocks[going & ~waits].sum()),
            "input_length": _mean(asked.input_length[new]), "expected_length": _mean(asked.estimate[new]),
            "output_length": _mean(rows["num_tokens"][done]), "ttft": _mean((first - arrival)[emitted]),
            "itl": _mean(((last - first) / (rows["num_tokens"] - rows["num_first"]).clip(min=1))[more]),
            "e2el": _mean((rows["finish"] - arrival)[done]),
            "queues": (rows["replica"][queued], prompts[queued]),
        }  # fmt: skip
        if self._cached is not None and (total := prompts[looked_up].sum()):
            found["hit_rate"] = float(self._cached[mine][looked_up].sum() / total)
        self._new, self._open = [], mine[going]
        return found

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
        self, grown: npt.NDArray[np.float64], counters: Any, engines: Sequence[Engine], queues: Any
    ) -> ReplicaLoads:
        page = self._pool.setting.policy.memory.page_size
        decode, prefill, prefill_time, decode_time, prefilled, page_time, forwards, _ = grown.T
        steps, time = decode + prefill, prefill_time + decode_time
        numbers = np.array([engine.replica for engine in engines], np.int64)
        replica, prompts = queues
        prompts_of = np.bincount(replica, prompts, int(numbers.max(initial=-1)) + 1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return ReplicaLoads(
                counters["num_waiting"].astype(np.float64), prompts_of[numbers], counters["pages_held"] * float(page),
                steps, time / steps, prefilled / steps, page_time / time * page, forwards / decode,
                forwards,
            )  # fmt: skip


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else nan
