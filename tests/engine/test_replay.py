"""The keystone: a journal fed to fresh engines reproduces every plan exactly, and a tampered one does not."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.journal import RequestTable, pack, unpack
from dsim.engine.replay import replay
from dsim.engine.spec import parse
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, Collector, table_bytes, toy_profile, toy_trace

PROFILE = toy_profile()
SMALL = ",page_size=8,max_batch=4,num_pages=64,max_prefill_tokens=64"
BLOCK4 = ",block_length=4"


def busy() -> Trace:
    """Bursts of requests, some at the same moment, one longer than a prefill and some for one token."""
    rng, n = np.random.default_rng(0), 25
    arrival = np.cumsum(rng.choice([0.0, 0.5, 1.0, 25.0], n, p=[0.4, 0.2, 0.2, 0.2]))
    prompts, outputs = rng.integers(1, 50, n), rng.integers(1, 40, n)
    prompts[3], prompts[5], outputs[7], outputs[8] = 150, 1, 1, 1
    return toy_trace(arrival - arrival[0], prompts, outputs)


@dataclass
class Run:
    """A recorded run, and everything a fresh engine is built from."""

    spec: str
    result: RunRecords
    steps: dict[str, npt.NDArray[Any]]
    lists: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
    how: dict[str, Any]

    def differences(self) -> tuple[list[str], RequestTable]:
        table = RequestTable(len(self.result.table["request"]))
        found: list[str] = []
        emitted = {name: self.how[name] for name in ("emit", "eos") if name in self.how}
        for r in range(self.how.get("replicas", 1)):
            setting = Setting(parse(self.spec), PROFILE)
            engine = setting.engine(table, replica=r, limits=self.result.limits, **emitted)
            found.extend(replay(engine, r, self.result.table.columns, self.steps, self.lists))
        return found, table


def record(spec: str, trace: Trace | None = None, **how: Any) -> Run:
    journal = Collector()
    result = simulate(trace or busy(), Setting(parse(spec), PROFILE), append=journal, seed=3, **how)
    return Run(spec, result, journal.steps, journal.lists, how)


SPECS = [
    *(name + SMALL + (BLOCK4 if name != "ar" else "") for name in BLOCK_PRESETS),
    "lmdeploy-bd32" + SMALL + BLOCK4 + ",decide_ahead=false",
    "lmdeploy-bd32" + SMALL + BLOCK4 + ",num_loops=1",
    "chunk:2" + SMALL + BLOCK4 + ",num_blocks=2",
    "chunk:4" + SMALL + BLOCK4 + ",num_blocks=2",
    "chunk:4" + SMALL + BLOCK4 + ",num_loops=none,decide_ahead=true",
    "delayed-cache-plus" + SMALL + BLOCK4 + ",num_loops=3",
    "optimus" + SMALL + ",block_length=8",
    "optimus" + SMALL + ",block_length=8,num_blocks=2",
]


SHORT = toy_trace([0, 0, 7], [5, 8, 3], [9, 6, 8])
FITTING = busy().take(np.flatnonzero((busy().input_length + busy().output_length) <= 88))
DIFFUSION = "vllm-diffusion,canvas_length=4,page_size=4,max_num_seqs=2,max_num_batched_tokens=16,num_pages=64"
EVICTING = "focus:1" + SMALL + BLOCK4


def asked(**columns: list[Any]) -> Trace:
    """SHORT with wishes of its requests."""
    return replace(SHORT, extras=columns)


RUNS: list[tuple[str, Trace | None, dict[str, Any]]] = [
    *((spec, None, {}) for spec in SPECS),
    *((spec.replace("num_pages=64", "num_pages=12"), FITTING, {}) for spec in SPECS[: len(BLOCK_PRESETS)]),
    *((SPECS[1], None, how) for how in ({"replicas": 2}, {"concurrency": 3}, {"drain": False})),
    (SPECS[4], None, {"replicas": 2, "concurrency": 5, "router": "jsq"}),
    *((SPECS[3], None, {"emit": emit}) for emit in ("step", "end")),
    *((spec, None, {}) for spec in (EVICTING, "focus:2" + SMALL + BLOCK4)),
    (DIFFUSION, None, {}),
    ("vllm-ar,max_num_seqs=2,page_size=4,num_pages=64", asked(max_tokens=SHORT.output_length.tolist()), {"eos": True}),
    ("vllm-ar,max_num_seqs=2,page_size=4,num_pages=64", SHORT, {"eos": True}),
]


@pytest.mark.parametrize(("spec", "trace", "how"), RUNS, ids=[f"{spec} {how}" for spec, _, how in RUNS])
def test_a_journal_replays_plan_for_plan(spec: str, trace: Trace | None, how: dict[str, Any]) -> None:
    run = record(spec, trace, **how)
    found, table = run.differences()
    assert found == []
    totals, drained = run.result.totals, how.get("drain", True)
    # And all that became of the requests.
    assert (table_bytes(table) == table_bytes(run.result.table)) == drained
    assert (run.result.table["status"] == 2).any() != drained
    assert totals.preemptions > 0 or trace is not FITTING
    assert run.steps["evicted"].sum() > 20 or not spec.startswith("focus")
    assert trace is not None or (totals.num_decode_steps > 20 and totals.num_prefill_steps > 5)


@cache
def _recorded(spec: str) -> Run:
    return record(spec, SHORT)


def short(spec: str) -> Run:
    """A short run, of which everything may be changed."""
    run = copy(_recorded(spec))
    run.steps, run.lists = dict(run.steps), dict(run.lists)
    return run


def bits(run: Run, name: str, step: int) -> npt.NDArray[np.bool_]:
    values, offsets = run.lists[name]
    return unpack(values[offsets[step] : offsets[step + 1]][:, None], 4)


def turn(run: Run, name: str, step: int, row: int, column: int) -> None:
    """Turn one bit of a step over."""
    values, offsets = run.lists[name]
    values = values.copy()
    values[offsets[step] + row] ^= values.dtype.type(1 << column)
    run.lists[name] = values, offsets


def drop(run: Run, step: int) -> None:
    """Leave a step out."""
    keep = np.arange(len(run.steps["step"])) != step
    run.steps = {name: values[keep] for name, values in run.steps.items()}
    lists = {}
    for name, (values, offsets) in run.lists.items():
        parts = [values[offsets[i] : offsets[i + 1]] for i in np.flatnonzero(keep)]
        lists[name] = (np.concatenate(parts), np.concatenate([[0], np.cumsum([len(p) for p in parts])]))
    run.lists = lists


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1], SPECS[2], SPECS[3], SPECS[6]])
def test_a_dropped_step_is_noticed(spec: str) -> None:
    num_steps = len(short(spec).steps["step"])
    for step in range(num_steps):
        run = short(spec)
        drop(run, step)
        assert run.differences()[0], f"step {step} of {num_steps}"


COLUMNS = (
    "batch", "chunk", "tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "pages", "committed", "preempted"
)  # fmt: skip
EVICTED_COLUMNS = ("evicting", "evicted", "evicted_q_kv", "evicted_kv", "evicted_sampled")


@pytest.mark.parametrize(
    ("spec", "column"), [*((SPECS[3], name) for name in COLUMNS), *((EVICTING, name) for name in EVICTED_COLUMNS)]
)
def test_a_changed_column_is_named(spec: str, column: str) -> None:
    run = short(spec)
    step = int(np.flatnonzero(run.steps["evicted"])[2]) if spec == EVICTING else 4
    values = run.steps[column].copy()
    values[step] = not values[step] if column == "evicting" else values[step] + 1
    run.steps[column] = values
    (found,) = run.differences()[0]
    assert found.startswith(f"replica 0, step {step}: {column} is ")


@pytest.mark.parametrize("name", ["requests", "phases", "num_tokens", "window"])
def test_a_changed_row_is_named(name: str) -> None:
    run = short(SPECS[3])
    turn(run, name, step=4, row=0, column=0)
    assert run.differences()[0][0].startswith(f"replica 0, step 4: {name} is ")


@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2], SPECS[6]])
def test_any_commit_bit_that_is_flipped_is_noticed(spec: str) -> None:
    _, offsets = short(spec).lists["commits"]
    for step, row in ((s, r) for s in range(len(offsets) - 1) for r in range(offsets[s + 1] - offsets[s])):
        for column in range(4):
            run = short(spec)
            turn(run, "commits", step, row, column)
            assert run.differences()[0], (step, row, column)


def test_a_journal_of_other_requests_of_another_policy_or_with_evictions_of_none_does_not_replay() -> None:
    run = short(SPECS[3])
    run.steps["submitted"] = run.steps["submitted"] + 9
    assert run.differences()[0] == ["replica 0, step 0: 11 requests are submitted, the journal has 3"]
    run = short(SPECS[3])
    run.spec = SPECS[6]
    assert run.differences()[0]
    run = short("focus:4" + SMALL + BLOCK4)
    assert not run.steps["evicting"].any()
    step = int(np.flatnonzero(~run.steps["prefill"])[0])
    turn(run, "evictions", step, *np.argwhere(bits(run, "window", step))[0])
    assert "are not all of masks that may be evicted" in run.differences()[0][0]


@pytest.mark.parametrize("width", [1, 2, 32, 63, 64, 65, 128])
def test_marks_survive_their_packing(width: int) -> None:
    marks = np.random.default_rng(width).random((5, width)) < 0.5
    words = pack(marks)
    assert words.shape == (5, -(-width // 64))
    assert np.array_equal(unpack(words, width), marks)
    assert bool(words[0, 0] >> np.uint64(0) & np.uint64(1)) == marks[0, 0]
