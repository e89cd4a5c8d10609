"""The keystone: a journal fed to fresh engines reproduces every plan exactly, and a tampered one does not."""

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable, pack, unpack
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.sim.setting import Setting
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, Collector, table_bytes, toy_profile, toy_trace

PROFILE = toy_profile()
SMALL = ",page_size=8,max_batch=4,num_pages=64,max_prefill_tokens=64"
BLOCK4 = ",block_length=4"


def busy(n: int = 25, seed: int = 0) -> Trace:
    """Bursts of requests, some at the same moment, one longer than a prefill and some for one token or none."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.choice([0.0, 0.5, 1.0, 25.0], n, p=[0.4, 0.2, 0.2, 0.2]))
    prompts, outputs = rng.integers(1, 50, n), rng.integers(1, 40, n)
    prompts[3], prompts[5], outputs[7], outputs[8] = 150, 1, 1, 0
    return toy_trace(arrival - arrival[0], prompts, outputs)


@dataclass
class Run:
    """A recorded run, and everything a fresh engine is built from."""

    spec: str
    result: Result
    journal: Collector
    replicas: int
    emit: str
    eos: bool = False
    steps: dict[str, npt.NDArray[Any]] = field(init=False)
    lists: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps, self.lists = self.journal.steps, self.journal.lists

    def differences(self) -> tuple[list[str], RequestTable]:
        table = RequestTable(len(self.result.table["request"]))
        found: list[str] = []
        for r in range(self.replicas):
            policy, limits = parse(self.spec), self.result.limits
            engine = Engine(
                policy, limits, table, replica=r, latency=PROFILE.latency, emit=self.emit, eos=self.eos
            )  # fmt: skip
            found.extend(replay(engine, r, self.result.table.columns, self.steps, self.lists))
        return found, table


def record(spec: str, trace: Trace | None = None, *, replicas: int = 1, emit: str = "block", **how: Any) -> Run:
    journal = Collector()
    result = simulate(
        trace or busy(), Setting(parse(spec), PROFILE), replicas=replicas, emit=emit, append=journal, seed=3, **how
    )
    return Run(spec, result, journal, replicas, emit, how.get("eos", False))


SPECS = [
    *(name + SMALL + (BLOCK4 if name != "ar" else "") for name in BLOCK_PRESETS),
    "lmdeploy-bd32" + SMALL + BLOCK4 + ",decide_ahead=false",
    "lmdeploy-bd32" + SMALL + BLOCK4 + ",num_loops=1",
    "chunk:2" + SMALL + BLOCK4 + ",obs=true",
    "chunk:4" + SMALL + BLOCK4 + ",obs=true,window=in-order",
    "chunk:2" + SMALL + BLOCK4 + ",window=in-order",
    "chunk:4" + SMALL + BLOCK4 + ",neighbour_aware=true",
    "chunk:4" + SMALL + BLOCK4 + ",num_loops=none,decide_ahead=true",
    "delayed-cache-plus" + SMALL + BLOCK4 + ",num_loops=3",
    "optimus" + SMALL + ",block_length=8,estimator=literal,cold_start=4,probe_every=5",
    "optimus" + SMALL + ",block_length=8,obs=true,hysteresis=0.05,memory=10",
    "optimus" + SMALL + ",block_length=8,window=in-order,candidates=2/3/8",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_journal_replays_plan_for_plan(spec: str) -> None:
    run = record(spec)
    found, table = run.differences()
    assert found == []
    # And all that became of the requests.
    assert table_bytes(table) == table_bytes(run.result.table)
    assert run.result.totals.num_decode_steps > 20
    assert run.result.totals.num_prefill_steps > 5


@pytest.mark.parametrize("spec", SPECS[: len(BLOCK_PRESETS)])
def test_a_journal_of_a_pool_that_preempts_replays_plan_for_plan(spec: str) -> None:
    trace = busy()
    fits = (trace.input_length + trace.output_length) <= 88
    run = record(spec.replace("num_pages=64", "num_pages=12"), trace.take(np.flatnonzero(fits)))
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)
    assert run.result.totals.preemptions > 0


@pytest.mark.parametrize(
    "how", [{"replicas": 2}, {"concurrency": 3}, {"replicas": 2, "concurrency": 5, "router": "jsq"}]
)
@pytest.mark.parametrize("spec", [SPECS[1], SPECS[4]])
def test_journals_of_several_replicas_and_of_a_closed_loop_replay_plan_for_plan(spec: str, how: dict[str, Any]) -> None:
    run = record(spec, **how)
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)


@pytest.mark.parametrize("emit", ["block", "step", "end"])
def test_a_journal_replays_whatever_is_emitted(emit: str) -> None:
    run = record(SPECS[3], emit=emit)
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)


def test_a_journal_of_a_run_that_was_not_drained_replays() -> None:
    run = record(SPECS[1], drain=False)
    assert (run.result.table["status"] == 2).any()
    assert run.differences()[0] == []


SHORT = toy_trace([0, 0, 7], [5, 8, 3], [9, 6, 8])


@cache
def _recorded(spec: str) -> Run:
    return record(spec, SHORT)


def short(spec: str) -> Run:
    """A short run, of which everything may be changed."""
    run = copy(_recorded(spec))
    run.steps, run.lists = dict(run.steps), dict(run.lists)
    return run


@pytest.mark.parametrize("narrow", [[2, None, 3], [None, 1, None]])
def test_a_journal_of_narrower_canvases_replays_plan_for_plan(narrow: list[int | None]) -> None:
    spec = "vllm-diffusion,canvas_length=4,page_size=4,max_num_seqs=2,max_num_batched_tokens=16,num_pages=64"
    run = record(spec, replace(SHORT, extras={"diffusion_canvas_length": narrow}))
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)


def test_a_journal_of_read_only_requests_replays_plan_for_plan() -> None:
    spec = "vllm-diffusion,canvas_length=4,page_size=4,max_num_seqs=2,max_num_batched_tokens=16,num_pages=64"
    short = replace(SHORT, output_length=np.minimum(SHORT.output_length, 4))
    run = record(spec, replace(short, extras={"diffusion_read_only": [True, None, True]}))
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)


@pytest.mark.parametrize("limited", [True, False])
def test_a_journal_says_whether_limits_that_equal_the_answers_were_known(limited: bool) -> None:
    limits = {"max_tokens": SHORT.output_length.tolist()} if limited else {}
    run = record("vllm-ar,max_num_seqs=2,page_size=4,num_pages=64", replace(SHORT, extras=limits), eos=True)
    found, table = run.differences()
    assert found == []
    assert table_bytes(table) == table_bytes(run.result.table)
    assert (run.result.table["limited"] == limited).all()


def bits(run: Run, name: str, step: int) -> npt.NDArray[np.bool_]:
    values, offsets = run.lists[name]
    return unpack(values[offsets[step] : offsets[step + 1]][:, None], 4)


def turn(run: Run, name: str, step: int, row: int, column: int) -> None:
    """Turn one bit of a step over."""
    values, offsets = run.lists[name]
    values = values.copy()
    values[offsets[step] + row] ^= np.uint64(1 << column)
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


@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_column_is_named(column: str) -> None:
    run = short(SPECS[3])
    values = run.steps[column].copy()
    values[4] += 1
    run.steps[column] = values
    found = run.differences()[0]
    assert len(found) == 1
    assert found[0].startswith(f"replica 0, step 4: {column} is ")


def test_more_requests_than_the_journal_has_are_told_of() -> None:
    run = record(SPECS[3], SHORT)
    run.steps["submitted"] = run.steps["submitted"] + 9
    assert run.differences()[0] == ["replica 0, step 0: 11 requests are submitted, the journal has 3"]


@pytest.mark.parametrize("name", ["requests", "phases", "num_tokens", "window"])
def test_a_changed_row_is_named(name: str) -> None:
    run = short(SPECS[3])
    values, offsets = run.lists[name]
    values = values.copy()
    values[offsets[4]] ^= 1
    run.lists[name] = (values, offsets)
    assert run.differences()[0][0].startswith(f"replica 0, step 4: {name} are ")


EVICTING = "focus:1" + SMALL + BLOCK4
EVICTED_COLUMNS = ("evicting", "evicted", "evicted_q_kv", "evicted_kv", "evicted_sampled")


def test_an_eviction_of_what_is_no_mask_is_told_in_one_line() -> None:
    journal = short(EVICTING)
    tried = 0
    for step in np.flatnonzero(~journal.steps["prefill"]):
        window = bits(journal, "window", step)
        for row, column in np.argwhere(~bits(journal, "evictions", step)):
            run = short(EVICTING)
            turn(run, "evictions", step, row, column)
            found = run.differences()[0]
            # Outside the window or committed: refused. A mask: another count, or the commit of an evicted one.
            assert found, (step, row, column)
            where = f"replica 0, step {run.steps['step'][step]}: "
            assert found[0].startswith(where)
            if not window[row, column]:
                assert "are not all of masks that may be evicted" in found[0]
            if "are not all of" in found[0]:
                assert sum(line.startswith("replica 0, step") for line in found) == 1
                tried += 1
    assert tried > 30


def test_an_evicted_mask_that_commits_is_told_in_one_line() -> None:
    journal = short(EVICTING)
    steps = np.flatnonzero(journal.steps["evicted"])
    assert len(steps) > 3
    for step in steps:
        for row, column in np.argwhere(bits(journal, "evictions", step)):
            run = short(EVICTING)
            turn(run, "commits", step, row, column)
            found = run.differences()[0]
            said = run.lists["commits"][0][run.lists["commits"][1][step] : run.lists["commits"][1][step + 1]].tolist()
            assert found[0] == f"replica 0, step {step}: commits {said} are not all of computed masks"
            assert sum(line.startswith("replica 0, step") for line in found) == 1


def test_an_eviction_that_is_taken_back_is_noticed() -> None:
    journal = short(EVICTING)
    for step in np.flatnonzero(journal.steps["evicted"]):
        for row, column in np.argwhere(bits(journal, "evictions", step)):
            run = short(EVICTING)
            turn(run, "evictions", step, row, column)
            assert run.differences()[0][0].startswith(f"replica 0, step {step}: evicted is ")


@pytest.mark.parametrize("column", EVICTED_COLUMNS)
def test_a_changed_column_of_an_eviction_is_named(column: str) -> None:
    run = short(EVICTING)
    step = np.flatnonzero(run.steps["evicted"])[2]
    values = run.steps[column].copy()
    values[step] = not values[step] if column == "evicting" else values[step] + 1
    run.steps[column] = values
    found = run.differences()[0]
    assert len(found) == 1
    assert found[0].startswith(f"replica 0, step {step}: {column} is ")


def test_a_step_that_could_evict_nothing_evicts_nothing() -> None:
    run = short("focus:4" + SMALL + BLOCK4)
    assert not run.steps["evicting"].any()
    step = int(np.flatnonzero(~run.steps["prefill"])[0])
    row, column = np.argwhere(bits(run, "window", step))[0]
    turn(run, "evictions", step, row, column)
    assert "are not all of masks that may be evicted" in run.differences()[0][0]


@pytest.mark.parametrize("spec", [EVICTING, "focus:2,scope=carry,exact_block=true" + SMALL + BLOCK4])
def test_a_journal_that_evicts_replays_plan_for_plan(spec: str) -> None:
    run = record(spec)
    assert run.steps["evicted"].sum() > 20
    assert run.differences()[0] == []


def test_a_journal_of_another_policy_does_not_replay() -> None:
    run = record(SPECS[3])
    run.spec = SPECS[6]
    assert run.differences()[0]


@pytest.mark.parametrize("width", [1, 2, 32, 63, 64, 65, 128])
def test_marks_survive_their_packing(width: int) -> None:
    marks = np.random.default_rng(width).random((5, width)) < 0.5
    words = pack(marks)
    assert words.shape == (5, -(-width // 64))
    assert np.array_equal(unpack(words, width), marks)
    assert bool(words[0, 0] >> np.uint64(0) & np.uint64(1)) == marks[0, 0]


@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2], SPECS[6]])
def test_any_commit_bit_that_is_flipped_is_noticed(spec: str) -> None:
    journal = short(spec)
    _, offsets = journal.lists["commits"]
    missed = []
    for step in range(len(journal.steps["step"])):
        for row in range(offsets[step + 1] - offsets[step]):
            for column in range(4):
                run = short(spec)
                turn(run, "commits", step, row, column)
                if not run.differences()[0]:
                    missed.append((step, row, column))
    assert missed == []
