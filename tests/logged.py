"""A step log as an engine writes it, drawn by the twin's own engine: what is known of it can be asked back."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.journal import RequestTable
from dsim.engine.spec import parse
from dsim.engine.step import Phase
from dsim.profiler.profile import Profile
from dsim.sim.setting import Setting
from dsim.traces import Trace

HEADER: dict[str, Any] = {
    "schema": "dsim-steplog", "version": 1, "synthetic": True, "engine": "vLLM 0.32.0", "device": "A100",
    "memory_bytes": 80_000_000_000, "model": "SDAR-8B", "threshold": 1.0, "workload": "drawn", "started": 1.7e9,
}  # fmt: skip


def write_log(path: Path, spec: str, profile: Profile, trace: Trace, *, early: float = 0.0, **header: Any) -> Path:
    """The log of an engine that runs `spec` and takes as long as `profile` says.

    early: requests reach the engine so long (s) after the log was opened. header: more of the first line.
    """
    policy = parse(spec)
    ar = policy.rows.commits == "tokens"
    setting = Setting(policy, profile)
    limits = setting.limits
    model = setting.step_model(setting.draws(7, trace))
    table = RequestTable(len(trace))
    engine = setting.engine(table)
    lines: list[dict[str, Any]] = [
        HEADER | {"block_length": policy.block_length, "page_size": policy.memory.page_size,
                  "num_pages": limits.num_pages, "preset": spec.split(",")[0]} | header
    ]  # fmt: skip
    words = {Phase.PREFILL: "prefill", Phase.DENOISE: "decode" if ar else "denoise", Phase.FLUSH: "flush"}
    words[Phase.IDLE] = words[Phase.DENOISE]  # the log does not tell that the row is for nothing
    now, coming = 0.0, 0
    while True:
        while coming < len(trace) and trace.arrival[coming] <= now:
            engine.submit(trace.request(coming))
            lines.append(
                {"kind": "request", "request": 100 + coming, "id": f"r{coming}",
                 "arrival": early + trace.arrival[coming], "input_length": int(trace.input_length[coming]),
                 "output_length": trace.request(coming).limit}
            )  # fmt: skip
            coming += 1
        plan = engine.schedule(now)
        if plan is None:
            if coming == len(trace):
                break
            now = float(trace.arrival[coming])
            continue
        before = table["num_tokens"][plan.requests].copy()
        outcome = model.step(plan)
        now = plan.now + outcome.latency
        done = engine.commit(outcome, now)
        f = plan.features
        lines.append({
            "kind": "step", "step": plan.step, "start": early + plan.now, "latency": outcome.latency, "batch": f.batch,
            "tokens": f.tokens, "sum_kv": f.sum_kv, "sum_q_kv": f.sum_q_kv, "prefill_tokens": f.prefill_tokens,
            "head_rows": f.head_rows, "sampled_rows": f.sampled_rows, "requests": (100 + plan.requests).tolist(),
            "phases": alike([words[Phase(p)] for p in plan.phases]), "row_tokens": alike(plan.num_tokens.tolist()),
            "row_keys": plan.num_keys.tolist(),
            "emitted": alike((table["num_tokens"][plan.requests] - before).tolist()),
            "waiting": plan.waiting, "running": plan.running, "pages": plan.pages,
        })  # fmt: skip
        lines += [{"kind": "finish", "request": 100 + int(i), "time": early + now} for i in done]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_client(path: Path, log: Path, outside: float, *, late: float = 0.0) -> Path:
    """What `vllm bench serve` would have written of a log's requests, `outside` s further away than the engine.

    late: s by which its first request was sent after the others' clock.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for step in (line for line in lines if line.get("kind") == "step"):
        for request, emitted in zip(step["requests"], spread(step["emitted"], step["batch"]), strict=True):
            if emitted:
                first.setdefault(request, step["start"] + step["latency"])
                last[request] = step["start"] + step["latency"]
    asked = [line for line in lines if line.get("kind") == "request"]
    rows = [(r, r["arrival"], first[r["request"]], last[r["request"]], r["output_length"] - 1) for r in asked]
    path.write_text(json.dumps({
        "model_id": "m", "completed": len(rows), "total_output_tokens": 1,
        "start_times": [late + at for _, at, *_ in rows],
        "ttfts": [begin - at + outside for _, at, begin, *_ in rows],
        "latencies": [end - at + outside for _, at, _, end, _ in rows],
        "itls": [[(end - begin) / max(1, more)] * more for _, _, begin, end, more in rows],
        "input_lens": [r["input_length"] for r, *_ in rows], "output_lens": [r["output_length"] for r, *_ in rows],
        "errors": [""] * len(rows),
    }))  # fmt: skip
    return path


def alike(column: list[Any]) -> Any:
    """A column of rows as the hooks write it: one value where all rows have the same."""
    return column[0] if column.count(column[0]) == len(column) else column


def spread(column: Any, num: int) -> list[Any]:
    """Such a column, a value for each of `num` rows."""
    return column if isinstance(column, list) else [column] * num


def poisson(num: int, rate: float, seed: int, prompt: int = 60, output: int = 24) -> Trace:
    """Requests of a Poisson process, of uniform lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, num))
    return Trace("drawn", arrival - arrival[0], rng.integers(1, 2 * prompt, num), rng.integers(1, 2 * output, num))
