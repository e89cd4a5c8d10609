"""FOCUS in the twin, from a trace to what its clients see."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.journal import unpack
from dsim.engine.latency import Features, LatencyModel
from dsim.engine.spec import parse
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate

from ..worlds import Collector, journal_bytes, refusal, table_bytes, toy_profile
from .test_twin import crowd

LATENCY = LatencyModel(
    ((8.0, 0.5),), 0.01, attention=1e-4, kv_read=1e-4, head=1e-3, sample=1e-3, launch=0.1, host_step=0.05, early=0.1,
    eviction=0.2,
)  # fmt: skip
PROFILE = toy_profile(latency=LATENCY)
SMALL = ",block_length=8,page_size=8,max_batch=4,num_pages=40"


def run(spec: str, journal: Collector | None = None, **how: Any) -> RunRecords:
    return simulate(crowd(), Setting(parse(spec + SMALL), PROFILE), seed=3, append=journal, **how)


def test_with_a_budget_of_the_whole_block_focus_is_the_delayed_cache_of_dc_plus() -> None:
    # Nothing is ever evicted, so that what an eviction costs is never paid.
    a, b = Collector(), Collector()
    focus, plus = run("focus:8", a), run("delayed-cache-plus", b)
    assert table_bytes(focus.table) == table_bytes(plus.table)
    assert journal_bytes(a) == journal_bytes(b)
    assert focus.totals.evicted == 0


@pytest.mark.parametrize("spec", ["focus", "focus:1", "focus:2"])
def test_every_step_costs_what_its_journal_says_was_computed_and_left(spec: str) -> None:
    journal = Collector()
    result = run(spec, journal)
    s = journal.steps
    gone = s["evicting"]
    assert gone.sum() > (s["evicted"] > 0).sum() > 50  # a choice may keep all, and costs the same
    assert not s["evicted"][~gone].any()
    evictions, offsets = journal.lists["evictions"]
    windows, _ = journal.lists["window"]
    assert not (unpack(evictions[:, None], 8) & ~unpack(windows[:, None], 8)).any()
    for i in np.flatnonzero(gone):
        tokens, pairs, keys, head, sampled, batch = (
            int(s[name][i]) for name in ("tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "batch")
        )
        num = int(s["evicted"][i])
        assert sampled == 8 * batch
        assert num == unpack(evictions[offsets[i] : offsets[i + 1]][:, None], 8).sum()
        evicted = num, int(s["evicted_q_kv"][i]), int(s["evicted_kv"][i]), num
        left = Features(*np.subtract((tokens, pairs, keys, head), evicted).tolist(), sampled, batch, 0)
        assert s["latency"][i] == LATENCY.step(Features(tokens, pairs, keys, head, sampled, batch, 0), left)
    assert not s["evicted"][s["prefill"]].any()
    decode = ~s["prefill"]
    t = result.table
    assert result.totals.evicted == s["evicted"].sum()
    assert result.totals.tokens == s["tokens"][decode].sum()
    assert t["num_computed"].sum() == result.totals.tokens - result.totals.evicted
    assert t["num_committed"].sum() == s["committed"].sum()
    assert (t["status"] == 0).all()


def test_a_profile_without_importance_is_refused_by_name() -> None:
    bare = replace(PROFILE, focus=None)
    said = refusal(ProfileError, lambda: simulate(crowd(), Setting(parse("focus" + SMALL), bare)))
    assert said == (
        f"profile {PROFILE.name} has no importance deltas (focus is null), and focus{SMALL} evicts "
        "by them: expected a profile that does"
    )
    assert simulate(crowd(), Setting(parse("delayed-cache-plus" + SMALL), bare)).totals.committed > 0
