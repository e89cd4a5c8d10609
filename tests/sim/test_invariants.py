"""What must hold whatever the trace, the policy, the pool and the fleet: the design's invariants, on small worlds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.policy import parse
from dsim.engine.step import Phase
from dsim.profiler.profile import Profile
from dsim.sim.routers import ROUTERS
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, TOY_MODEL, Collector, Driver, PlainLoop, table_bytes, toy_profile, toy_trace

PROFILE = toy_profile()
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SPECS = (
    "ar,page_size=8",
    "ar,page_size=1",
    "lmdeploy-bd32:4,page_size=4",
    "lmdeploy-bd32:4,page_size=16",
    "lmdeploy-bd32:8,page_size=8,decide_ahead=false",
    "lmdeploy-bd32:4,page_size=8,num_loops=1",
    "lmdeploy-0.18:4,page_size=4",
    "lmdeploy-0.18:8,page_size=16,prefill_interval=3",
    "chunk:2,block_length=4,page_size=8",
    "chunk:4,block_length=8,page_size=8",
    "chunk:4,block_length=4,page_size=8,num_blocks=2",
    "chunk:2,block_length=8,page_size=8,num_blocks=2",
    "chunk:3,block_length=4,page_size=4",
    "optimus:8,block_length=8,page_size=8",
    "optimus:8,block_length=8,page_size=8,num_blocks=2",
    "optimus:4,block_length=4,page_size=4",
    "multi-block:2,block_length=4,page_size=8",
    "multi-block:3,block_length=4,page_size=4,static=false,num_loops=3,ahead=1",
    "delayed-cache:4,page_size=8",
    "delayed-cache-plus:8,page_size=8",
    "delayed-cache-plus:8,page_size=8,decide_ahead=true",
    "chunk:4,block_length=4,page_size=8,num_loops=none,decide_ahead=true",
    "delayed-cache-plus:4,page_size=8,num_loops=3",
    "focus,block_length=8,page_size=8",
    "focus:1,block_length=4,page_size=8,decide_ahead=true",
    "focus:2.5,block_length=16,page_size=16",
)
# A test of random worlds has parts, none of which takes long; each draws among other policies.
PARTS = 4
CHOICES = st.integers(0, 9)


def spec_of(specs: tuple[str, ...], part: int, choice: int) -> str:
    """The policy of a part's choice."""
    return specs[(PARTS * choice + part) % len(specs)]


@st.composite
def traces(draw: st.DrawFn, most: int = 14, longest: int = 60) -> Trace:
    """Bursts and ties; whole steps apart, so that arrivals and ends of steps coincide too."""
    n = draw(st.integers(1, most))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0, 100.0]), min_size=n, max_size=n))
    length = st.one_of(st.integers(1, longest), st.sampled_from([1, 4, 8, 16]))
    prompts = draw(st.lists(length, min_size=n, max_size=n))
    outputs = draw(st.lists(st.one_of(st.integers(1, longest), st.just(1)), min_size=n, max_size=n))
    arrival = np.cumsum(gaps)
    return toy_trace(arrival - arrival[0], prompts, outputs)


def check_accounts(d: PlainLoop, fits: Any) -> Any:
    """What holds of every engine that has served a trace, of which these requests fit; who of them asked for tokens."""
    t, trace, engine, totals = d.table, d.trace, d.engine, d.engine.totals
    assert (t["status"] == np.where(fits, 0, 1)).all()
    assert sorted(d.ended) == list(range(len(trace)))  # each ended once
    assert (t["num_tokens"] == np.where(fits, trace.output_length, 0)).all()
    assert (engine.pages_held, engine.expected_tokens, engine.idle) == (0, 0, True)
    assert (engine.num_waiting, engine.num_running) == (0, 0)
    some = fits & (trace.output_length > 0)
    for early, late in (
        ("arrival", "scheduled"), ("scheduled", "first_commit"), ("first_commit", "first_block"),
        ("first_block", "finish"), ("first_commit", "first_emission"), ("first_emission", "last_emission"),
        ("last_emission", "finish"),
    ):  # fmt: skip
        assert (t[early][some] <= t[late][some]).all(), (early, late)
    assert totals.num_decode_steps == sum(not p.prefill for p in d.plans)
    assert totals.num_prefill_steps == sum(p.prefill for p in d.plans)
    assert totals.preemptions == t["num_preemptions"].sum() == sum(len(p.preempted) for p in d.plans)
    assert totals.itl.count == np.maximum(t["num_emissions"] - 1, 0).sum()
    assert t["num_forwards"].sum() == totals.forwards
    return some


@pytest.mark.parametrize("part", range(PARTS))
@settings(FEW, max_examples=18)
@given(
    traces(), CHOICES, st.integers(1, 60), st.integers(1, 9), st.sampled_from(["block", "step", "end"]),
    st.sampled_from([16, 64, 4096]),
)  # fmt: skip
def test_an_engine_keeps_its_accounts_at_every_step(
    part: int, trace: Trace, choice: int, num_pages: int, max_batch: int, emit: str, prefill: int
) -> None:
    spec = spec_of(SPECS, part, choice)
    policy = parse(f"{spec},max_prefill_tokens={prefill}")
    d = Driver(policy, trace, num_pages=num_pages, max_batch=max_batch, emit=emit).run()  # checks each step
    t, block = d.table, policy.block_length
    length = trace.input_length + trace.output_length
    canvas = -(-length // block) * block
    reserved = policy.batching.reserved(policy, trace.input_length, trace.output_length)
    fits = -(-reserved // policy.memory.page_size) <= num_pages
    some = check_accounts(d, fits)
    if policy.rows.commits == "masks":
        for i in np.flatnonzero(some):
            assert d.committed[i] == set(range(int(trace.input_length[i]), int(canvas[i])))
        assert (t["num_committed"][some] == (canvas - trace.input_length)[some]).all()
    # Tokens of a prefix may be out before the tail that is trimmed from the last block.
    assert emit == "step" or (t["last_emission"][some] == t["finish"][some]).all()
    assert t["num_computed"].sum() == d.engine.totals.tokens - d.engine.totals.evicted


class Fleet:
    """A simulated run and its journal."""

    def __init__(self, trace: Trace, spec: str, profile: Profile = PROFILE, **how: Any) -> None:
        self.trace, self.spec = trace, spec
        self.journal = Collector()
        self.result: RunRecords = simulate(trace, Setting(parse(spec), profile), append=self.journal, **how)
        self.steps = self.journal.steps if self.journal.parts else None


def fleet_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "replicas": draw(st.integers(1, 3)), "router": draw(st.sampled_from(sorted(ROUTERS))),
        "seed": draw(st.integers(0, 5)), "emit": draw(st.sampled_from(["block", "step", "end"])),
        "concurrency": draw(st.sampled_from([None, None, 1, 3, 8])),
    }  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> tuple[Trace, str, dict[str, Any]]:
    trace = draw(traces())
    page = int(draw(st.sampled_from(SPECS)).partition("page_size=")[2].partition(",")[0])
    spec = draw(st.sampled_from([s for s in SPECS if f"page_size={page}" in s]))
    # At least one request fits; often barely.
    policy = parse(spec)
    least = int(policy.batching.reserved(policy, trace.input_length, trace.output_length).min())
    num_pages = -(-least // page) + draw(st.sampled_from([0, 1, 2, 5, 200]))
    spec += f",num_pages={num_pages},max_batch={draw(st.sampled_from([1, 2, 4, 9]))}"
    return trace, f"{spec},max_prefill_tokens={draw(st.sampled_from([16, 64, 4096]))}", fleet_options(draw)


def check_fleet(result: RunRecords, s: dict[str, Any], served: Any, how: dict[str, Any]) -> None:
    """What holds of every fleet's table and steps; served: the tokens of each request's answer."""
    t = result.table
    assert np.isin(t["status"], (0, 1)).all()
    assert (t["num_tokens"] == np.where(t["status"] == 0, served, 0)).all()
    assert ((t["replica"] >= 0) & (t["replica"] < how["replicas"])).all()
    assert (s["pages"] <= result.limits.num_pages).all()
    assert s["finished"].sum() == (t["status"] == 0).sum()
    assert s["preempted"].sum() == t["num_preemptions"].sum() == result.totals.preemptions
    for r in range(how["replicas"]):
        mine = s["replica"] == r
        assert (s["start"][mine][1:] >= (s["start"] + s["latency"])[mine][:-1]).all()
    if how["concurrency"]:
        busy = (t["arrival"] <= s["start"][:, None]) & (t["finish"] > s["start"][:, None])
        assert busy.sum(axis=1).max() <= how["concurrency"]


@FEW
@given(runs())
def test_a_fleet_loses_no_request_and_no_time(run: tuple[Trace, str, dict[str, Any]]) -> None:
    trace, spec, how = run
    f = Fleet(trace, spec, **how)
    t, n = f.result.table, len(trace)
    assert f.steps is not None
    s = f.steps
    check_fleet(f.result, s, trace.output_length, how)
    values, offsets = f.journal.lists["requests"]
    phases = f.journal.lists["phases"][0]
    # Only rows computed for nothing hold no pages: their requests have ended.
    live = np.logical_or.reduceat(phases != Phase.IDLE, offsets[:-1])
    assert (s["pages"] >= live).all()
    assert (s["running"] <= f.result.limits.max_batch).all()
    assert (np.diff(offsets) == s["batch"]).all()
    for r in range(how["replicas"]):
        mine = np.flatnonzero(s["replica"] == r)
        assert (s["step"][mine] == np.arange(len(mine))).all()
        start, end = s["start"][mine], (s["start"] + s["latency"])[mine]
        assert (s["latency"][mine] > 0).all()
        here = t["replica"] == r
        assert s["submitted"][mine].max(initial=0) <= here.sum()
        # A replica rests only when all that came is done, and wakes with an arrival.
        begins = np.concatenate([[0.0], end])
        for k in np.flatnonzero(np.concatenate([start, [np.inf]]) > begins):
            came = here & (t["arrival"] < begins[k] if k else np.zeros(n, np.bool_)) & (t["status"] == 0)
            assert (t["finish"][came] <= begins[k]).all()
            assert k == len(start) or (t["arrival"][here] == start[k]).any()
        for i in mine:
            rows = values[offsets[i] : offsets[i + 1]]
            assert (t["arrival"][rows] <= s["start"][i]).all()
            assert (t["replica"][rows] == r).all()
            assert s["submitted"][i] == (here & (t["arrival"] <= s["start"][i])).sum() or how["concurrency"]
            done = (t["status"] == 0) & here & (t["finish"] <= s["start"][i])
            rejected = here & (t["status"] == 1) & (t["request"] <= t["request"][here][s["submitted"][i] - 1])
            assert s["waiting"][i] + s["running"][i] == s["submitted"][i] - done.sum() - rejected.sum()
    assert how["concurrency"] or (t["arrival"] == trace.arrival).all()


@settings(FEW, max_examples=20)
@given(traces(), st.sampled_from(SPECS), st.sampled_from([1, 3, 9]), st.sampled_from([0, 2, 200]), st.integers(0, 3))
def test_a_plain_loop_drives_the_engine_to_the_same_table(
    trace: Trace, spec: str, max_batch: int, more: int, seed: int
) -> None:
    policy = parse(spec)
    reserved = policy.batching.reserved(policy, trace.input_length, trace.output_length)
    num_pages = -(-int(reserved.max()) // policy.memory.page_size) + more
    spec += f",num_pages={num_pages},max_batch={max_batch}"
    simulated = simulate(trace, Setting(parse(spec), PROFILE), seed=seed)
    pool = {"num_pages": num_pages, "max_batch": max_batch}
    driven = Driver(parse(spec), trace, **pool, latency=PROFILE.latency, seed=seed, model=TOY_MODEL)
    assert table_bytes(simulated.table) == table_bytes(driven.run().table)


def kinds(spec: str) -> tuple[type, ...]:
    """Of a policy's parts."""
    return tuple(map(type, parse(spec).parts()))


def test_the_parts_of_every_preset_are_among_the_random_policies() -> None:
    assert set(map(kinds, BLOCK_PRESETS)) == set(map(kinds, SPECS))
