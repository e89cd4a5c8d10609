"""Runs beside runs whose difference is known: the errors are it, and the parts say where it lies."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.comparison.bounds import Bound
from dsim.comparison.comparison import COMPARISON, Comparison, PolicyErrors, compare_runs
from dsim.comparison.error_parts import MetricParts
from dsim.comparison.pairs import PolicyRuns
from dsim.comparison.rerun import recording_of
from dsim.engine.commits import CommitDraws
from dsim.engine.engine import Limits
from dsim.engine.journal import RequestTable, StepRecorder, StepTotals
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.engine.spec import parse
from dsim.engine.step import StepOutcome, StepPlan
from dsim.files.place import write_folder
from dsim.live.device_loop import serve
from dsim.profiler.profile import Profile
from dsim.report.html import result_files
from dsim.results.metrics import CANCELLED, summarize
from dsim.results.run import Run, read_run
from dsim.results.run_folder import RunWriter
from dsim.results.run_info import LiveInfo, ProfileInfo, RunInfo, TraceInfo
from dsim.sim.setting import Setting
from dsim.sim.step_model import StepModel
from dsim.sim.twin import simulate
from dsim.traces import Trace

from ..checks import cases, refused
from ..worlds import TOY_MODEL, toy_profile, toy_trace

SMALL = ",max_batch=4,num_pages=64,page_size=8"
CHUNK = "chunk:2,block_length=4" + SMALL
LMDEPLOY = "lmdeploy-bd32,block_length=4" + SMALL
OPTIMUS = "optimus,block_length=4" + SMALL
AR = "ar" + SMALL
FOCUS = "focus,block_length=4" + SMALL
ALL = (LMDEPLOY, CHUNK, OPTIMUS, AR)

LATENCY = LatencyModel(((0.0, 0.02), (16.0, 0.03)), 0.001, attention=1e-6, host_request=0.001)
SLOWER = LatencyModel(((0.0, 0.022), (16.0, 0.033)), 0.0011, attention=1.1e-6, host_request=0.0011)
EAGER = replace(TOY_MODEL, pass_probability=(0.95, 0.8, 0.6, 0.4))


OVERHEAD = (
    CacheOverhead("SparseCache", "pack", 0.004, 1e-4), CacheOverhead("SparseCache", "reuse", 0.003, 0.0),
    CacheOverhead("MaskKV", "partial", 0.002, 2e-4),
)  # fmt: skip
SERVING = (
    "dllm-serve,block_length=4,max_batched_tokens=120",
    "maskkv:8,block_length=4,prompt_refresh=6,response_refresh=4",
)


PROFILES = {
    name: replace(toy_profile(commits, latency), name=name, family=family)
    for name, latency, commits, family in (
        ("twin", LATENCY, TOY_MODEL, "block-diffusion"),
        ("slower", SLOWER, TOY_MODEL, "block-diffusion"),
        ("eager", LATENCY, EAGER, "block-diffusion"),
        ("both", SLOWER, EAGER, "block-diffusion"),
        ("serving", replace(LATENCY, cache_overhead=OVERHEAD), TOY_MODEL, "full-sequence"),
    )
}


def traffic(n: int = 40, seed: int = 0, gap: float = 0.3) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap, n))
    return toy_trace(arrival - arrival[0], rng.integers(1, 50, n), rng.integers(2, 40, n))


def finish(writer: RunWriter, policies: dict[str, tuple[Any, StepTotals]], model: Profile, **more: Any) -> None:
    replicas = more.get("replicas", 1)
    summaries = []
    for policy, (table, totals) in policies.items():
        columns = {name: column[table["replica"] >= 0] for name, column in table.items()}
        writer.requests(policy, columns)
        summaries.append(summarize(policy, columns, totals, replicas=replicas))
    profile = ProfileInfo(model.name, device="toy", model="toy", implementation="toy")
    about: dict[str, Any] = {"profiles": dict.fromkeys(policies, profile), "seed": 0} | more
    writer.finish(RunInfo(trace=TraceInfo("traffic"), policies=tuple(summaries), **about))


def twin(
    folder: Path, name: str = "twin", *, policies: tuple[str, ...] = (CHUNK,), trace: Trace | None = None,
    seed: int = 0, replicas: int = 1, cancelled: tuple[int, ...] = (), **manifest: Any,
) -> Run:  # fmt: skip
    done = {}
    with RunWriter(folder) as writer:
        for policy in policies:
            result = simulate(
                trace or traffic(),
                Setting(parse(policy), PROFILES[name]),
                seed=seed,
                replicas=replicas,
                append=partial(writer.append, policy),
                eos=manifest.get("eos", False),
            )
            result.table["status"][list(cancelled)] = CANCELLED
            done[policy] = (result.table.columns, result.totals)
        finish(writer, done, PROFILES[name], seed=seed, replicas=replicas, **manifest)
    return read_run(folder)


class Runs:
    """Runs in a folder; what is asked for again is not run again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Run] = {}

    def new(self) -> Path:
        return self._folder / str(len(list(self._folder.iterdir())))

    def twin(self, name: str = "twin", **how: Any) -> Run:
        """What the twin writes under a profile."""
        return self._once(f"{name} {how}", how.get("trace"), lambda: twin(self.new(), name, **how))

    def live(self, **how: Any) -> Run:
        """What the live driver writes."""
        return self._once(f"live {how}", how.get("trace"), lambda: live(self.new(), **how))

    @cached_property
    def slower(self) -> Comparison:
        """All policies beside themselves with every step a tenth slower."""
        return compared(self.twin(policies=ALL), self.twin("slower", policies=ALL))

    def _once(self, key: str, trace: Trace | None, write: Callable[[], Run]) -> Run:
        if trace is not None:  # which no key tells from another
            return write()
        if key not in self._held:
            self._held[key] = write()
        return self._held[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


class NoisyDevice:
    """A clock, and an executor that takes a step's price times a factor, its own or all's, and 1 ms of the host."""

    def __init__(self, model: StepModel, factor: npt.ArrayLike) -> None:
        self.now = 0.0
        self._model = model
        self._factors = iter(np.broadcast_to(factor, 10_000).tolist())

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self._model.step(plan)
        device = outcome.latency * next(self._factors)
        self.now += device + 0.001
        return replace(outcome, device=device)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.002  # it wakes late


def live(
    folder: Path, policy: str = CHUNK, *, factor: npt.ArrayLike = 1.0, trace: Trace | None = None, **manifest: Any
) -> Run:  # fmt: skip
    """What the live driver writes, on a device that is the profile's times a factor."""
    trace, model, spec = trace or traffic(), PROFILES["twin"], parse(policy)
    setting = Setting(spec, model)
    table = RequestTable(len(trace))
    engine = setting.engine(table)
    commits = setting.commits
    draws = None if commits is None else CommitDraws(
        commits, 0, trace.input_length, trace.output_length, spec.width, deltas=setting.deltas
    )  # fmt: skip
    device = NoisyDevice(StepModel(model.latency, draws), factor)
    with RunWriter(folder) as writer:
        recorder = StepRecorder(partial(writer.append, policy), spec.width)
        requests = [trace.request(i) for i in range(len(trace))]
        serve(engine, device, requests, recorder=recorder, clock=lambda: device.now, sleep=device.sleep)
        recorder.flush()
        about = {"driver": "live", "commits": "twin", "live": LiveInfo(device="toy", model="toy")}
        finish(writer, {policy: (table.columns, engine.totals)}, model, **(about | manifest))
    return read_run(folder)


def compared(p: Run, m: Run, *bounds: str, **how: Any) -> Comparison:
    return compare_runs([(p, m)], PROFILES.__getitem__, [Bound.parse(b) for b in bounds], **how)


def adding_up(cell: PolicyErrors, metric: str = "e2el") -> MetricParts:
    """The parts of a metric's error; those of every metric sum to its error."""
    for name, part in cell.parts.metrics.items():
        assert (part.latency + part.commits + part.scheduling) == pytest.approx(part.error, abs=1e-12), name
    return cell.parts.metrics[metric]


@cases("policy", CHUNK, LMDEPLOY)
def test_another_seed_is_the_commit_models_part_and_leaves_requests_unpaired(runs: Runs, policy: str) -> None:
    (cell,) = compared(*[runs.twin(policies=(policy,), seed=seed) for seed in range(2)]).cells
    part = adding_up(cell)
    assert cell.unpaired == "commits were drawn with seed 0 and with seed 1"
    assert cell.metrics["e2el"].requests is None
    assert part.commits == pytest.approx(part.error, abs=1e-9)
    # An autoregressive model draws nothing.
    assert PolicyRuns(AR, *(runs.twin(policies=(AR,), seed=seed) for seed in (0, 1))).unpaired == ""


@pytest.mark.slow
def test_a_run_beside_itself_has_no_error_and_no_parts_of_one(runs: Runs) -> None:
    run = runs.twin(policies=ALL, replicas=2)
    for cell in compared(run, run).cells:
        for metric in cell.metrics.values():
            assert set(metric.error.values()) <= {None, 0.0}
            assert metric.requests is None or not metric.requests.num or metric.requests.mape == 0.0
        assert cell.steps.same
        assert cell.steps.decode.p95 == pytest.approx(0.0, abs=1e-9)
        assert cell.parts.latency_nearest == cell.parts.commit_forced == cell.parts.commit_unknown == 0
        assert cell.parts.metrics["e2el"].num == 40
        for part in cell.parts.metrics.values():
            assert (part.error, part.latency, part.commits, part.scheduling) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.slow
def test_a_full_sequence_run_beside_itself_is_priced_with_its_cache_overhead(runs: Runs) -> None:
    run = runs.twin("serving", policies=tuple(f"{policy},page_size=8,num_pages=200" for policy in SERVING))
    for cell in compared(run, run).cells:
        assert all(part.error == part.latency == 0.0 for part in cell.parts.metrics.values())
        assert cell.steps.decode.mape == pytest.approx(0.0, abs=1e-9)
    # Without it the prices are others.
    model = PROFILES["serving"]
    bare = replace(model, latency=replace(model.latency, cache_overhead=()))
    (cell, *_) = compare_runs([(run, run)], lambda _: bare, []).cells
    assert cell.parts is None
    assert re.search(r"of dllm-serve.* took .* s and profile serving prices it at", cell.no_parts)


@pytest.mark.slow
def test_slower_steps_alone_are_the_latency_models_part(runs: Runs) -> None:
    for cell in runs.slower.cells:
        part = adding_up(cell)
        assert part.error < -0.08 * part.measured
        assert part.latency == pytest.approx(part.error, rel=0.02)
        assert part.scheduling == pytest.approx(0, abs=1e-12)
        assert cell.steps.decode.bias == pytest.approx(1 / 1.1 - 1)
        if not cell.policy.startswith("optimus"):  # its chunks are chosen by latencies
            assert part.commits == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_another_yield_alone_is_the_commit_models_part(runs: Runs) -> None:
    base, eager = runs.twin(policies=ALL), runs.twin("eager", policies=ALL)
    for cell in compared(base, eager).cells:
        part = adding_up(cell)
        # Steps that were never taken are priced by the nearest, which here are the profile's own price.
        assert (part.latency, part.scheduling) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-12))
        assert part.commits == pytest.approx(part.error, abs=1e-9)
        if cell.policy == AR:
            assert part.error == 0.0
        else:
            assert part.error > 0.05 * part.measured
        assert cell.parts.commit_unknown == 0


def test_an_eviction_leaves_the_error_whole(runs: Runs) -> None:
    run = runs.twin(policies=(FOCUS,))
    (cell,) = compared(run, run).cells
    assert (cell.parts, cell.no_parts) == (None, "re-runs do not evict tokens, as its policy does")


def test_two_causes_are_told_apart(runs: Runs) -> None:
    base, both = runs.twin(), runs.twin("both")
    (cell,) = compared(base, both).cells
    part = adding_up(cell)
    # The twin's steps are too fast and its yield is too small.
    assert part.latency < -0.05 * part.measured
    assert part.commits > 0.05 * part.measured
    assert part.scheduling == pytest.approx(0, abs=1e-12)


def test_waking_late_is_schedulings_part(runs: Runs) -> None:
    # Requests far apart: each finds an idle server, which sees it 2 ms late.
    trace = toy_trace(np.arange(10) * 30.0, [8] * 10, [8] * 10)
    (cell,) = compared(runs.twin(trace=trace), runs.live(trace=trace)).cells
    part = adding_up(cell, "queue_time")
    assert part.measured == pytest.approx(0.0018)  # the first one is there when the clock starts
    assert (part.latency, part.commits, part.scheduling) == (0.0, 0.0, pytest.approx(-0.0018))
    assert cell.steps.same
    assert cell.steps.decode.bias < 0  # the host's time


@pytest.mark.slow
def test_requests_steps_and_the_choice_of_several_policies(runs: Runs) -> None:
    found = runs.slower
    assert [cell.policy for cell in found.cells] == list(ALL)
    cell = found.cells[1]
    mine, theirs = (runs.twin(name, policies=ALL).requests(CHUNK) for name in ("twin", "slower"))
    e2el = [columns["finish"] - columns["arrival"] for columns in (mine, theirs)]
    assert cell.metrics["e2el"].requests.mape == pytest.approx(np.mean(np.abs(e2el[0] - e2el[1]) / e2el[1]))
    assert found.overall["e2el"].num == 40 * len(ALL)
    assert f"the twin's choice, {AR}, is the best" in found.page().answer
    assert Comparison.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_what_did_not_complete_is_left_out_and_counted(runs: Runs) -> None:
    lengths = traffic().input_length.copy()
    lengths[3] = 5000  # fits nothing
    trace = replace(traffic(), input_length=lengths)
    p, m = (runs.twin(name, trace=trace) for name in ("twin", "slower"))
    (cell,) = compared(p, m).cells
    assert cell.left_out == {"not completed in both": 1, "not arrived in both": 0}
    assert cell.num_both == 39
    assert (cell.metrics["e2el"].requests.num, cell.metrics["e2el"].requests.num_missing) == (39, 1)


@pytest.mark.slow
def test_weights_that_decide_leave_requests_unpaired(runs: Runs) -> None:
    # Such a run may have used no profile.
    decided = runs.live(commits="model", profiles={})
    found = compared(runs.twin(), decided, "mean:e2el=50%")
    (cell,) = found.cells
    assert cell.unpaired == f"the weights decided the commits of {decided.folder}"
    assert all(metric.requests is None for metric in cell.metrics.values())
    assert found.overall == {}
    assert found.bounds[0].met
    with refused("not paired, since the weights decided"):
        compared(runs.twin(), decided, "e2el=3%")


@pytest.mark.slow
def test_a_bound_is_kept_or_missed(runs: Runs) -> None:
    p, m = runs.twin(), runs.twin("slower")
    (cell,) = compared(p, m).cells
    error = -100 * cell.metrics["step_latency"].error["mean"]
    assert error > 5
    around = f"mean:step_latency={error - 0.01}%", f"mean:step_latency={error + 0.01}%"
    found = compared(p, m, "e2el=50%", "e2el=1%", *around)
    assert [b.met for b in found.bounds] == [True, False, False, True]
    assert found.page().alarms[0].startswith("NOT MEASURED")  # a twin's run is never called measured
    mape = 100 * found.overall["e2el"].mape
    assert str(found.bounds[1]) == f"e2el=1%: {CHUNK} has {mape:.3g} %, missed"


def test_a_run_whose_clients_went_away_is_compared_without_parts(runs: Runs) -> None:
    p, m = runs.twin(), runs.twin(cancelled=(3, 5))
    (cell,) = compared(p, m).cells
    assert (cell.num_both, cell.left_out["not completed in both"]) == (38, 2)
    assert (cell.totals["cancelled"].predicted, cell.totals["cancelled"].measured) == (0, 2)
    assert cell.no_parts == f"clients of {m.folder} cancelled requests, and re-runs serve all of them"


def test_limits_that_a_run_kept_are_those_of_its_engine(runs: Runs) -> None:
    limits = Limits(num_pages=64, context_limit=4096, max_batch=4, max_prefill_tokens=1 << 20)
    run = runs.twin(limits={CHUNK: limits})
    assert compared(run, run).cells[0].parts is not None
    (cell,) = compared(run, runs.twin(limits={CHUNK: replace(limits, max_batch=2)})).cells
    assert cell.parts is None
    assert re.search(r": chunk:2.* does not replay plan for plan with profile twin: replica 0", cell.no_parts)


def test_a_run_that_kept_no_limits_has_those_of_its_setting(runs: Runs) -> None:
    policies = ("chunk:2,block_length=4", "vllm-ar", "lmdeploy-bd32,block_length=4")
    run = runs.twin(policies=policies, trace=traffic(4))
    for policy in policies:
        expected = Setting(parse(policy), PROFILES["twin"]).limits
        assert recording_of(run, policy, PROFILES["twin"]).limits == expected


def test_a_request_that_ended_at_an_eos_is_asked_once_too_often_in_a_re_run_too(runs: Runs) -> None:
    vllm = "vllm-ar,max_num_seqs=4,num_pages=64,page_size=8"
    run = runs.twin(policies=(vllm,), trace=traffic(8, gap=0.05), eos=True)
    (cell,) = compared(run, run).cells
    assert all(part.error == part.scheduling == 0.0 for part in cell.parts.metrics.values())


LATER = replace(traffic(), arrival=traffic().arrival + 0.02 * (np.arange(40) == 7))  # the eighth request, by 20 ms


def without_lists(runs: Runs) -> Run:
    """A run of the twin that kept scalar columns of steps only."""
    with RunWriter(folder := runs.new()) as writer:
        result = simulate(
            traffic(), Setting(parse(CHUNK), PROFILES["twin"]), append=lambda steps, lists: writer.append(CHUNK, steps)
        )
        finish(writer, {CHUNK: (result.table.columns, result.totals)}, PROFILES["twin"])
    return read_run(folder)


REFUSED: dict[str, tuple[Callable[[Runs], Run], str]] = {
    "fewer requests": (lambda runs: runs.twin(trace=traffic(39)), "holds 40 requests of .* holds 39: expected two"),
    "other lengths": (lambda runs: runs.twin(trace=traffic(seed=1)), "request 0 has (in|out)put_length "),
    "other arrivals": (lambda runs: runs.twin(trace=LATER), "request 7 has arrival .* expected two runs"),
    "another policy": (lambda runs: runs.twin(policies=(AR,)), "holds policies .* expected at least one in both"),
    "more replicas": (lambda runs: runs.twin(replicas=2), "replicas is 1 in .* and 2 in .*: expected the same"),
    "other emissions": (lambda runs: runs.twin(emit="step"), "emit is block in .* and step in "),
    "scalar columns of steps": (without_lists, "column 'requests' is empty: the run kept scalar columns only"),
}  # fmt: skip


@cases("what", *REFUSED)
def test_runs_that_do_not_belong_together_are_refused(runs: Runs, what: str) -> None:
    other, says = REFUSED[what]
    with refused(says):
        compared(runs.twin(), other(runs))


def test_measured_runs_come_second_and_have_no_parts(runs: Runs) -> None:
    with refused(r"is a live run and .* a twin's: expected PREDICTED before MEASURED"):
        compared(runs.live(), runs.twin())
    (cell,) = compared(runs.live(), runs.live(factor=1.1)).cells
    why = f"{runs.live().folder} is a live run: there is no prediction to take apart"
    assert (cell.parts, cell.no_parts) == (None, why)


def test_another_profile_or_another_model_is_named(runs: Runs) -> None:
    run = runs.twin()
    (cell,) = compare_runs([(run, run)], lambda name: PROFILES["slower"]).cells
    assert re.search(r"step 0 of chunk:2.* took .* s and profile slower prices it at .* s: give", cell.no_parts)
    assert cell.parts is None
    for key in ("model", "device"):
        file = Path(shutil.copytree(run.folder, key)) / "run.json"
        file.write_text(file.read_text().replace(f'"{key}": "toy"', f'"{key}": "another"'))
        with refused(f"{key} is toy in .* and another in .*: expected the same"):
            compared(run, read_run(key))


def test_a_policy_of_one_run_alone_is_left_out_and_said(runs: Runs) -> None:
    found = compared(runs.twin(policies=(CHUNK, AR)), runs.twin())
    assert [cell.policy for cell in found.cells] == [CHUNK]
    assert found.notes == (f"pair 1: only one of its runs holds {AR}: left out",)


def test_runs_without_a_journal_of_steps_are_compared_by_their_requests(runs: Runs) -> None:
    fast, slow = runs.twin(), runs.twin("slower")
    metrics = compared(fast, slow).cells[0].metrics["e2el"]

    def bare(run: Run) -> Run:
        with RunWriter(folder := runs.new()) as writer:
            writer.requests(CHUNK, run.requests(CHUNK))
            unknown: dict[str, Any] = dict.fromkeys(("num_decode_steps", "num_prefill_steps"))
            writer.finish(replace(run.info, policies=(replace(run.info.policies[0], **unknown),)))
        return read_run(folder)

    for p, m in ((fast, bare(slow)), (bare(fast), slow)):
        found = compared(p, m)
        (cell,) = found.cells
        assert (cell.steps, cell.parts) == (None, None)
        assert cell.no_parts == f"{(m if p is fast else p).folder} has no step journal"
        assert cell.metrics["e2el"].requests == metrics.requests
        write_folder(f"page-{p.folder.name}", COMPARISON, result_files(found))


def test_arrivals_that_were_rounded_are_told_and_others_are_refused(runs: Runs) -> None:
    trace = traffic()
    rounded = toy_trace(np.round(trace.arrival, 3), trace.input_length, trace.output_length)
    (note,) = compared(runs.twin(trace=trace), runs.twin(trace=rounded)).notes
    assert note.startswith(f"{CHUNK}: ")
    off = 1e3 * np.abs(trace.arrival - rounded.arrival)
    assert note.endswith(f"{(off > 1e-6).sum()} of 40 arrivals differ in the two runs, by at most {off.max():.3g} ms")
