"""Write examples/steplog.jsonl: a synthetic step log, drawn by the twin from a shipped profile and given noise.

    python examples/make_steplog.py [FILE]

No device ran these steps, and the log's header says so. A real engine's log has the same lines (docs/steplog.md).
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.journal import unpack
from dsim.engine.spec import parse
from dsim.engine.step import Phase
from dsim.profiler.calibrate import ALIKE, REACH, pass_table
from dsim.profiler.profile import Profile, load
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import synth

PROFILE = "a100-sdar-8b"
WORKLOAD = "sharegpt-focus"
NUM_REQUESTS = 120
RATE = 20.0  # requests per second
OUTPUT = 96  # tokens
NOISE = 0.02
CHANCE = 0.4071  # of the first mask, at which requests of one kind have the workload's mean
SEED = 1


def of_one_kind(profile: Profile) -> Profile:
    """The profile with requests that are alike: so few as the log has tell a mean of others too roughly."""
    model = profile.commit_model(WORKLOAD, 32, 0.9)
    alike = replace(model, request_spread=ALIKE, pass_probability=pass_table(CHANCE, REACH, 32))
    return replace(profile, commits=(alike,))


def lines() -> Iterator[dict[str, Any]]:
    """The log, line by line."""
    profile = of_one_kind(load(PROFILE))
    policy = parse("lmdeploy-bd32,num_loops=1,decide_ahead=false")
    trace = synth("poisson", RATE, lengths=f"lognormal:200,200,{OUTPUT},40", num_requests=NUM_REQUESTS, seed=SEED)
    yield {
        "schema": "dsim-steplog", "version": 1, "synthetic": True,
        "engine": f"dsim's twin of {profile.implementation}, with {NOISE:.0%} of noise", "device": profile.device.name,
        "memory_bytes": profile.device.memory_bytes, "model": profile.model.name, "block_length": 32,
        "threshold": 0.9, "workload": WORKLOAD, "date": "2026-11-21",
    }  # fmt: skip
    for request, length in enumerate(trace.input_length.tolist()):
        yield {"kind": "request", "request": request, "input_length": length}
    parts: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    simulate(trace, Setting(policy, profile, WORKLOAD), seed=SEED, append=lambda *part: parts.append(part))
    noise = np.random.default_rng(SEED)
    start: dict[int, int] = {}
    left: dict[int, np.ndarray] = {}
    for columns, lists in parts:
        for i in range(len(columns["step"])):
            step = int(columns["step"][i])
            latency = float(columns["latency"][i] * np.exp(NOISE * noise.standard_normal()))
            names = ("batch", "tokens", "sum_kv", "sum_q_kv", "head_rows", "sampled_rows")
            known = {name: int(columns[name][i]) for name in names}
            if columns["prefill"][i]:
                known["prefill_tokens"] = known["tokens"]
            yield {"kind": "step", "step": step, "latency": round(latency, 6), **known}
            own = {name: values[offsets[i] : offsets[i + 1]] for name, (values, offsets) in lists.items()}
            for request, phase, commits in zip(
                own["requests"].tolist(), own["phases"], unpack(own["commits"][:, None], 32), strict=True
            ):
                prompt = int(trace.input_length[request])
                if request not in left:
                    start[request] = max(0, prompt - 1) // 32 * 32
                    left[request] = np.arange(32) >= prompt - start[request]
                if phase in (Phase.FLUSH, Phase.IDLE) or not commits.any():
                    continue
                if not left[request].any():
                    start[request], left[request] = start[request] + 32, np.ones(32, np.bool_)
                left[request] &= ~commits
                yield {
                    "kind": "sequence", "request": request, "step": step, "block_start": start[request],
                    "committed": np.flatnonzero(commits).tolist(),
                }  # fmt: skip


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("steplog.jsonl")
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines()), encoding="utf-8")
    print(f"Wrote {path}")
