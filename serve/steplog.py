"""The twin's step log, in the format of the engines' hooks (docs/steplog.md)."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..engine.errors import DsimError
from ..engine.step import Phase, StepOutcome, StepPlan
from ..files.write import check_file
from ..profiler.steplog import SCHEMA, VERSION
from ..sim.setting import Setting

_log = logging.getLogger("dsim.serve")
FLUSH = 0.5  # s of real time
PHASES = {Phase.PREFILL: "prefill", Phase.FLUSH: "flush", Phase.IDLE: "flush"}


@dataclass(frozen=True, slots=True)
class EndedStep:
    engine: Engine
    plan: StepPlan
    outcome: StepOutcome
    end: float  # s
    begun: Sequence[tuple[int, float]]  # requests in their first step, and when they reached the engine
    emitted: Mapping[int, int]  # tokens sent, by request
    over: frozenset[int]  # ended requests


def log_file(name: str, replica: int, count: int) -> Path:
    """Each replica has its own file."""
    if count > 1 and "{replica}" not in name:
        raise DsimError(f"--step-log is {name} and --replicas is {count}, expected {{replica}} in the name")
    return Path(name.replace("{replica}", str(replica)))


class StepLog:
    """The log of one replica. Times are simulated s."""

    def __init__(self, path: Path, header: dict[str, Any], by_token: bool, commits: bool, force: bool = False) -> None:
        self._path = path
        self._failed = False
        self._by_token = by_token
        self._block = header["block_length"] if commits else 0  # 0: no sequence lines
        self._left_out: set[int] = set()  # preempted requests: they commit again
        self._file = check_file(path, force=force).open("w", encoding="utf-8")
        self._write([header])
        self._flush()

    def step(self, ended: EndedStep) -> None:
        """Write a step. After an error of the disk no more steps are written, and serving continues."""
        if self._failed:
            return
        try:
            self._write(self._lines(ended))
            if ended.engine.idle or time.monotonic() - self._flushed > FLUSH:
                self._flush()
        except OSError as error:
            self._failed = True
            _log.error("the step log %s records no more steps; serving continues: %s", self._path, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            _log.error("the end of the step log %s is missing: %s", self._path, error)

    def _write(self, lines: "Iterator[dict[str, Any]] | list[dict[str, Any]]") -> None:
        self._file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def _flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def _lines(self, ended: EndedStep) -> Iterator[dict[str, Any]]:
        plan, table = ended.plan, ended.engine.table
        for request, due in ended.begun:
            yield {
                "kind": "request", "request": request, "input_length": int(table["input_length"][request]),
                "output_length": int(table["output_length"][request]), "arrival": due,
                "received": float(table["arrival"][request]),
            }  # fmt: skip
        requests, f = plan.requests.tolist(), plan.features
        line = {
            "kind": "step", "step": plan.step, "start": plan.now, "latency": ended.outcome.latency,
            "batch": len(requests), "tokens": f.tokens, "sum_kv": f.sum_kv, "sum_q_kv": f.sum_q_kv,
            "prefill_tokens": f.prefill_tokens, "head_rows": f.head_rows, "sampled_rows": f.sampled_rows,
            "num_forwards": f.num_forwards, "requests": requests,
            "phases": [self._phase(phase) for phase in plan.phases.tolist()], "row_tokens": plan.num_tokens.tolist(),
            "row_keys": plan.num_keys.tolist(), "emitted": [ended.emitted.get(i, 0) for i in requests],
            "waiting": plan.waiting, "running": plan.running, "pages": plan.pages,
        }  # fmt: skip
        if ended.outcome.latency > 0:
            yield line
        self._left_out.update(plan.preempted)
        if self._block:
            yield from self._sequences(ended, requests)
        for request in ended.over:
            self._left_out.discard(request)
            yield {"kind": "finish", "request": request, "time": ended.end}

    def _sequences(self, ended: EndedStep, requests: list[int]) -> Iterator[dict[str, Any]]:
        """What each row computed and committed, a line per block."""
        plan, size = ended.plan, self._block
        for i in np.flatnonzero(ended.outcome.committed.any(axis=1)).tolist():
            if requests[i] in self._left_out:
                continue
            for first in range(0, plan.window.shape[1], size):
                committed = np.flatnonzero(ended.outcome.committed[i, first : first + size]).tolist()
                if committed:
                    yield {
                        "kind": "sequence", "request": requests[i], "step": plan.step,
                        "block_start": int(plan.block_start[i]) + first, "committed": committed,
                        "computed": np.flatnonzero(plan.window[i, first : first + size]).tolist(),
                    }  # fmt: skip

    def _phase(self, phase: int) -> str:
        return PHASES.get(Phase(phase), "decode" if self._by_token else "denoise")


def header_of(setting: Setting, spec: str, about: str, opened: float) -> dict[str, Any]:
    """The log's first line. opened: s since 1970 when the twin's clock was 0."""
    profile, policy, limits, law = setting.profile, setting.policy, setting.limits, setting.law
    model = setting.commits
    return {
        "schema": SCHEMA, "version": VERSION, "synthetic": True, "engine": about, "device": profile.device.name,
        "num_devices": profile.device.count, "memory_bytes": profile.device.memory_bytes,
        "model": asdict(profile.model), "block_length": policy.block_length,
        "threshold": model.threshold if model is not None else 1.0,
        "workload": law.workload if law is not None else model.workload if model is not None else "none",
        "weight_bytes": profile.memory.weight_bytes, "kv_bytes_per_token": profile.memory.kv_bytes_per_token,
        "num_pages": limits.num_pages, "page_size": policy.memory.page_size, "preset": spec.split(",")[0].split(":")[0],
        "started": opened,
    }  # fmt: skip
