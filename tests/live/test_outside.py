"""Caches from outside on a device: served where it computes their passes, and refused in one line elsewhere."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from dsim.engine.errors import PolicyError
from dsim.engine.hooks import held, work
from dsim.engine.jit import rule
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.fast_dllm import FastCache, all_held
from dsim.engine.policies.focus import Focus
from dsim.engine.policies.llada import NoCache, script
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP
from dsim.engine.policies.sparse_dllm import SparseCache
from dsim.engine.rows.passes import ApproximateCache
from dsim.engine.spec import Policy
from dsim.engine.state import FULL, PARTIAL, REUSE
from dsim.engine.step import Phase
from dsim.live.full_sequence import check_runs, passes_of
from dsim.live.refused import check_policy

from ..checks import cases
from .dense import SMALL
from .watched import LENGTHS, run

STRANGE_PHASE, STRANGE_SIZE, NEVER_FULL = 1, 2, 3


@rule
def refreshed(prompt: Any, length: Any, start: Any, step: Any, block_step: Any, block: Any, fields: Any) -> Any:
    """A full pass every so many steps of a block."""
    if block_step % fields.every == 0 and fields.fault != NEVER_FULL:
        return FULL, length, length
    if fields.fault == STRANGE_PHASE:
        return PARTIAL, block, length
    return REUSE, block - 1 if fields.fault == STRANGE_SIZE else block, length


@dataclass(frozen=True)
class Refreshed(FastCache):
    """Fast-dLLM's cache, refreshed within a block as well."""

    every: int = 2
    fault: int = 0

    overhead = "none"
    rules: ClassVar[dict[Any, Any]] = {work: refreshed, held: all_held}


def policy(every: int, fault: int = 0) -> Policy:
    mine = script("mine", Refreshed(every=every, fault=fault))
    return replace(
        mine, granularity=replace(mine.granularity, block_length=4), memory=replace(mine.memory, page_size=8)
    )


@pytest.mark.slow
def test_a_cache_that_refreshes_every_step_decodes_as_one_that_keeps_nothing() -> None:
    vanilla = replace(policy(every=1), cache=NoCache())
    assert run(policy(every=1), LENGTHS).commits == run(vanilla, LENGTHS).commits


@pytest.mark.slow
def test_a_cache_of_passes_that_the_device_computes_is_served() -> None:
    mine = run(policy(every=2), LENGTHS, poison=True)
    assert {Phase(p) for step in mine.phases for p in step} == {Phase.FULL, Phase.REUSE}


@pytest.mark.slow
@cases(
    "fault says",
    (STRANGE_PHASE, "mine: Refreshed plans PARTIAL of 4 tokens, expected FULL of [10], REUSE of [4, 8]"),
    (STRANGE_SIZE, "mine: Refreshed plans REUSE of 3 tokens, expected FULL of [10], REUSE of [4, 8]"),
    (NEVER_FULL, "mine: Refreshed plans REUSE before any pass that keeps keys, expected one first"),
)
def test_a_pass_that_the_device_does_not_compute_is_one_line(fault: int, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        run(policy(every=2, fault=fault), LENGTHS)
    assert str(caught.value).startswith(says)


@dataclass(frozen=True)
class Unheard(ApproximateCache):
    """A cache that builds on none that the device knows."""


@dataclass(frozen=True)
class Elsewise(Focus):
    """A kind of FOCUS."""


@dataclass(frozen=True)
class Other(DelayedCache):
    """Evicts by a rule of its own."""

    by_importance = True


def test_what_builds_on_a_known_cache_runs_its_passes_and_nothing_else_does() -> None:
    assert passes_of(policy(1)) == passes_of(script("x", FastCache()))
    assert passes_of(script("x", SparseCache())) == {Phase.FULL, Phase.PACK, Phase.REUSE}
    with pytest.raises(PolicyError, match="mine: dsim live cannot run Unheard: expected one of MaskKV, SparseCache, "):
        check_runs(replace(policy(1), cache=Unheard()), SMALL)


def test_an_eviction_by_importance_is_a_kind_of_focus_or_one_line() -> None:
    focus = Policy("mine", EVERY_STEP, eviction=Elsewise())
    check_policy(focus)
    with pytest.raises(PolicyError, match="mine: dsim live cannot evict as Other does: expected a kind of Focus"):
        check_policy(replace(focus, eviction=Other()))
