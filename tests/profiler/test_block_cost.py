"""The cost of a block: charged in the step with its last mask, and recovered from a log that was drawn with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.latency import Features, LatencyModel
from dsim.engine.policy import parse
from dsim.profiler.profile import load
from dsim.profiler.steplog import StepLog, profile_of_log, read_log
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import Collector, toy_trace

BLOCK_COST = 0.0075  # s
KNOWN = LatencyModel(((32.0, 0.005), (512.0, 0.012)), 3e-5, attention=1e-9, host_request=2e-4, host_block=BLOCK_COST)


# Prompts of 40 tokens and answers of 100: blocks from 32 to 160.
BLOCKS = {"lmdeploy-bd32": 4, "sglang-fdfo,threshold=0.9": 4, "chunk:8": 4, "optimus,obs=true": 4, "ar": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "num_blocks"), BLOCKS.items())
def test_each_block_of_a_request_is_paid_once(spec: str, num_blocks: int) -> None:
    plain = load("a100-sdar-8b")
    dear = replace(plain, latency=replace(plain.latency, host_block=1.0))
    for num_requests in (1, 600):  # step by step in Python, and compiled
        trace = toy_trace([1e4 * i for i in range(num_requests)], [40] * num_requests, [100] * num_requests)
        totals = []
        for profile in (plain, dear):
            journal = Collector()
            simulate(trace, Setting(parse(spec), profile), append=journal)
            totals.append(journal.steps["latency"].sum())
        assert totals[1] - totals[0] == pytest.approx(num_blocks * num_requests, rel=1e-9)


def test_a_whole_forward_of_one_block_takes_what_the_report_s_runs_took() -> None:
    found = load("h100-llada2.1-mini/sglang")
    assert found.latency.step(Features(32, 32 * 400, 400, 32, 32, 1, 0)) == pytest.approx(0.005, rel=1e-4)


def drawn(late: bool) -> list[dict[str, Any]]:
    """A log of 150 requests of three blocks each, of which 1 to 12 decode at once; late: a flush hands a block out."""
    rng = np.random.default_rng(7)
    header = {
        "schema": "dsim-steplog", "version": 1, "synthetic": True, "engine": "drawn", "device": "H100",
        "memory_bytes": 80_000_000_000, "model": "SDAR-8B", "block_length": 32, "threshold": 0.9, "workload": "drawn",
    }  # fmt: skip
    lines: list[dict[str, Any]] = [header]
    lines += [
        {"kind": "request", "request": r, "input_length": int(n)} for r, n in enumerate(rng.integers(40, 900, 150))
    ]
    prompts, left = [line["input_length"] for line in lines[1:]], {r: [3, 0] for r in range(150)}  # blocks, masks
    now, step = 0.0, 0
    while left:
        rows = list(left)[: int(rng.integers(1, 13))]
        phases, emitted, keys, done = [], [], [], 0
        for r in rows:
            blocks, masks = left[r]
            flushes = masks < 0
            masks = masks if masks else 32
            if not flushes:
                masks = max(0, masks - int(rng.integers(1, 20)))
                done += masks == 0
            phases.append("flush" if flushes else "denoise")
            handed_out = flushes if late else masks == 0
            emitted.append(32 * handed_out)
            keys.append(prompts[r] + 32 * (4 - blocks))
            if handed_out:
                left[r] = [blocks - 1, 0]
                if blocks == 1:
                    del left[r]
            else:
                left[r] = [blocks, -1 if masks == 0 else masks]
        f = Features(32 * len(rows), 32 * sum(keys), sum(keys), 32 * len(rows), 32 * len(rows), len(rows), 0)
        latency = KNOWN.step(f) + BLOCK_COST * done
        latency *= float(np.exp(0.01 * rng.standard_normal()))
        lines.append({
            "kind": "step", "step": step, "start": now, "latency": latency, "batch": len(rows), "tokens": f.tokens,
            "sum_kv": f.sum_kv, "sum_q_kv": f.sum_q_kv, "requests": rows, "phases": phases, "row_tokens": 32,
            "row_keys": keys, "emitted": emitted,
        })  # fmt: skip
        now, step = now + latency, step + 1
    return lines


def read(tmp_path: Path, lines: list[dict[str, Any]]) -> StepLog:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return read_log(path)


@pytest.mark.parametrize("late", [False, True])
def test_the_cost_of_a_block_is_recovered_from_a_log_that_was_drawn_with_it(tmp_path: Path, late: bool) -> None:
    log = read(tmp_path, drawn(late))
    assert log.steps.blocks.sum() == 450
    found = profile_of_log(log, "mine", "log")
    assert found.latency.host_block == pytest.approx(BLOCK_COST, rel=0.05)
    assert found.fit.standard_errors is not None
    assert found.fit.standard_errors["host_block"] < 0.05 * BLOCK_COST
    forward = Features(128, 128 * 500, 4 * 500, 128, 128, 4, 0)
    assert found.latency.step(forward) == pytest.approx(KNOWN.step(forward), rel=0.03)


def test_a_log_whose_tokens_leave_before_their_block_is_done_says_nothing_of_a_block(tmp_path: Path) -> None:
    lines = drawn(late=False)
    for line in lines:
        if line["kind" if "kind" in line else "schema"] == "step":
            line["emitted"] = [max(1, tokens) for tokens in line["emitted"]]
    log = read(tmp_path, lines)
    assert not log.steps.blocks.any()
    assert profile_of_log(log, "mine", "log").latency.host_block == 0.0
