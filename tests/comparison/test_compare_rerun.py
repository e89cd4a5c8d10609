"""Recorded commits and latencies as rules for another schedule, each answer worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.comparison.latencies import Latencies
from dsim.comparison.recorded_commits import Commits
from dsim.comparison.steps import Journal, Lists, prices
from dsim.engine.journal import STEP_COLUMNS
from dsim.engine.latency import CacheOverhead, Features, LatencyModel
from dsim.engine.spec import parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.profiler.profile import load
from dsim.results.run import Columns
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace

from ..checks import cases
from ..report.fixtures import request_columns
from ..worlds import plan_of

MASKED, PENDING = 0, 1


def blocks(start: int, computed: list[int], evaluations: list[int], masked: list[int] | None = None) -> StepPlan:
    """A plan of request 0's block of four at `start`: marks of the columns computed, and of those that are masks."""
    return plan_of(
        requests=np.zeros(1, np.int32),
        window=np.array([computed], np.bool_),
        status=np.where(np.array([masked or [1, 1, 1, 1]], np.bool_), MASKED, PENDING).astype(np.uint8),
        evaluations=np.array([evaluations], np.uint16),
        block_start=np.array([start], np.int32),
    )


def committing(columns: list[int]) -> StepOutcome:
    """What came of a plan: the columns committed."""
    return StepOutcome(1.0, np.isin(np.arange(4)[None], columns))


def committed(commits: Commits, plan: StepPlan) -> list[list[bool]]:
    return commits.of(plan).tolist()


@pytest.fixture
def commits() -> Commits:
    """Request 0: a prompt of 6, so that its blocks begin at 4 and 8. At 4, columns 2 and 3 commit first and third."""
    seen = Commits(request_columns([{"input_length": 6, "output_length": 6}]), parse("lmdeploy-bd32:4"), 4)
    seen.record(blocks(4, [1, 1, 1, 1], [0, 0, 0, 0]), committing([2]))
    seen.record(blocks(4, [1, 1, 1, 1], [0, 0, 0, 2]), committing([3]))
    return seen


def test_a_position_commits_at_the_evaluation_of_the_record_whenever_that_comes(commits: Commits) -> None:
    assert committed(commits, blocks(4, [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1])) == [[False, False, True, False]]
    assert committed(commits, blocks(4, [0, 0, 1, 1], [0, 0, 0, 2], [0, 0, 1, 1])) == [[False, False, True, True]]
    assert commits.counts.tolist() == [2, 0, 4, 0]


def test_where_none_is_due_the_soonest_commits(commits: Commits) -> None:
    assert committed(commits, blocks(4, [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1])) == [[False, False, False, True]]
    assert commits.counts.tolist() == [1, 1, 1, 0]


def test_a_position_without_a_record_takes_the_median(commits: Commits) -> None:
    # The median of 0 and 2 is 1.
    assert committed(commits, blocks(8, [1, 1, 0, 0], [1, 0, 0, 0])) == [[True, False, False, False]]
    assert commits.counts.tolist() == [1, 0, 2, 2]


def test_what_is_no_mask_never_commits(commits: Commits) -> None:
    assert committed(commits, blocks(4, [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1])) == [[False] * 4]
    assert commits.counts.tolist() == [0, 0, 0, 0]


MODEL = LatencyModel(((0.0, 0.0),), 0.001)  # 1 ms a token
CHUNK = parse("chunk:2,block_length=4")
NOBODY: Columns = {}  # whose requests they are matters to no policy without a full-sequence cache


def steps_of(tokens: list[int], latency: list[float], **more: list[int]) -> Columns:
    """Decode steps of one row."""
    one = [1] * len(tokens)
    columns = {"tokens": tokens, "latency": latency, "batch": one, "num_forwards": one} | more
    return {name: np.array(columns.get(name, [0] * len(tokens)), kind) for name, kind in STEP_COLUMNS.items()}


def of_one(*tokens: int) -> Lists:
    """The rows of steps of request 7 alone."""
    ends = np.arange(len(tokens) + 1)
    return {"requests": (np.full(len(tokens), 7, np.int32), ends), "num_tokens": (np.array(tokens, np.int32), ends)}


def recorded(tokens: list[int], latency: list[float], logged: bool = False, **more: list[int]) -> Latencies:
    journal = Journal(steps_of(tokens, latency, **more), of_one(*tokens), NOBODY)
    return Latencies(MODEL, journal, CHUNK, logged=logged)


def step(tokens: int, request: int = 7, prefill: bool = False, keys: int = 0) -> StepPlan:
    features = Features(tokens, tokens * keys, keys, 0, 0, 1, tokens if prefill else 0)
    return plan_of(
        prefill=prefill, features=features, requests=np.array([request], np.int32), num_tokens=np.array([tokens])
    )


def test_the_same_step_takes_what_it_took_the_nth_time_and_then_the_mean() -> None:
    latencies = recorded([4, 8, 4], [0.010, 0.5, 0.030])
    assert [latencies(step(4)) for _ in range(3)] == [0.010, 0.030, 0.020]
    assert latencies(step(8)) == 0.5
    latencies.restart()
    assert latencies(step(4)) == 0.010
    assert (latencies.num_steps, latencies.num_nearest) == (5, 0)


def test_a_logs_step_is_told_by_its_rows_and_keys_however_its_engine_counts_heads_and_pairs() -> None:
    # An engine's log counts one head a row, a causal block's pairs, and keys without the step's own tokens.
    latencies = recorded([4] * 3, [0.01, 0.02, 0.03], True, head_rows=[1] * 3, sum_q_kv=[6, 30, 90], sum_kv=[4, 16, 60])
    assert [latencies(step(4, keys=keys)) for keys in (64, 20, 8, 16)] == [0.03, 0.02, 0.01, 0.02]
    assert latencies.num_nearest == 0
    # Keys of another block, other prompt tokens, or other tokens in a row are another step.
    for other in (step(4, keys=40), step(4, keys=4, prefill=True), step(3, keys=4)):
        latencies(other)
    assert latencies.num_nearest == 3


def test_an_eviction_is_priced_with_the_tokens_that_it_left() -> None:
    steps = steps_of([8, 8], [0.5, 0.2], head_rows=[8, 8], evicting=[0, 1], evicted=[0, 6])
    model = replace(MODEL, early=0.25, eviction=0.001)
    journal = Journal(steps, of_one(8, 8), NOBODY)
    assert prices(model, journal, CHUNK).tolist() == pytest.approx([0.008, 0.25 * 0.008 + 0.75 * 0.002 + 0.001])


def test_a_step_that_was_never_recorded_takes_the_nearest_ones_correction() -> None:
    # Eight steps of 4 tokens took twice their price, and eight of 400 three times.
    latencies = recorded([4] * 8 + [400] * 8, [0.008] * 8 + [1.2] * 8)
    assert latencies(step(5)) == pytest.approx(2 * 0.005)
    assert latencies(step(300)) == pytest.approx(3 * 0.3)
    assert latencies(step(4, request=1)) == pytest.approx(2 * 0.004)
    assert latencies(step(4, prefill=True)) == pytest.approx(2 * 0.004)  # no prefill was recorded
    assert latencies.num_nearest == 4


def test_rows_of_full_sequence_caches_are_priced_with_their_cache_overhead() -> None:
    steps = steps_of([3, 1], [19.006, 4.002])
    cache_overhead = (CacheOverhead("SparseCache", "pack", 0.5, 0.25), CacheOverhead("SparseCache", "reuse", 2.0, 0.0))
    model, policy = replace(MODEL, cache_overhead=cache_overhead), parse("sparse-dllm,block_length=4")
    # Requests 5 and 3 in the first step, 3 alone in the second; 5 is of 20 tokens and 8, 3 of 10 and 5.
    ends = np.array([0, 2, 3])
    phases = np.array([Phase.PACK, Phase.REUSE, Phase.REUSE], np.uint8)
    lists = {
        "requests": (np.array([5, 3, 3], np.int32), ends), "phases": (phases, ends),
        "num_tokens": (np.array([2, 1, 1]), ends),
    }  # fmt: skip
    requests = {"request": np.array([3, 5]), "input_length": np.array([10, 20]), "max_tokens": np.array([5, 8])}
    journal = Journal(steps, lists, requests)
    assert prices(model, journal, policy).tolist() == pytest.approx([0.003 + 0.5 + 0.25 * 28 + 2, 2.001])
    # A step that was never recorded takes its own overhead, corrected by what the others took: twice their prices.
    latencies = Latencies(model, journal, policy)
    plan = plan_of(
        prefill=False, features=Features(2, 0, 0, 0, 0, 1, 0), requests=np.array([9], np.int32),
        phases=np.array([Phase.PACK], np.uint8), num_tokens=np.array([2]), prompt=np.array([2]), end=np.array([6]),
        window=np.zeros((1, 4)),
    )  # fmt: skip
    assert latencies(plan) == pytest.approx(2 * (0.002 + 0.5 + 0.25 * 6), rel=1e-3)


@cases("spec", "vllm-ar,max_num_batched_tokens=64", "vllm-ar,async_scheduling=false", "ar")
def test_a_recorded_run_of_the_twin_is_priced_as_it_was(spec: str) -> None:
    # Captured decode steps are padded and host time overlaps: mixed steps and steps decided ahead are told apart.
    latency = LatencyModel(((1.0, 0.004),), 1e-4, launch=0.001, host_step=0.006, graph_tokens=16, overlap=True)
    profile, policy = replace(load("a100-sdar-8b"), latency=latency), parse(spec)
    trace = Trace("six", np.arange(6) * 0.02, np.full(6, 40), np.full(6, 9))
    parts: list[tuple[Columns, Lists]] = []
    run = simulate(trace, Setting(policy, profile), append=lambda columns, lists: parts.append((columns, lists)))
    [(steps, lists)] = parts
    found = prices(latency, Journal(steps, lists, run.table.columns), policy)
    assert found == pytest.approx(steps["latency"], rel=1e-12)
