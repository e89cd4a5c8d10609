"""Split prefill with prefix caches where requests are decoded: only what a replica lacks travels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.results.parts import parts
from dsim.sim.deciders import least_uncached
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import toy_trace
from .test_split import KV, columns_of, setting

FDFO = "sglang-fdfo,block_length=4,page_size=4"


def named(trace: Trace, names: list[list[int]], block: int = 4) -> Trace:
    return replace(trace, extras={"hash_ids": names, "block_size": [block] * len(trace)})


def split(
    trace: Trace, link: Link, spec: str = FDFO, *, caches: str = "pd", decider: str = "always", num: int = 1,
    router: str = "round-robin", **how: Any,
) -> RunRecords:  # fmt: skip
    p, d = (setting(f"{spec},prefix_caching={str(name in caches).lower()}") for name in "pd")
    fleet = Fleet(
        (Pool(p, 1, "p"), Pool(d, num, "d")), routing(router), links=(link,), least_uncached=least_uncached(decider),
    )  # fmt: skip
    return simulate(trace, fleet, **how)


def of(result: RunRecords, *names: str) -> list[list[Any]]:
    return [columns_of(result)[name].tolist() for name in names]


def test_only_what_the_decoding_replica_lacks_travels() -> None:
    # Request 1 begins with the three pages of request 0; a token takes a quarter of a second.
    trace = named(toy_trace([0, 20, 40], [12, 16, 16], [4, 4, 4]), [[0, 1, 2], [0, 1, 2, 3], [5, 1, 2, 3]])
    result = split(trace, Link(KV * 4.0), caches="d")
    assert of(result, "arrived", "sent", "pages_reserved") == [[12, 16, 16], [12, 4, 16], [3, 4, 4]]
    assert of(result, "transfer_start", "submitted") == [[3, 24, 44], [6, 25, 48]]
    # Nothing is computed less: the prefill pool has no cache.
    assert result.cached_tokens is not None
    assert result.cached_tokens.tolist() == [0, 0, 0]
    without = split(trace, Link(KV * 4.0), caches="")
    assert of(without, "submitted") == [[6, 28, 48]]
    assert "sent" not in (without.moves or {})


@pytest.mark.parametrize(
    ("spec", "second", "sent"),
    [
        (FDFO, 9, 4), ("lmdeploy-0.18,block_length=4,page_size=4", 3.5, 4), ("vllm-ar,page_size=4", 9, 3),
    ],
)  # fmt: skip
def test_pages_of_a_request_that_decodes_still_are_found(spec: str, second: float, sent: int) -> None:
    # LMDeploy's first request is decoded from 4 s on, and pages for the second are reserved at 4.5 s.
    trace = named(toy_trace([0, second], [12, 16], [40, 4]), [[0, 1, 2], [0, 1, 2, 3]])
    result = split(trace, Link(KV * 4.0), spec, caches="d")
    assert result.table["finish"][0] > result.table["finish"][1]
    assert of(result, "sent")[0][1] == sent


def test_what_a_replica_computed_itself_counts_as_cached() -> None:
    # Both are prefilled where they are decoded: of request 1's 16 tokens 8 are there.
    trace = named(toy_trace([0, 30], [8, 16], [4, 4]), [[0, 1], [0, 1, 2, 3]])
    local = split(trace, Link(KV * 4.0), caches="d", decider="uncached,tokens=9")
    assert of(local, "prefill_replica", "sent") == [[-1, -1], [0, 0]]
    never = split(trace, Link(KV * 4.0), caches="", decider="uncached,tokens=9")
    assert of(never, "prefill_replica") == [[-1, 0]]


def test_uncached_counts_what_the_replica_that_has_most_of_a_prompt_lacks() -> None:
    # Requests 0 and 1 go to different replicas; request 2 begins with both pages of request 1.
    trace = named(toy_trace([0, 0, 40], [8, 12, 16], [4] * 3), [[0, 1], [5, 6, 7], [5, 6, 7, 8]])
    for tokens, moved in ((4, 0), (5, -1)):
        result = split(trace, Link(KV * 4.0), caches="d", num=2, decider=f"uncached,tokens={tokens}")
        assert of(result, "prefill_replica")[0][2] == moved, tokens


def tree(seed: int, n: int = 40) -> Trace:
    """Prompts that begin alike: each is a path in a tree of blocks of 16 tokens."""
    rng = np.random.default_rng(seed)
    names: list[list[int]] = []
    for _ in range(n):
        path = [0]
        for _ in range(rng.integers(0, 8)):
            path.append(3 * path[-1] + 1 + int(rng.integers(0, 2)))
        names.append(path)
    arrival = np.cumsum(rng.exponential(0.8, n))
    prompts = [16 * (len(path) - 1) + int(rng.integers(1, 17)) for path in names]
    return named(toy_trace(arrival - arrival[0], prompts, rng.integers(1, 40, n)), names, 16)


@pytest.mark.parametrize(
    "spec",
    [
        "sglang-fdfo,block_length=4,page_size=8", "lmdeploy-0.18,block_length=4,page_size=8", "vllm-ar,page_size=8",
        "vllm-diffusion,canvas_length=4,page_size=8",
    ],
)  # fmt: skip
@pytest.mark.parametrize("pages", [400, 40], ids=["roomy", "crowded"])
def test_requests_are_conserved(spec: str, pages: int) -> None:
    num = 20
    for seed, router in enumerate(("prefix", "least-tokens")):
        trace = tree(seed, num)
        link, spec_of = Link(KV * 300.0, 0.01), f"{spec},num_pages={pages}"
        result = split(trace, link, spec_of, caches="d", num=2, router=router, seed=1)
        assert (result.table["status"] == 0).all()
        columns = columns_of(result)
        found = parts(columns)
        assert np.allclose(sum(found.values()), columns["finish"] - columns["arrival"])
        if pages == 400:
            assert 0 < columns["sent"].sum() < columns["arrived"].sum()
            assert columns["reserved_in_step"].any()
