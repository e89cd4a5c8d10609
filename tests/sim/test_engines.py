"""What must hold whatever the trace, the policy, the pool and the fleet: the design's invariants, on small worlds."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.latency import LatencyModel
from dsim.engine.spec import name_of, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.engine.window_pages import have_room
from dsim.profiler.models import Windowed
from dsim.sim.routers import ROUTERS
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import (
    BLOCK_PRESETS,
    ENGINE_PRESETS,
    TOY_MODEL,
    Collector,
    Driver,
    PlainLoop,
    differences,
    table_bytes,
    toy_profile,
    toy_trace,
)

PLAIN = toy_profile()
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
BLOCK_SPECS = (
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
def traces(draw: st.DrawFn, most: int = 14) -> Trace:
    """Bursts and ties; whole steps apart, so that arrivals and ends of steps coincide too."""
    n = draw(st.integers(1, most))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0, 100.0]), min_size=n, max_size=n))
    length = st.one_of(st.integers(1, 60), st.sampled_from([1, 4, 8, 16]))
    prompts = draw(st.lists(length, min_size=n, max_size=n))
    outputs = draw(st.lists(st.one_of(st.integers(1, 60), st.just(1)), min_size=n, max_size=n))
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
def test_a_block_engine_keeps_its_accounts_at_every_step(
    part: int, trace: Trace, choice: int, num_pages: int, max_batch: int, emit: str, prefill: int
) -> None:
    spec = spec_of(BLOCK_SPECS, part, choice)
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


def fleet_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "replicas": draw(st.integers(1, 3)), "router": draw(st.sampled_from(sorted(ROUTERS))),
        "seed": draw(st.integers(0, 5)), "emit": draw(st.sampled_from(["block", "step", "end"])),
        "concurrency": draw(st.sampled_from([None, None, 1, 3, 8])),
    }  # fmt: skip


@st.composite
def block_runs(draw: st.DrawFn) -> tuple[Trace, str, dict[str, Any]]:
    trace = draw(traces())
    page = int(draw(st.sampled_from(BLOCK_SPECS)).partition("page_size=")[2].partition(",")[0])
    spec = draw(st.sampled_from([s for s in BLOCK_SPECS if f"page_size={page}" in s]))
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
        here = t["replica"] == r
        for i in np.flatnonzero(mine):
            done = (t["status"] == 0) & here & (t["finish"] <= s["start"][i])
            rejected = here & (t["status"] == 1) & (t["request"] <= t["request"][here][s["submitted"][i] - 1])
            assert s["waiting"][i] + s["running"][i] == s["submitted"][i] - done.sum() - rejected.sum()
    if how["concurrency"]:
        busy = (t["arrival"] <= s["start"][:, None]) & (t["finish"] > s["start"][:, None])
        assert busy.sum(axis=1).max() <= how["concurrency"]


@FEW
@given(block_runs())
def test_a_fleet_loses_no_request_and_no_time(run: tuple[Trace, str, dict[str, Any]]) -> None:
    trace, spec, how = run
    journal = Collector()
    result = simulate(trace, Setting(parse(spec), PLAIN), append=journal, **how)
    t, n, s = result.table, len(trace), journal.steps
    check_fleet(result, s, trace.output_length, how)
    values, offsets = journal.lists["requests"]
    phases = journal.lists["phases"][0]
    # Only rows computed for nothing hold no pages: their requests have ended.
    live = np.logical_or.reduceat(phases != Phase.IDLE, offsets[:-1])
    assert (s["pages"] >= live).all()
    assert (s["running"] <= result.limits.max_batch).all()
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
    assert how["concurrency"] or (t["arrival"] == trace.arrival).all()


@settings(FEW, max_examples=20)
@given(
    traces(), st.sampled_from(BLOCK_SPECS), st.sampled_from([1, 3, 9]), st.sampled_from([0, 2, 200]), st.integers(0, 3)
)
def test_a_plain_loop_drives_the_engine_to_the_same_table(
    trace: Trace, spec: str, max_batch: int, more: int, seed: int
) -> None:
    policy = parse(spec)
    reserved = policy.batching.reserved(policy, trace.input_length, trace.output_length)
    num_pages = -(-int(reserved.max()) // policy.memory.page_size) + more
    spec += f",num_pages={num_pages},max_batch={max_batch}"
    simulated = simulate(trace, Setting(parse(spec), PLAIN), seed=seed)
    pool = {"num_pages": num_pages, "max_batch": max_batch}
    driven = Driver(parse(spec), trace, **pool, latency=PLAIN.latency, seed=seed, model=TOY_MODEL)
    assert table_bytes(simulated.table) == table_bytes(driven.run().table)


def kinds(spec: str) -> tuple[type, ...]:
    """Of a policy's parts."""
    return tuple(map(type, parse(spec).parts()))


def test_the_parts_of_every_preset_are_among_the_random_policies() -> None:
    assert set(map(kinds, BLOCK_PRESETS)) == set(map(kinds, BLOCK_SPECS))
    assert set(map(kinds, ENGINE_PRESETS)) == set(map(kinds, SPECS))


WINDOW = 6  # tokens that some of the layers see
WINDOWS = {"window": WINDOW, "window_bytes": 3, "kv_bytes": 2}  # ... and keep pages for, one and a half times as large
OVERLAP = LatencyModel(
    ((8.0, 1.0), (64.0, 2.0)), 0.05, attention=1e-4, host_step=0.4, host_request=0.1, overlap=True,
    window_attention=1e-3, window_kv_read=1e-2, window=WINDOW,
)  # fmt: skip
TOY = toy_profile(latency=OVERLAP)
PROFILE = replace(TOY, model=replace(TOY.model, windowed=Windowed(2, 8, 128, WINDOW)))
_KV = PROFILE.memory.kv_bytes_per_token
PAGED = replace(PROFILE, memory=replace(PROFILE.memory, window_bytes_per_token=3 * _KV // 2))  # ... and hold pages
# Of each preset the fields that change what a step is; pages that are no multiple of a block, where none need be.
SPECS = (
    "vllm-ar,page_size=8",
    "vllm-ar,page_size=1,async_scheduling=false,long_prefill_token_threshold=5",
    "vllm-ar,drafter=dflash,num_speculative_tokens=3,page_size=4",
    "vllm-ar,drafter=eagle,num_speculative_tokens=2,page_size=3,async_scheduling=false,acceptance=0.9",
    "vllm-diffusion,canvas_length=4,page_size=3",
    "vllm-diffusion,canvas_length=4,page_size=8,async_scheduling=false,long_prefill_token_threshold=5",
    "sglang-fdfo,block_length=4,page_size=4",
    "sglang-sync,block_length=4,page_size=4",
    "sglang-joint,block_length=4,page_size=4",
    "sglang-joint,block_length=4,page_size=8,dllm_fdfo=false",
    "sglang-indel,block_length=4,page_size=4",
    "sglang-gemma,canvas_length=4,page_size=3",
    "sglang-gemma,canvas_length=4,page_size=4",
    "sglang-gemma,canvas_length=4,page_size=8,dllm_fdfo=false",
)
ROWS = {"vllm": "max_num_seqs", "sglang": "max_running_requests"}  # a preset's field of rows, by its engine
TOKENS = {"vllm": "max_num_batched_tokens", "sglang": "max_prefill_tokens"}


def sized(spec: str, rows: int, tokens: int, pages: int) -> str:
    engine = spec.partition("-")[0]
    return f"{spec},{ROWS[engine]}={rows},{TOKENS[engine]}={max(tokens, rows)},num_pages={pages}"


class EngineDriver(Driver):
    """A plain loop that looks into the engine at every step."""

    def _check(self, plan: StepPlan, outcome: StepOutcome) -> None:
        engine, policy, batching = self.engine, self.policy, self.policy.batching
        q, page = engine._arrays.sequences, policy.memory.page_size
        assert max(plan.features.batch, plan.running) <= self.limits.max_batch
        assert (q["pages"] + q["window_pages"]).sum() == engine.pages_held == plan.pages <= self.limits.num_pages
        # Keys lie on pages that are held, unless the pages of a step in flight are the next one's.
        kept = ~np.isin(plan.requests, plan.preempted) & (plan.phases != Phase.IDLE)
        assert (plan.num_keys <= q["pages"][plan.slots] * page)[kept].all()
        assert have_room(engine._fixed, q["pages"].sum(), q["window_pages"].sum())
        self._check_pages_ahead(plan)
        if self.limits.window and not policy.batching.hides_host:
            self._check_window_pages(plan, kept)
        assert plan.num_tokens.sum() == plan.features.tokens
        assert plan.num_keys.sum() == plan.features.sum_kv
        assert np.minimum(plan.num_keys, plan.num_tokens + WINDOW).sum() == plan.features.window_kv
        assert self._pairs_in_sight(plan) == plan.features.window_q_kv
        prompts = plan.num_tokens[plan.phases == Phase.PREFILL].sum()
        assert prompts <= plan.features.prefill_tokens <= plan.features.tokens
        assert plan.prefill == (plan.features.prefill_tokens == plan.features.tokens)
        live = plan.phases != Phase.IDLE
        assert not set(plan.requests[live].tolist()) & set(self.ended)
        assert not plan.window[~live].any()
        if not name_of(policy.name).startswith("vllm"):  # a round is of those that stay
            assert not set(plan.preempted) & set(plan.requests.tolist())
        if hasattr(batching, "max_num_batched_tokens"):
            assert plan.features.tokens <= batching.max_num_batched_tokens
        elif not plan.prefill:
            assert not np.isin(plan.phases, (Phase.PREFILL,)).any()
            assert policy.granularity.on_a_grid or not (plan.phases == Phase.FLUSH).any()
        for row, request in enumerate(plan.requests.tolist()):
            found = np.flatnonzero(outcome.committed[row])
            self.committed[request] |= {int(plan.block_start[row]) + int(p) for p in found}

    def _check_window_pages(self, plan: StepPlan, kept: npt.NDArray[np.bool_]) -> None:
        """What a row computes and what its first query sees in the layers with a window lies on pages held for it."""
        page, held = self.policy.memory.page_size, self.engine._arrays.sequences["window_pages"]
        for row in np.flatnonzero(kept & (plan.phases != Phase.IDLE)).tolist():
            keys = int(plan.num_keys[row])
            seen = range(max(0, keys - int(plan.num_tokens[row]) - WINDOW + 1), keys)
            pages = len({position // page for position in seen})
            assert 2 * held[plan.slots[row]] >= 3 * pages

    def _pairs_in_sight(self, plan: StepPlan) -> int:
        """Query-key pairs of the layers with a window, position by position."""
        num = 0
        for n, keys, phase in zip(plan.num_tokens.tolist(), plan.num_keys.tolist(), plan.phases.tolist(), strict=True):
            causal = (self.policy.rows.commits == "tokens") or phase in (Phase.PREFILL, Phase.FLUSH)
            for query in range(keys - n, keys):
                first, end = (query + 1 - WINDOW, query + 1) if causal else (keys - n - WINDOW, keys)
                num += end - max(0, first)
        return num


@pytest.mark.parametrize("part", range(PARTS))
@settings(FEW, max_examples=16)
@given(
    traces(), CHOICES, st.integers(1, 60), st.integers(1, 9), st.sampled_from(["block", "step", "end"]),
    st.sampled_from([9, 16, 64, 4096]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_an_engine_keeps_its_accounts_at_every_step(
    part: int, trace: Trace, choice: int, num_pages: int, rows: int, emit: str, tokens: int, eos: bool, windows: bool
) -> None:
    spec = spec_of(SPECS, part, choice)
    policy, given = parse(sized(spec, rows, tokens, num_pages)), WINDOWS if windows else {}
    d = EngineDriver(
        policy, trace, num_pages=num_pages, max_batch=rows, latency=OVERLAP, emit=emit, eos=eos, windows=given
    ).run()
    t, block = d.table, policy.block_length
    reserved = policy.batching.reserved(policy, trace.input_length, trace.output_length)
    fits = -(-reserved // policy.memory.page_size) <= num_pages
    if windows:  # whoever could come to hold more than the pool is refused, and nobody else
        fits &= [have_room(d.engine._fixed, *d.engine.most_pages(trace.request(i))) for i in range(len(trace))]
    some = check_accounts(d, fits)
    assert d.engine._counters["num_free"] == len(d.engine._arrays.sequences)
    # A budget may cut vLLM's canvases, which then commit a part: that the answer is whole says check_accounts.
    if policy.rows.commits == "masks" and not (spec.startswith("vllm") and tokens < 2 * rows * block):
        before = 0 if policy.granularity.on_a_grid else trace.input_length
        ends = before + -(-(trace.input_length + trace.output_length - before) // block) * block
        for i in np.flatnonzero(some):
            assert d.committed[i] == set(range(int(trace.input_length[i]), int(ends[i])))
        assert (t["num_committed"][some] >= (ends - trace.input_length)[some]).all()
        once = some & (t["num_preemptions"] == 0)
        assert (t["num_committed"][once] == (ends - trace.input_length)[once]).all()
    assert (t["last_emission"][some] == t["finish"][some]).all()
    totals = d.engine.totals
    # Nobody gives way where the pool has all that the requests could come to hold together.
    most_pages = np.array([d.engine.most_pages(trace.request(i)) for i in np.flatnonzero(fits).tolist()])
    assert totals.preemptions == 0 or not have_room(d.engine._fixed, *most_pages.sum(axis=0))
    assert t["num_computed"].sum() == totals.tokens
    assert totals.tokens + totals.prefill_tokens == sum(p.features.tokens for p in d.plans)
    # Looking ahead, a limit is seen coming, but where drafts that are accepted bring it nearer, and behind a canvas.
    if not eos and name_of(spec) == "vllm-ar" and policy.width == 1:
        idle = [r for p in d.plans for r in p.requests[p.phases == Phase.IDLE].tolist()]
        assert (trace.output_length[idle] == 0).all()


@st.composite
def runs(draw: st.DrawFn) -> tuple[Trace, str, dict[str, Any]]:
    trace = draw(traces())
    spec = draw(st.sampled_from(SPECS))
    policy = parse(spec)
    # At least one request fits, even one that goes a block on since its EOS was missed; often barely.
    eos = draw(st.booleans())
    reserved = policy.batching.reserved(policy, trace.input_length, trace.output_length + policy.block_length * eos)
    num_pages = -(-int(reserved.min()) // policy.memory.page_size)
    # A window's are half as large again, and SGLang has less room for them than for the others.
    num_pages = 3 * (num_pages + 1) if policy.name.startswith("sglang-gemma") else -(-5 * num_pages // 2)
    num_pages += draw(st.sampled_from([0, 1, 2, 5, 200]))
    spec = sized(spec, draw(st.sampled_from([1, 2, 4, 9])), draw(st.sampled_from([9, 16, 4096])), num_pages)
    return trace, spec, fleet_options(draw) | {"eos": eos}


@settings(FEW, max_examples=25)
@given(runs())
def test_a_fleet_loses_no_request_and_its_journal_replays_plan_for_plan(run: tuple[Trace, str, dict[str, Any]]) -> None:
    trace, spec, how = run
    setting, journal = Setting(parse(spec), PAGED), Collector()
    result = simulate(trace, setting, append=journal, **how)
    assert result.limits.window == WINDOW
    check_fleet(result, journal.steps, result.table["output_length"] if how["eos"] else trace.output_length, how)
    assert differences(setting, result, journal, emit=how["emit"], eos=how["eos"]) == []
