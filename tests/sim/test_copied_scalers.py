"""The scalers of examples/scalers: what they answer, by numbers written out by hand, and runs with them."""

import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.sim.scalers import Scaling, scaling
from dsim.sim.scalers.scaler import PoolView, ReplicaLoads

from .test_scalers import POOL, check_burst

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "examples" / "scalers"


def scaling_of(spec: str) -> Scaling:
    """The scaler of a SPEC whose file is in the folder."""
    made = scaling(f"{FOLDER / spec}", allowed([FOLDER / spec.partition(":")[0]]))
    assert made is not None
    return made


def module_of(spec: str) -> ModuleType:
    return sys.modules[type(scaling_of(spec).scaler).__module__]


dynamo, wva = module_of("dynamo.py:DynamoLoad"), module_of("wva_v2.py:WvaV2")


def forecast(name: str, values: Sequence[float]) -> float:
    found = dynamo.predictor(name)
    for value in values:
        found.add(value)
    return float(found.next())


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("constant", [], 0),
        ("constant", [3, 7, nan], 0),  # an interval without data counts as 0
        ("constant", [3, 7, 2], 2),
        ("trend", [0, 0, 10, 12, 14, 16], 16),  # four values: the last one
        ("trend", [0, 0, 10, 12, 14, 16, 18], 20),
        ("trend", [99, *range(10, 30, 2)], 30),  # the last ten
        ("trend", [9, 7, 5, 3, 1], 0),  # never below 0
        ("kalman", [10, 12, 14, 16], 16),
        ("kalman", [5, 5, 5, 5, 5], 5),
    ],
)  # fmt: skip
def test_a_predictor_goes_by_the_values_since_the_first_that_is_not_zero(
    name: str, values: list[float], expected: float
) -> None:
    assert forecast(name, values) == pytest.approx(expected)


def step_time(prefill: Any, kv: Any) -> Any:
    """A step takes 10 ms, 10 us a prompt token and 0.1 us a KV token."""
    return 0.01 + 1e-5 * prefill + 1e-7 * kv


def known_model() -> Any:
    model = dynamo.PerfModel()
    for prefill, kv in ((0, 0), (0, 50_000), (100, 0), (100, 80_000), (50, 20_000)):
        model.add((prefill, kv, step_time(prefill, kv)))
    return model


@pytest.mark.parametrize(
    ("changes", "itl", "expected"),
    [
        # 500 of 1000 prompt tokens are cached, context 1100. 64 rows: 160 prompt tokens and 70,400 KV tokens a step.
        ({}, 0.05, 64 / (200 * 0.01864)),
        # 37 rows take 15.00 ms, 36 take 14.86.
        ({}, 0.01499, 36 / (200 * 0.01486)),
        # No batch is fast enough: the highest rate of all.
        ({}, 0.001, 64 / (200 * 0.01864)),
        # KV for 10 rows: 25 prompt tokens and 11,000 KV tokens a step.
        ({"num_pages": 4 * 688}, 0.05, 10 / (200 * 0.01135)),
        # Two tokens a forward: 320 prompt tokens a step, 20.24 ms for two tokens.
        ({"tokens_per_forward": 2.0}, 0.05, 64 / (200 * 0.01012)),
        # 64 rows need 160 prompt tokens of a step of 200: 64 + 160 are too many; 57 rows and 143 tokens fit.
        ({"max_prefill": 200}, 0.05, 57 / (200 * (0.01 + 0.00143 + 0.00627))),
        # Prompts alone: 16 of 500 tokens in 8192, 90 ms.
        ({"role": "prefill"}, 0.05, 16 / 0.09),
        # Answers alone.
        ({"role": "decode"}, 0.05, 64 / (200 * 0.01704)),
    ],
)
def test_a_replicas_capacity_is_that_of_the_best_batch_that_meets_the_slas(
    changes: dict[str, Any], itl: float, expected: float
) -> None:
    pool = POOL._replace(**changes)
    assert dynamo.capacity(known_model(), pool, dynamo.Work(1000, 200, 0.5), 0.5, itl) == pytest.approx(expected)


def seen(pool: PoolView, queued: float, kv: float) -> PoolView:
    """The pool after steps as known, each replica with the same queue (prompt tokens) and KV tokens."""
    each = np.ones(pool.ready)
    steps = [(0.0, 1e3), (0.0, 5e4), (100.0, 1e3), (100.0, 8e4)]
    prefill, held = (np.resize([step[i] for step in steps], pool.ready) for i in (0, 1))
    return pool._replace(
        input_length=1000.0,
        loads=ReplicaLoads(
            0 * each, queued * each, kv * each, each, step_time(prefill, held), prefill, held, each, each
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "kv", "changes", "expected"),
    [
        # A prompt of 1000 behind 50,000: six chunks of 8192 tokens and one of 1848 take 0.58 s, above the SLA of 0.5 s.
        (50_000, 1000, {}, 5),
        (50_000, 1000, {"starting": 1}, 5),  # one is starting already
        # 3 s of tokens: each replica's ITL is 10 ms and KV's, above 9 ms.
        (0, 50_000, {"itl": 0.009}, 5),
        # Nothing queued, 13 ms a token; with one replica less 4/3 of the load fits easily.
        (0, 20_000, {}, 3),
        # 90,000 x 4/3 tokens do not fit into 110,000.
        (0, 90_000, {}, 4),
        # With 4/3 of 12,000 queued: wait 0.17 s, less than (0.5 - 0.02) x 0.8; ITL of 16,000 + 1,333 + rows fits.
        (12_000, 1000, {}, 3),
        # With 4/3 of 33,000: 0.44 + 0.06 s, more than 0.38.
        (33_000, 1000, {}, 4),
    ],
)
def test_dynamos_load_loop_moves_by_one_where_all_replicas_miss_or_fewer_would_do(
    queued: float, kv: float, changes: dict[str, Any], expected: int
) -> None:
    starting = changes.pop("starting", 0)
    found = dynamo.DynamoLoad(budget=64, **{"itl": 0.05, **changes}).begin()
    quiet = seen(POOL, 0, 30_000)
    found.targets(0, [quiet])  # four samples: nothing is known
    assert list(found.targets(5, [seen(POOL._replace(starting=starting), queued, kv)])) == [expected]


@pytest.mark.parametrize(
    ("mode", "kv", "role", "expected"),
    [
        # Of 110,000 KV tokens; 1000 are queued at each replica, which count where a replica does both.
        ("throughput", 109_100, "both", 5), ("throughput", 108_900, "both", 4), ("throughput", 109_100, "decode", 4),
        ("throughput", 66_000, "decode", 4), ("throughput", 65_900, "decode", 3),
        ("latency", 44_100, "decode", 5), ("latency", 11_000, "decode", 4), ("latency", 10_900, "decode", 3),
        # 1000 of a context of 8192.
        ("throughput", 0, "prefill", 4), ("latency", 0, "prefill", 5),
    ],
)  # fmt: skip
def test_dynamos_thresholds_compare_the_fullest_replica(mode: str, kv: float, role: str, expected: int) -> None:
    found, pool = dynamo.DynamoLoad(budget=64, mode=mode).begin(), seen(POOL._replace(role=role), 1000, kv)
    assert list(found.targets(0, [pool])) == [4]  # nothing was reported yet
    assert list(found.targets(5, [pool])) == [expected]


def test_dynamos_throughput_loop_divides_the_predicted_rate_by_a_replicas() -> None:
    found = dynamo.DynamoThroughput(budget=64, predictor="constant").begin()
    loaded = seen(POOL, 0, 50_000)._replace(submitted=18_000, completed=9, output_length=200.0, hit_rate=0.5)
    assert list(found.targets(180, [loaded])) == [4]  # four samples
    # 100 requests a second over 17.167 of a replica.
    assert list(found.targets(360, [loaded])) == [6]
    assert list(found.targets(540, [loaded._replace(submitted=90_000)])) == [12]  # at most 8 more
    tight = dynamo.DynamoThroughput(budget=5, predictor="constant").begin()
    tight.targets(180, [loaded])
    assert list(tight.targets(360, [loaded])) == [5]


@pytest.mark.parametrize(
    ("targets", "gpus", "budget", "expected"),
    [
        ([3, 4], (1, 1), 8, [3, 4]),
        ([6, 6], (1, 1), 8, [4, 4]),
        ([9, 3], (1, 1), 8, [6, 2]),
        ([9, 1], (1, 2), 8, [6, 1]),  # 11 GPUs: floor(9 x 8 / 11) = 6, which leaves decode its one
        ([20, 1], (1, 4), 8, [4, 1]),  # prefill is bounded so that decode keeps its least
        ([30], (2,), 8, [4]),
    ],
)
def test_a_budget_of_gpus_shrinks_both_pools_in_proportion(
    targets: list[int], gpus: tuple[int, ...], budget: int, expected: list[int]
) -> None:
    pools = [POOL._replace(name=str(i), gpus=count) for i, count in enumerate(gpus)]
    assert dynamo.within_budget(targets, pools, budget, 1) == expected


# ---- llm-d -------------------------------------------------------------------------------------------------------


def holding(kv: float, waiting: float, prompt: float = 1000.0) -> PoolView:
    """Four replicas, each with so many KV tokens held and requests waiting."""
    each = np.ones(4)
    return POOL._replace(
        waiting=int(4 * waiting), queued_tokens=int(4 * waiting * prompt), submitted=1, input_length=prompt,
        expected_length=200.0, loads=ReplicaLoads(waiting * each, waiting * prompt * each, kv * each),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        # k1 = 0.8 x 110,000 = 88,000; k2 = 64 x (1000 + 100) = 70,400: a replica holds 70,400.
        (holding(50_000, 0), 4),  # 200,000 / 0.85 < 4 x 70,400; 200,000 / 0.7 > it
        (holding(70_000, 2), 5),  # 288,000 / 0.85 - 281,600 = 57,224 tokens are missing: one replica
        (holding(100_000, 4), 7),  # 416,000 / 0.85 - 281,600 = 207,812: three
        (holding(30_000, 0), 3),  # spare: 281,600 - 120,000 / 0.7 = 110,171 tokens: one whole replica
        # Six wait: saturated with 60,000 tokens, which are k2. (4 x 66,000) / 0.85 - 240,000 = 70,588: two.
        (holding(60_000, 6), 6),
    ],
)
def test_wva_compares_tokens_in_demand_with_tokens_held(pool: PoolView, expected: int) -> None:
    found = wva.WvaV2(window=0).begin()
    assert list(found.targets(0, [pool])) == [expected]


def test_wva_waits_for_its_window_both_ways() -> None:
    found = wva.WvaV2().begin()
    busy, idle = holding(100_000, 4), holding(0, 0)
    assert list(found.targets(0, [holding(50_000, 0)])) == [4]
    assert list(found.targets(30, [busy])) == [4]
    assert list(found.targets(240, [busy])) == [4]
    assert list(found.targets(270, [busy])) == [7]
    assert list(found.targets(300, [idle])) == [4]


@pytest.mark.parametrize(
    "spec",
    [
        "dynamo.py:DynamoLoad,every=3", "dynamo.py:DynamoLoad,mode=throughput",
        "dynamo.py:DynamoLoad,throughput_every=10", "dynamo.py:DynamoThroughput,every=10",
        "wva_v2.py:WvaV2,every=3,window=9",
    ],
)  # fmt: skip
def test_every_scaler_serves_a_burst_and_gives_the_same_run_again(spec: str) -> None:
    check_burst(scaling_of(spec))
