"""A replica that knows its requests ahead submits them itself: bit for bit as if each arrival were an event."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.core import answers_of
from dsim.engine.hooks import steady
from dsim.engine.journal import StepTotals
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.spec import PRESETS, parse
from dsim.sim.pools import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace, synth

from ..engine import golden

pytestmark = pytest.mark.usefixtures("compiled")
# Few pages, so that requests are preempted and some never fit.
SPECS = (
    *PRESETS, "lmdeploy-0.18,num_pages=11", "vllm-ar,num_pages=40", "vllm-diffusion,num_pages=60",
    "optimus,num_pages=9", "dllm-serve,num_pages=6",
)  # fmt: skip
# Replicas that a router compares run other code, which takes time to compile: one for each kind of rows, beside `ar`.
TOGETHER = ("optimus,num_pages=9", "vllm-diffusion,num_pages=60", "dllm-serve,num_pages=6")
IN_LANES = [
    *golden.in_lanes(spec for spec in SPECS if spec not in TOGETHER[1:]),
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in TOGETHER[1:]),
]


def traffic(family: str) -> Trace:
    """Bursts with idle times between them, requests that are rejected, limits, canvases, priorities and deadlines."""
    trace = synth(
        "poisson", 3.0 if family == "full-sequence" else 12.0, lengths="lognormal:90,70,80,60", num_requests=36, seed=5
    )
    arrival = trace.arrival + 400.0 * (np.arange(36) // 12)
    lengths = trace.input_length.copy()
    lengths[[3, 20, 35]] = 3_000_000
    answers = trace.output_length.copy()
    wishes: dict[str, list[Any]] = {
        "max_tokens": [int(n) + 40 if i % 3 == 2 else None for i, n in enumerate(answers)],
        "estimated_length": [50 if i % 2 else None for i in range(36)],
        "priority": [i % 3 for i in range(36)],
        "deadline": [2.5 if i % 5 == 0 else None for i in range(36)],
    }
    return replace(trace, arrival=arrival, input_length=lengths, output_length=answers, extras=wishes)


@pytest.mark.parametrize("spec", IN_LANES)
def test_requests_known_ahead_are_served_alike(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.engine.STEPS_A_CALL", 7)  # pauses, also where a replica is idle
    policy = parse(spec)
    setting, trace = Setting(policy, golden.profile_of(policy)), traffic(policy.family)
    if policy.family != "canvas":
        trace = replace(trace, extras={n: c for n, c in trace.extras.items() if "diffusion" not in n})
    eos = policy.family != "full-sequence"
    hows: list[dict[str, Any]] = [{"replicas": 3}, {"router": "jsq", "eos": eos}, {"replicas": 2, "drain": False}]
    if spec in TOGETHER:
        hows += [{"replicas": 2, "router": "least-tokens", "eos": eos}]
        hows += [{"replicas": 3, "router": "jsq", "drain": False}]
    for how in hows:
        slow, fast = (
            simulate(trace, setting, seed=2, emit="step", step_by_step=by_step, **how) for by_step in (True, False)
        )
        check_alike(slow, fast, how)


SCALED = (
    ("hpa,metric=requests,target=2,most=40,down_window=9,every=3", 4, "least-tokens"),
    ("hpa,metric=requests,target=2,most=40,down_window=9,every=3", 5, "jsq"),
    ("queued-forwards,most=9,drain=1,window=6,load=0.3,down_window=9,every=3", 4, "jsq"),
    ("schedule,at=0/2/6/5/20/1,every=3", 0, "least-tokens"),
    ("hpa,metric=requests,target=2,most=40,down_window=9,every=3", 4, "round-robin"),
)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("scaler", "startup", "router"), SCALED)
def test_replicas_that_start_and_drain_are_run_together(scaler: str, startup: float, router: str, whole: bool) -> None:
    trace = synth("poisson", 5.0, lengths="lognormal:90,70,160,90", num_requests=300, seed=5)
    lengths = trace.input_length.copy()
    lengths[[3, 150, 299]] = 3_000_000  # rejected
    trace = replace(trace, arrival=trace.arrival + 50.0 * (np.arange(300) // 100), input_length=lengths)
    if whole:  # whole seconds, so that arrivals, ticks and replicas that are ready come at equal times
        trace = replace(trace, arrival=np.floor(trace.arrival))
    setting = Setting(parse("optimus"), golden.profile_of(parse("optimus")))
    fleet = Fleet((Pool(setting, 2, startup=startup),), routing(router), scaling(scaler))
    slow, fast = (simulate(trace, fleet, step_by_step=by_step, drain=not whole) for by_step in (True, False))
    assert len({change.ready for change in slow.changes}) > 1, "it scales"
    assert slow.changes == fast.changes
    assert slow.replica_time == fast.replica_time
    check_alike(slow, fast)


LEAPING = (
    "ar", "ar,num_pages=12", "ar,max_batch=3", "ar,page_size=5", "ar,eos=ignored", "vllm-diffusion",
    "vllm-diffusion,num_pages=60", "vllm-diffusion,max_num_seqs=2", "vllm-diffusion,async_scheduling=false",
    "vllm-diffusion,max_num_batched_tokens=600,max_num_seqs=4",
    "sglang-gemma", "sglang-gemma,max_running_requests=2", "sglang-gemma,dllm_fdfo=false",
    "sglang-gemma,num_pages=8", "vllm-ar,num_pages=40", "vllm-ar,max_num_seqs=3", "vllm-ar,async_scheduling=false",
    "vllm-ar,max_num_batched_tokens=96,max_num_seqs=16",
    "vllm-ar,page_size=5,eos=ignored", "vllm-ar", "vllm-ar,prefix_caching=true,num_pages=110",
    "vllm-ar,prefix_caching=true,num_pages=80,async_scheduling=false",
    "vllm-ar,max_num_batched_tokens=24,max_num_seqs=12",
)  # fmt: skip


EMITTED = [*zip(LEAPING, itertools.cycle(("block", "step", "end"))), *itertools.product(LEAPING[::11], ("step", "end"))]


def as_sessions(trace: Trace) -> Trace:
    """Twelve sessions at a time, of four turns each, in which a prompt repeats all that came before."""
    lengths, ids = trace.input_length.copy(), [f"{i % 12} {i // 48}" for i in range(len(trace))]
    for i in range(12, len(trace)):
        if ids[i] == ids[i - 12]:
            lengths[i] = lengths[i - 12] + trace.output_length[i - 12] + i % 40
    return replace(trace, input_length=lengths, extras={"session_id": ids})


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "emit"), EMITTED)
def test_leaps_end_where_steps_do(spec: str, emit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hows: list[dict[str, Any]] = [{"replicas": 2}, {"drain": False}, {"concurrency": 9}]
    if not spec.startswith("sglang"):  # compiled anew for it
        hows += [{"replicas": 2, "router": "jsq"}]
    check_leaps(spec, emit, 80 if spec.startswith("ar") else 150, monkeypatch, hows)


FEW_LEAPING = (
    ("ar", "step"), ("vllm-ar,num_pages=40", "block"), ("vllm-diffusion,num_pages=60", "end"), ("sglang-gemma", "step"),
)  # fmt: skip


@pytest.mark.parametrize(("spec", "emit"), FEW_LEAPING)
def test_leaps_of_a_few_requests_end_where_steps_do(spec: str, emit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.core.PATIENCE", 10**12)  # few steps: compiling would take longer
    check_leaps(spec, emit, 5, monkeypatch, [{"replicas": 2}, {"drain": False}])


def check_leaps(spec: str, emit: str, num: int, monkeypatch: pytest.MonkeyPatch, hows: list[dict[str, Any]]) -> None:
    """A journal has each step alone: so a run with one is the test of other runs."""
    trace = synth("poisson", 6.0, lengths="lognormal:90,70,160,90", num_requests=num, seed=5)
    wishes: dict[str, list[Any]] = {"max_tokens": [int(n) + 7 for n in trace.output_length]}
    if "gemma" in spec or "diffusion" in spec:
        wishes = {"diffusion_max_steps": [9 if i % 5 == 0 else None for i in range(num)]}
    trace = replace(trace, extras=wishes if "eos" in spec or "max_steps" in str(wishes) else {})
    if "prefix" in spec:
        trace = as_sessions(trace)
    setting = Setting(parse(spec), golden.profile_of(parse(spec)))
    for how in hows:
        steps = simulate(trace, setting, emit=emit, append=lambda columns, lists: None, ordered=False, **how)
        assert steps.totals.num_decode_steps > 2 * num / 3
        check_alike(steps, simulate(trace, setting, emit=emit, ordered=False, **how), how)


@dataclass(frozen=True)
class Others(Continuous):
    """A scheduler that dsim does not ship: its rules may look at each step."""


def test_a_policy_with_parts_of_others_takes_each_step() -> None:
    for spec in ("ar", "vllm-ar", "vllm-diffusion"):
        assert steady in answers_of(parse(spec)), spec
    batching = Others(**vars(parse("ar").batching))
    assert steady not in answers_of(replace(parse("ar"), batching=batching))


def check_alike(one: RunRecords, other: RunRecords, how: object = None) -> None:
    """Two runs have the same table, bit for bit, the same totals and the same end."""
    for name, column in one.table.columns.items():
        assert column.tobytes() == other.table[name].tobytes(), (how, name)
    assert (_plain(one.totals), one.end) == (_plain(other.totals), other.end), how


def _plain(totals: StepTotals) -> dict[str, Any]:
    """The totals in comparable values; arrays of counts as bytes, since printing them takes seconds."""
    parts = {name: getattr(value, "__dict__", {"": value}) for name, value in vars(totals).items()}
    return {
        f"{name}.{part}": value.tobytes() if isinstance(value, np.ndarray) else repr(value)
        for name, of in parts.items()
        for part, value in of.items()
    }
