"""A fabricated run for looking at reports: a toy queue with made-up constants. It predicts nothing."""

from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS, StepTotals
from dsim.report.files import RunWriter
from dsim.report.manifest import Manifest
from dsim.report.metrics import Summary, summarize
from dsim.report.slo import Slo

from .fixtures import Columns

REPLICAS = 2
PAGES = 4000  # of a replica
BLOCK = 32
SLOS = ("ttft=5s", "norm_latency=100ms", "p90:tpot_chunk=80ms")
POLICIES = {"optimus": 0, "chunk:8": 8, "lmdeploy-bd32": 32}  # chunk; 0: shrinks as the batch grows


def toy_run(chunk: int, *, num_requests: int, rate: float, seed: int) -> tuple[Columns, Columns, StepTotals]:
    """Request and step columns of one policy. Each replica serves at most 48 requests, first come first served."""
    rng = np.random.default_rng(seed)
    burst = 1 + 0.5 * np.sin(np.arange(num_requests) / max(1, num_requests) * 14)
    arrival = np.cumsum(rng.exponential(1 / (rate * burst)))
    arrival -= arrival[:1].sum()
    columns: Columns = {name: np.zeros(num_requests, dtype) for name, dtype in REQUEST_COLUMNS.items()}
    for name, dtype in REQUEST_COLUMNS.items():
        if dtype == "float64":
            columns[name][:] = np.nan
    columns["request"] = np.arange(num_requests, dtype="int32")
    columns["arrival"] = arrival
    columns["replica"] = (np.arange(num_requests) % REPLICAS).astype("int16")
    columns["input_length"] = np.clip(rng.lognormal(6, 1, num_requests), 8, 8000).astype("int32")
    columns["output_length"] = np.clip(rng.lognormal(5, 0.8, num_requests), 4, 1024).astype("int32")
    totals = StepTotals(num_pages=PAGES * REPLICAS)
    steps: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    for replica in range(REPLICAS):
        _serve(replica, chunk, columns, steps, totals, rng)
    order = np.argsort(np.array(steps["start"]), kind="stable")
    return columns, {n: np.array(steps[n], STEP_COLUMNS[n])[order] for n in STEP_COLUMNS}, totals


def _serve(
    replica: int, fixed: int, columns: Columns, steps: dict[str, list[Any]], totals: StepTotals,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    queue = np.flatnonzero(columns["replica"] == replica)
    columns["status"][queue[columns["input_length"][queue] > 7500]] = STATUSES.index("rejected")
    queue = queue[columns["status"][queue] == 0]
    canvas = -(-columns["output_length"] // BLOCK) * BLOCK
    left = canvas.astype(float)
    now, taken, running, step = 0.0, 0, np.zeros(0, np.int64), 0
    while taken < len(queue) or len(running):
        if not len(running) and columns["arrival"][queue[taken]] > now:
            now = float(columns["arrival"][queue[taken]])
        waiting = int(np.searchsorted(columns["arrival"][queue], now, side="right")) - taken
        new = queue[taken : taken + max(0, min(waiting, 48 - len(running)))]
        prefill = len(new) > 0
        taken += len(new)
        if prefill:
            columns["scheduled"][new] = now
            running = np.concatenate([running, new])
            rows, chunk = len(new), 0
            tokens = int(columns["input_length"][new].sum())
            latency, committed = 0.02 + 2.2e-5 * tokens, np.zeros(rows)
        else:
            rows = len(running)
            chunk = fixed or int(np.clip(2 ** round(np.log2(448 / rows)), 4, 32))
            tokens = rows * chunk
            latency = 0.028 + 5.5e-5 * max(0, tokens - 384) + 1e-5 * tokens + rng.exponential(0.001)
            committed = np.minimum(left[running], 1 + rng.poisson(1.9 * (1 - np.exp(-chunk / 6)), rows))
        pages = int(((columns["input_length"][running] + canvas[running]) // 64 + 1).sum())
        row = {
            "replica": replica, "step": step, "start": now, "latency": latency, "prefill": prefill, "batch": rows,
            "chunk": chunk, "tokens": tokens, "num_forwards": rows, "committed": int(committed.sum()),
            "waiting": waiting, "running": len(running), "pages": min(pages, PAGES),
        }  # fmt: skip
        for name, values in steps.items():
            values.append(row.get(name, 0))
        now, step = now + latency, step + 1
        totals.page_time += min(pages, PAGES) * latency
        if prefill:
            totals.prefill_time += latency
            totals.num_prefill_steps += 1
            continue
        totals.decode_time += latency
        totals.num_decode_steps += 1
        totals.tokens += tokens
        totals.committed += int(committed.sum())
        totals.forwards += rows
        totals.batch.add(rows)
        totals.chunk.add(chunk)
        totals.step_latency.add(latency)
        _emit(columns, running, committed, left, canvas, now, totals)
        running = running[left[running] > 0]


def _emit(
    columns: Columns, running: Any, committed: Any, left: Any, canvas: Any, now: float, totals: StepTotals
) -> None:
    before = (canvas[running] - left[running]) // BLOCK
    left[running] -= committed
    fresh = running[np.isnan(columns["first_commit"][running])]
    columns["first_commit"][fresh] = now
    whole = running[(canvas[running] - left[running]) // BLOCK > before]
    again = whole[~np.isnan(columns["last_emission"][whole])]
    totals.itl.add_many(now - columns["last_emission"][again])
    first = whole[np.isnan(columns["first_emission"][whole])]
    columns["first_emission"][first] = columns["first_block"][first] = now
    columns["num_first"][first] = np.minimum(BLOCK, columns["output_length"][first])
    columns["last_emission"][whole] = now
    columns["num_emissions"][whole] += 1
    done = running[left[running] <= 0]
    columns["finish"][done] = now
    columns["num_tokens"][done] = columns["output_length"][done]
    columns["num_committed"][done] = canvas[done]


def lists_for(steps: Columns) -> dict[str, tuple[Any, Any]]:
    """Empty lists for every step but the first, which computes request 7 at positions 0 and 2."""
    one = {"requests": [7], "phases": [1], "num_tokens": [2], "window": [5], "commits": [1], "evictions": [4]}
    offsets = np.ones(len(steps["step"]) + 1, np.int32)
    offsets[0] = 0
    return {name: (np.array(one[name], dtype), offsets) for name, dtype in STEP_LISTS.items()}


def manifest(summaries: list[Summary], num_requests: int, rate: float) -> Manifest:
    return {
        "trace": {
            "name": "fabricated", "num_requests": num_requests, "arrival": "poisson", "rate": rate, "hash_ids": True,
            "skipped_bad": 3, "sorted_rows": 1,
        },
        "profile": {"name": "made-up", "device": "no GPU", "model": "no model", "estimated": True},
        "commit_models": [
            {"policy": "optimus", "workload": "sharegpt", "block_length": 32, "threshold": 0.9},
            {"policy": "lmdeploy-bd32", "workload": "sharegpt", "block_length": 32, "threshold": 0.9},
            {"policy": "chunk:8", "workload": "sharegpt", "block_length": 8, "threshold": 0.9, "extrapolated_from": 32},
        ],
        "replicas": REPLICAS,
        "router": "jsq",
        "emit": "block",
        "seed": 0,
        "slos": list(SLOS),
        "policies": [s.to_json() for s in summaries],
    }  # fmt: skip


def write_run(
    folder: Path, *, num_requests: int = 300, rate: float = 8.0, seed: int = 0, force: bool = False,
    slos: tuple[str, ...] = SLOS, lists: bool = False, policies: dict[str, int] = POLICIES,
) -> list[Summary]:  # fmt: skip
    """Write a whole run's folder and give its summaries."""
    summaries = []
    with RunWriter(folder, force=force) as writer:
        for policy, chunk in policies.items():
            requests, steps, totals = toy_run(chunk, num_requests=num_requests, rate=rate, seed=seed)
            sink = writer.steps(policy)
            for at in range(0, len(steps["step"]), 1000):
                batch = {name: column[at : at + 1000] for name, column in steps.items()}
                sink.append(batch, lists_for(batch) if lists else None)
            writer.requests(policy, requests)
            summaries.append(summarize(policy, requests, totals, [Slo.parse(s) for s in slos], replicas=REPLICAS))
        writer.finish({**manifest(summaries, num_requests, rate), "slos": list(slos)})
    return summaries
