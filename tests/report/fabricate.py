"""Runs for looking at reports: the twin's, of a drawn trace under a shipped profile."""

from pathlib import Path
from typing import Any

from dsim.engine.spec import parse
from dsim.profiler.profile import DEFAULT, load
from dsim.report.run_page import run_html
from dsim.results.metrics import Summary, summarize
from dsim.results.run_folder import RunWriter
from dsim.results.run_info import CommitInfo, ProfileInfo, RunInfo, TraceInfo
from dsim.results.slo import Slo
from dsim.results.world import Setup
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import synth

REPLICAS = 2
SLOS = ("ttft=5s", "norm_latency=20ms", "p90:tpot_chunk=80ms")
POLICIES = ("optimus", "chunk:8", "lmdeploy-bd32")
NOBODY: dict[str, str] = {}


def toy_run(spec: str, append: Any = None, *, num_requests: int, rate: float, seed: int = 0) -> RunRecords:
    """Requests of ShareGPT's lengths on two replicas."""
    trace = synth("poisson", rate, num_requests=num_requests, seed=seed, lengths="sharegpt")
    return simulate(trace, Setting(parse(spec), load(DEFAULT)), replicas=REPLICAS, seed=seed, append=append)


def run_info(summaries: list[Summary], num_requests: int, rate: float, slos: tuple[str, ...]) -> RunInfo:
    trace = TraceInfo("fabricated", num_requests, "poisson", rate, skipped_bad=3, sorted_rows=1, hash_ids=True)
    profile = ProfileInfo("made-up", device="no GPU", model="no model", implementation="no engine")
    commits = [
        CommitInfo("optimus", "sharegpt", block_length=32, threshold=0.9),
        CommitInfo("lmdeploy-bd32", "sharegpt", block_length=32, threshold=0.9),
        CommitInfo("chunk:8", "sharegpt", block_length=8, threshold=0.9, extrapolated_from=32),
    ]
    return RunInfo(
        trace=trace, policies=tuple(summaries), profiles={s.policy: profile for s in summaries},
        commit_models=tuple(commits), replicas=REPLICAS, router="round-robin", seed=0, slos=slos,
    )  # fmt: skip


def write_run(
    folder: Path, *, num_requests: int, rate: float, slos: tuple[str, ...] = SLOS, lists: bool = False,
    policies: tuple[str, ...] = POLICIES, names: dict[str, str] = NOBODY,
) -> list[Summary]:  # fmt: skip
    """Write a whole run's folder and give its summaries. names: of policies that are called otherwise."""
    summaries = []
    with RunWriter(folder) as writer:
        for spec in policies:
            name = names.get(spec, spec)
            run = toy_run(
                spec, lambda steps, held: writer.append(name, steps, held if lists else None),  # noqa: B023
                num_requests=num_requests, rate=rate,
            )  # fmt: skip
            writer.requests(name, run.table.columns)
            parsed = [Slo.parse(s) for s in slos]
            summaries.append(summarize(name, run.table.columns, run.totals, parsed, replicas=REPLICAS))
        writer.finish(run_info(summaries, num_requests, rate, slos), run_html)
    return summaries


def setup(**fields: Any) -> Setup:
    values = {
        "dsim": "0", "command": "dsim", "trace": "azure-conv", "traffic": "azure-conv, 10 requests", "trace_sha256": "",
        "arrival": "trace", "profile": "p", "estimated": True, "device": "A100-80GB", "model": "SDAR-8B",
        "profile_version": "0", "workload": None, "frontend": 0.0, "router": "random", "emit": "block",
        "slos": ("ttft=2s",), "seed": 0, "gpu_hour": None, "currency": "USD",
    }  # fmt: skip
    return Setup(**{**values, **fields})
