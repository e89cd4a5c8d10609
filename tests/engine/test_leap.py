"""A leap gives what its steps give one at a time, bit for bit: tables, journals, totals and what Optimus learned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.latency import bucket
from dsim.engine.policy import parse
from dsim.profiler.profile import load
from dsim.sim.twin import Result, simulate
from dsim.traces import synth

POLICIES = (
    "ar", "ar,decide_ahead=true", "lmdeploy-bd32", "lmdeploy-bd32:4", "lmdeploy-bd32,decide_ahead=false",
    "lmdeploy-bd32,num_pages=120,max_batch=16", "sglang-bd32", "chunk:8", "chunk:4,window=in-order", "optimus",
    "optimus,obs=true", "optimus,estimator=literal,hysteresis=0.05,probe_every=7", "optimus,num_pages=120,max_batch=16",
    "optimus,decide_ahead=true", "delayed-cache", "delayed-cache-plus",
)  # fmt: skip
WORLDS: tuple[dict[str, Any], ...] = (
    {"replicas": 2},
    {"replicas": 2, "router": "jsq", "emit": "step"},
    {"concurrency": 20},
    {"emit": "end"},
)


def run(policy: str, fast: bool, world: dict[str, Any], graph_tokens: int = 0) -> tuple[Result, dict[str, Any]]:
    """A replay and its journal, ordered by replica and step."""
    profile = load("a100-sdar-8b")
    profile = replace(profile, latency=replace(profile.latency, graph_tokens=graph_tokens))
    batches: list[Any] = []
    trace = synth("poisson", 5.0, lengths="sharegpt", num_requests=60, seed=4)
    result = simulate(trace, profile, parse(policy), fast=fast, append=lambda c, v: batches.append((c, v)), **world)
    columns = {name: np.concatenate([c[name] for c, _ in batches]) for name in batches[0][0]}
    order = np.lexsort((columns["step"], columns["replica"]))
    journal = {name: column[order] for name, column in columns.items()}
    for name in batches[0][1]:
        parts = [v[name][0][a:b] for _, v in batches for a, b in zip(v[name][1], v[name][1][1:], strict=False)]
        journal[name] = np.concatenate([parts[i] for i in order])
    return result, journal


def compared(policy: str, world: dict[str, Any], graph_tokens: int = 0) -> dict[str, Any]:
    """The journal of a replay, after its every figure was found to be the same without leaps."""
    (leapt, quick), (stepped, plain) = (run(policy, fast, world, graph_tokens) for fast in (True, False))
    assert leapt.end == stepped.end
    for name, column in leapt.table.columns.items():
        np.testing.assert_array_equal(column, stepped.table[name], err_msg=f"{name} {world}")
    for name, values in quick.items():
        np.testing.assert_array_equal(values, plain[name], err_msg=f"{name} {world}")
    for name, total in vars(leapt.totals).items():
        other = getattr(stepped.totals, name)
        if hasattr(total, "counts"):
            for part, value in vars(total).items():
                np.testing.assert_equal(value, getattr(other, part), err_msg=f"{name} {world}")
        else:
            assert total == other, (name, world)
    return quick


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leap_changes_nothing(policy: str) -> None:
    for world in WORLDS:
        compared(policy, world)


@pytest.mark.parametrize("graph_tokens", [1, 300, 8192])
@pytest.mark.parametrize("policy", ["ar", "lmdeploy-bd32", "chunk:8", "optimus", "delayed-cache"])
def test_a_leap_pads_captured_steps_as_a_step_does(policy: str, graph_tokens: int) -> None:
    journal = compared(policy, WORLDS[0], graph_tokens)
    # Steps of fewer tokens than their bucket were among them; a single token is one of its own.
    tokens = journal["tokens"][(journal["prefill"] == 0) & (journal["tokens"] <= graph_tokens)]
    assert graph_tokens == 1 or any(bucket(n) > n for n in tokens.tolist())


def test_steps_do_leap() -> None:
    """Otherwise the test above would compare the plain path with itself."""
    from dsim.engine.engine import Engine

    seen: list[float] = []
    leap = Engine.leap

    def watched(self: Engine, now: float, *rest: Any) -> Any:
        end, done = leap(self, now, *rest)
        seen.append(end - now)
        return end, done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "leap", watched)
        run("optimus", True, WORLDS[0])
    assert sum(t > 0 for t in seen) > 50
