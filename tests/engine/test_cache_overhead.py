"""What phases of full-sequence caches cost beyond their features."""

from dsim.engine import cache_overhead
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.engine.part import ExactCache
from dsim.engine.policies.dllm_cache import PeriodicCache
from dsim.engine.policies.maskkv import MaskKV
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.step import Phase

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
