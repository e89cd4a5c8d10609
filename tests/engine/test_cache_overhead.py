"""What phases of full-sequence caches cost beyond their features."""

import numpy as np

from dsim.engine import cache_overhead
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.engine.part import ExactCache
from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.step import Phase

from ..worlds import plan_of

LATENCY = LatencyModel(
    ((0.0, 1.0),), 0.0,
    cache_overhead=(
        CacheOverhead("SparseCache", "pack", 0.5, 0.25), CacheOverhead("SparseCache", "reuse", 2.0, 0.0),
        CacheOverhead("MaskKV", "full", 7.0, 1.0),
    ),
)  # fmt: skip


def test_a_cache_has_the_overhead_of_its_own_kind_and_phases() -> None:
    table = cache_overhead.table_of(LATENCY, SparseCache(head_centric=True))
    assert {Phase(i).name: tuple(row) for i, row in enumerate(table.tolist()) if any(row)} == {
        "PACK": (0.5, 0.25), "REUSE": (2.0, 0.0)
    }  # fmt: skip
    assert cache_overhead.table_of(LATENCY, MaskKV(logits="block"))[Phase.FULL].tolist() == [7.0, 1.0]
    # MaskKV is a PeriodicCache, and that is not MaskKV.
    for cache in (PeriodicCache(), ExactCache(), None):
        assert not cache_overhead.table_of(LATENCY, cache).any()


def test_rows_add_up_by_their_phase_and_by_the_length_of_their_request_in_whole_blocks() -> None:
    plan = plan_of(
        phases=np.array([Phase.PACK, Phase.REUSE, Phase.FULL, Phase.PACK], np.uint8),
        prompt=np.array([10, 10, 10, 0], np.int32), end=np.array([15, 15, 15, 0], np.int32),
        window=np.zeros((4, 4), np.bool_),
    )  # fmt: skip
    table = cache_overhead.table_of(LATENCY, SparseCache())
    rows = cache_overhead.of_rows(table, plan.phases, plan.prompt, plan.end, 4)
    assert rows.tolist() == [0.5 + 0.25 * 18, 2.0, 0.0, 0.5]
    assert cache_overhead.of_plan(table, plan) == 7.5
    assert cache_overhead.of_plan(cache_overhead.table_of(LATENCY, None), plan) == 0.0
