"""What the requests of a trace begin with: hash_ids, sessions, and what is said where there are none."""

from typing import Any

import numpy as np

from dsim.engine.errors import TraceError
from dsim.traces import Trace, load
from dsim.traces.prefixes import num_named, prefixes_of, warning

from ..checks import cases, refused


def trace(prompts: list[int], answers: list[int], **extras: list[Any]) -> Trace:
    return Trace("toy", np.arange(len(prompts)), np.array(prompts), np.array(answers), extras)


def test_hash_ids_name_a_block_with_all_before_it() -> None:
    # The second 7 follows another block than the first, and is another beginning.
    found = prefixes_of(trace([1000, 1024, 600], [5, 5, 5], hash_ids=[[1, 7], [2, 7], [1]]))
    assert found.block == 512
    assert [found.of(i).tolist() for i in range(3)] == [[0, 1], [2, 3], [0]]
    assert found.named.tolist() == [1000, 1024, 512]
    sized = prefixes_of(trace([100, 33], [5, 5], hash_ids=[["a", "b", "c"], None], block_size=[32, None]))
    assert (sized.block, sized.named.tolist(), sized.of(1).tolist()) == (32, [96, 0], [])


@cases(
    "ids sizes says",
    ([1], [512, 1024], "block_size is 512 and 1024"),
    ([1, 2, 3], [512] * 2, "request 0 has 3 hash_ids for 700"),
)
def test_ids_that_contradict_the_lengths_are_refused(ids: list[int], sizes: list[int], says: str) -> None:
    with refused(f"^toy: {says}", TraceError):
        prefixes_of(trace([700, 700], [5, 5], hash_ids=[ids, ids], block_size=sizes))


def test_a_turn_begins_with_the_turn_before_and_its_answer() -> None:
    # 32 + 16 tokens; then all of them and 10 more; then the prompt alone is repeated; then nothing is.
    found = prefixes_of(trace([32, 58, 60, 20, 32, 32], [16, 16, 4, 4, 1, 1], session_id=["a"] * 4 + ["b", None]))
    assert (found.block, found.named.tolist()) == (16, [48, 74, 64, 24, 33, 0])
    first, second, third, fourth, other = (found.of(i).tolist() for i in range(5))
    assert second[:3] == first == [0, 1, 2]
    assert third[:3] == second[:3]
    assert not set(third[3:]) & set(second)
    assert not set(fourth) & {*first, *second, *third}
    assert not set(other) & {*first, *second, *third, *fourth}


def test_a_trace_without_prefixes_is_warned_of_with_the_count() -> None:
    bare = load("azure-conv")
    assert warning(bare, "round-robin", caches=False) is None
    said = "prefixes are used and {} requests have hash_ids or a session_id"
    assert warning(bare, "jsq", caches=True) == said.format("0 of 19366")
    assert prefixes_of(bare).named.sum() == 0
    half = trace([600, 600], [1, 1], hash_ids=[[1], None])
    assert num_named(half) == 1
    assert warning(half, "prefix", caches=False) == said.format("1 of 2")
    assert warning(load("mooncake-conv"), "prefix", caches=True) is None
