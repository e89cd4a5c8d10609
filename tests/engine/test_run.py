"""`Engine.run` is, bit for bit, one `schedule`, step model and `commit` after another."""

from functools import partial
from typing import Any

import pytest

from dsim.engine import core
from dsim.engine.jit import JIT
from dsim.engine.journal import RequestTable, StepRecorder, StepTotals
from dsim.engine.spec import parse
from dsim.profiler.profile import load
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate

from . import golden
from .singly import run_singly

# Each kind of rows: pools that preempt, windows of two blocks, and what is carried from step to step.
# The plain loops of tests/sim drive every preset.
SPECS = (
    "ar,num_pages=11", "lmdeploy-bd32:8,num_pages=11", "optimus,num_blocks=2,num_pages=11",
    "focus:1,num_pages=11", pytest.param("vanilla", marks=pytest.mark.slow),
    pytest.param("maskkv", marks=pytest.mark.slow),
    pytest.param("dllm-serve,look_ahead=true,num_pages=6", marks=pytest.mark.slow),
    "lmdeploy-0.18,num_pages=11", "vllm-ar,drafter=eagle,num_pages=40", "vllm-diffusion,num_pages=60", "sglang-gemma",
)  # fmt: skip
PREEMPTING = (",num_pages=11", ",num_pages=40", ",num_pages=60")


def by_steps(spec: str, emit: str, eos: bool = False, **latency_changes: Any) -> tuple[RunRecords, list[Any]]:
    """What `golden.run` does with one replica, one step at a time."""
    policy = parse(spec)
    profile = golden.profile_of(policy, **latency_changes)
    trace = golden.trace_of(policy.family == "full-sequence")
    setting = Setting(policy, profile)
    engine = setting.engine(RequestTable(len(trace)), emit=emit, eos=eos)
    model = setting.step_model(setting.draws(3, trace))
    batches: list[Any] = []
    recorder = StepRecorder(lambda c, v: batches.append((c, v)), policy.width)
    now = run_singly(engine, model, trace, recorder)
    totals = StepTotals()
    totals.merge(engine.totals)
    return RunRecords(policy, setting.limits, setting.commits, engine.table, totals, now, False), batches


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_is_its_steps_one_at_a_time(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small recorder hands on many times, in the middle of runs.
    monkeypatch.setattr("dsim.sim.twin.StepRecorder", partial(StepRecorder, batch=12))
    result, batches = golden.run(spec, {"emit": "step"})
    assert golden.digest(result, batches) == golden.digest(*by_steps(spec, "step"))
    assert len(batches) > 2
    assert (result.totals.preemptions > 0) == any(pages in spec for pages in PREEMPTING)


@pytest.mark.parametrize("spec", ["vllm-ar", "vllm-diffusion", "sglang-fdfo", "sglang-joint"])
def test_host_time_is_hidden_and_shared_alike_and_an_eos_unforeseen_alike(spec: str) -> None:
    host: dict[str, Any] = {"host_step": 0.004, "host_request": 0.0005, "overlap": True, "launch": 0.002}
    eos = not spec.startswith("sglang")  # whose requests go on past an EOS in their prompt's block
    result, batches = golden.run(spec, {"emit": "block", "eos": eos}, **host)
    assert golden.digest(result, batches) == golden.digest(*by_steps(spec, "block", eos, **host))
    exposed, _ = golden.run(spec, {"emit": "block", "eos": eos}, **host | {"overlap": False})
    # A scheduler that decides on a step when the last one is over hides nothing.
    assert (exposed.end > result.end) == spec.startswith("vllm")


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_a_run_begins_in_python_goes_on_compiled_and_compiles_nothing_if_it_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, how = "optimus", {"emit": "step", "replicas": 2}
    whole = golden.digest(*golden.run(spec, how))
    for patience in (10**9, 2000):
        monkeypatch.setattr(core, "_CORES", {})
        monkeypatch.setattr(core, "is_kept", lambda *of: False)
        monkeypatch.setattr(core, "PATIENCE", patience)
        assert golden.digest(*golden.run(spec, how)) == whole
        (made,) = core._CORES.values()
        assert made._spent >= 2000
        assert ("run" in vars(made)) == (patience == 2000)


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_the_loop_is_compiled_once_whatever_the_run() -> None:
    policy, trace = parse("ar"), golden.trace_of(full_sequence=False)
    profile = load(golden.profile_name(policy))
    for append, concurrency in ((None, None), (lambda columns, lists: None, None), (None, 2)):
        simulate(trace, Setting(policy, profile), append=append, concurrency=concurrency)
    engine = Setting(policy, profile).engine(RequestTable(1))
    assert len(engine.core.run.__wrapped__.signatures) == 1
