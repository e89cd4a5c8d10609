"""Hashes of whole runs: `python -m tests.engine.golden --write` takes them anew.

A cell is a policy in a world: how tokens are handed out, which router, how much memory, an open or a closed loop. Its
hash covers the request table, the journal (ordered by replica and step) and the totals, bit for bit.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw, CommitModel
from dsim.engine.core import answers_of
from dsim.engine.latency import CacheOverhead
from dsim.engine.spec import PRESETS, Policy, parse
from dsim.profiler.calibrate import pass_table
from dsim.profiler.profile import Profile, load
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace, synth

FILE = Path(__file__).with_name("golden.json")

EMIT = ("block", "step", "end")
LOOPS: tuple[dict[str, Any], ...] = (
    {"router": "round-robin"},
    {"router": "jsq"},
    {"router": "least-tokens"},
    {"concurrency": 9, "replicas": 1},
    {"concurrency": 9},
)
# Beside every preset with its defaults: the fields that change what a step does.
VARIANTS = (
    "ar,decide_ahead=true", "ar:3", "lmdeploy-bd32:4", "lmdeploy-bd32,decide_ahead=false", "lmdeploy-bd32,num_loops=3",
    "lmdeploy-bd32,num_loops=1", "chunk:8,num_loops=4", "chunk:6,num_blocks=2",
    "optimus,num_blocks=2",
    "optimus,decide_ahead=true", "optimus,num_loops=5,num_blocks=2", "delayed-cache,num_loops=6", "focus:1.2",
    "focus:1.0", "fast-dllm:prefix",
    "sparse-dllm,max_batch=4,denoising_steps=5", "vanilla:3",
    "dllm-cache,prompt_refresh=5,response_refresh=3,max_batch=2", "maskkv:16,logits=all", "dllm-serve,look_ahead=true",
    "dllm-serve,max_batch=4",
    "dllm-serve,denoising_steps=12,block_length=16", "vllm-ar,drafter=eagle", "vllm-ar,drafter=dflash",
    "vllm-ar,drafter=dspark,adaptive_verification=true",
)  # fmt: skip


# Production engines, of which fewer cells are kept: pages that are too few for all, and who ends at an EOS.
ENGINES = {
    "lmdeploy-0.18": ",num_pages=11", "vllm-ar": ",num_pages=40", "vllm-ar,drafter=eagle": ",num_pages=40",
    "vllm-diffusion": ",num_pages=60", "sglang-fdfo": ",num_pages=20", "sglang-sync": ",num_pages=20",
    "sglang-joint": ",num_pages=20", "sglang-indel": ",num_pages=20", "sglang-gemma": ",num_pages=5",
}  # fmt: skip


def worlds(spec: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The name, the full SPEC and the arguments of each world of a policy."""
    policy = parse(spec)
    tight = f",num_pages={1536 // policy.memory.page_size if policy.family == 'full-sequence' else 11}"
    if spec in ENGINES:
        for emit, memory in (("step", ""), ("block", ENGINES[spec])):
            yield f"{spec}{memory} emit={emit} eos", spec + memory, {"emit": emit, "replicas": 2, "eos": True}
        yield f"{spec} concurrency=9", spec, {"emit": "step", "concurrency": 9}
        return
    presets = spec in PRESETS
    for emit, loop, memory in product(EMIT, LOOPS, ("", tight)):
        if not presets and (emit != "step" or loop not in (LOOPS[0], LOOPS[1])):
            continue
        how = {"emit": emit, "replicas": 2, **loop}
        name = f"{spec}{memory} " + " ".join(f"{key}={value}" for key, value in how.items())
        yield name, spec + memory, how


# Quick tests run these presets compiled and all others in plain Python. Each kind of rows has at least one: blocks,
# passes, tokens, chunks, canvases.
COMPILED = ("optimus", "chunk", "dllm-serve", "ar", "vllm-ar", "vllm-diffusion")


@cache
def _compiled_answers() -> list[dict[Any, Any]]:
    return [answers_of(parse(preset)) for preset in COMPILED]


def is_compiled(answers: Mapping[Any, Any]) -> bool:
    """Whether a policy's answers are those of one of COMPILED, so that it runs the same compiled code."""
    return answers in _compiled_answers()


def in_lanes(specs: Iterable[str]) -> list[Any]:
    """Policies as parameters of a test of compiled code: those that need other code than COMPILED are slow."""
    slow = pytest.mark.slow
    return [spec if is_compiled(answers_of(parse(spec))) else pytest.param(spec, marks=slow) for spec in specs]


def chosen_worlds(spec: str) -> list[tuple[str, str, dict[str, Any]]]:
    """At most six worlds of a policy, for the quick tests.

    A preset's six have each `emit` with each memory, and each loop. All presets together have every pair of loop and
    `emit`, and of loop and memory.
    """
    every = list(worlds(spec))
    if spec in ENGINES:
        return every
    if spec in VARIANTS:
        return every[::7]
    first = list(PRESETS).index(spec)
    return [every[(i % 3) * 10 + ((i + first) % 5) * 2 + (i // 3) % 2] for i in range(6)]


def trace_of(full_sequence: bool) -> Trace:
    rate = 4.0 if full_sequence else 25.0
    return synth("poisson", rate, lengths="lognormal:90,70,80,60", num_requests=30, seed=4)


def profile_name(policy: Policy) -> str:
    return "l40s-llada-8b" if policy.family == "full-sequence" else "a100-sdar-8b"


def profile_of(policy: Policy, **latency_changes: Any) -> Profile:
    """The profile of a policy's runs; where blocks commit by a law, with one."""
    profile = load(profile_name(policy))
    law = CanvasLaw("golden", policy.block_length, 5.0, request_spread=0.3, canvas_spread=0.3, drift=1.1, most=12)
    laws = (law,) if policy.unmasking.strategy == "law" else ()
    # The shipped profile as it was: its dense passes were priced like short windows, and requests differed less.
    latency = replace(profile.latency, **{"dense": 1.0, **latency_changes})
    return replace(profile, latency=latency, canvas_laws=laws, commits=_commits(policy.family == "full-sequence"))


def _commits(full_sequence: bool) -> tuple[CommitModel, ...]:
    """Commit models by threshold: the chance at the frontier, how far it reaches, and how steps differ."""
    tables = {
        True: {0.9: (0.65951, 8.0, 1.03), 0.8: (0.84658, 8.0, 1.28), 0.7: (0.807, 15.36, 0.78),
               0.6: (0.87842, 18.51, 0.84), 0.5: (0.9265, 21.03, 0.91)},
        False: {0.9: (0.86142, 8.0, 1.28)},
    }[full_sequence]  # fmt: skip
    return tuple(
        CommitModel("golden", 32, threshold, None, pass_table(p0, reach, 32), 0.35, 0.25, step)
        for threshold, (p0, reach, step) in tables.items()
    )


def run(spec: str, how: dict[str, Any], **latency_changes: Any) -> tuple[RunRecords, list[Any]]:
    """A run and its journal's batches."""
    policy = parse(spec)
    profile = profile_of(policy, **latency_changes)
    batches: list[Any] = []
    result = simulate(
        trace_of(policy.family == "full-sequence"),
        Setting(policy, profile),
        seed=3,
        append=lambda c, v: batches.append((c, v)),
        **how,
    )
    return result, batches


# Of requests, of steps, 0 or NaN here, and of totals: added after the hashes were taken. The end is the journal's.
YOUNGER = {
    "max_tokens", "limited", "canvas_length", "estimate", "priority", "deadline",
    "window_q_kv", "window_kv", "draft_tokens", "continues", "threshold", "end", "prefix_queries", "prefix_hits",
}  # fmt: skip


def digest(result: RunRecords, batches: list[Any]) -> str:
    """The hash of a run: table, journal, totals and end."""
    h = hashlib.sha256()
    for name, column in result.table.columns.items():
        if name in YOUNGER:
            continue
        h.update(name.encode() + column.tobytes())
    columns = {name: np.concatenate([c[name] for c, _ in batches]) for name in batches[0][0]}
    order = np.lexsort((columns["step"], columns["replica"]))
    for name, column in columns.items():
        if name not in YOUNGER:
            h.update(name.encode() + column[order].tobytes())
    for name in batches[0][1]:
        parts = [v[name][0][a:b] for _, v in batches for a, b in zip(v[name][1], v[name][1][1:], strict=False)]
        h.update(name.encode() + np.concatenate([parts[i] for i in order]).tobytes())
    for name, total in sorted(vars(result.totals).items()):
        if name in YOUNGER:
            continue
        if hasattr(total, "counts"):
            for part, value in sorted(vars(total).items()):
                if isinstance(value, np.ndarray):
                    value = np.flatnonzero(value).tolist(), value[value != 0].tolist()
                if isinstance(value, dict):
                    value = sorted((int(k), int(n)) for k, n in value.items())
                h.update(f"{name}.{part}={value!r}".encode())
        else:
            h.update(f"{name}={total!r}".encode())
    h.update(repr(result.end).encode())
    return h.hexdigest()[:12]


def cells(specs: tuple[str, ...] = (*PRESETS, *VARIANTS)) -> Iterator[tuple[str, str]]:
    """The name and the hash of every cell of these policies."""
    for spec in specs:
        for name, full, how in worlds(spec):
            yield name, digest(*run(full, how))
    for name, changes in PROFILES.items():
        spec = name.split(" ")[0]
        if spec in specs:
            yield name, digest(*run(spec, {"replicas": 2}, **changes))


PROFILES: dict[str, dict[str, Any]] = {
    **{
        f"{spec} graph_tokens=300": {"graph_tokens": 300}
        for spec in ("ar", "lmdeploy-bd32", "chunk", "optimus", "focus")
    },
    "sparse-dllm cache_overhead": {
        "cache_overhead": (
            CacheOverhead("SparseCache", "pack", 0.003, 1e-5),
            CacheOverhead("SparseCache", "reuse", 0.001, 2e-6),
        )
    },
    "dllm-serve cache_overhead": {"cache_overhead": (CacheOverhead("SparseCache", "pack", 0.003, 1e-5),)},
}


def recorded() -> dict[str, str]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    found = {}
    known = recorded() if FILE.exists() else {}
    for name, value in cells(tuple(sys.argv[2:]) or (*PRESETS, *VARIANTS)):
        found[name] = value
        if known.get(name) != value:
            print("differs" if name in known else "new", name, flush=True)
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found if len(sys.argv) == 2 else known | found, indent=0) + "\n", encoding="utf-8")
    print(len(found), "cells")
