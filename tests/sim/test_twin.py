"""The twin around the engines: when a run ends, what it keeps, and that chance is keyed by what it is about."""

import itertools
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CanvasLaw, LawDraws
from dsim.engine.errors import PolicyError, ProfileError, TraceError, cut
from dsim.engine.journal import REQUEST_COLUMNS, STATUSES, RequestTable
from dsim.engine.latency import LatencyModel
from dsim.engine.spec import parse
from dsim.profiler import hardware, models
from dsim.profiler.profile import load
from dsim.profiler.roofline import roofline
from dsim.sim.setting import Setting, caps_of
from dsim.sim.twin import RunRecords, simulate
from dsim.sim.unknown import warnings_of
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, SECOND, Collector, differences, refusal, toy_profile, toy_trace

COMPLETED, REJECTED, UNFINISHED = (STATUSES.index(name) for name in ("completed", "rejected", "unfinished"))
PROFILE = toy_profile()
SMALL = ",max_batch=4,num_pages=40,page_size=8"


def small(name: str) -> str:
    return name + SMALL + ("" if name == "ar" else ",block_length=4")


def crowd(n: int = 30) -> Trace:
    """More than one replica of PROFILE serves as they come."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.integers(0, 9, n))
    return toy_trace(arrival - arrival[0], rng.integers(1, 60, n), rng.integers(1, 60, n))


@pytest.mark.parametrize(("name", "replicas"), zip(BLOCK_PRESETS, itertools.cycle((1, 3))))
def test_without_draining_a_run_ends_with_the_last_arrival(name: str, replicas: int) -> None:
    trace, policy = crowd(), parse(small(name))
    whole = simulate(trace, Setting(policy, PROFILE), replicas=replicas)
    cut = simulate(trace, Setting(policy, PROFILE), replicas=replicas, drain=False)
    end = trace.arrival[-1]
    assert cut.end == end
    # The future changes nothing of the past: what had finished is the same, the rest is unfinished.
    in_time = whole.table["finish"] <= end
    assert 0 < in_time.sum() < len(trace) - 1
    assert cut.table["status"].tolist() == np.where(in_time, COMPLETED, UNFINISHED).tolist()
    for column in ("finish", "num_tokens", "first_emission"):
        assert cut.table[column][in_time].tolist() == whole.table[column][in_time].tolist()
    # A frozen batch goes on computing requests that have finished, beyond the end too.
    assert (cut.table["num_forwards"] <= whole.table["num_forwards"]).all()
    assert not (cut.table["last_emission"] > end).any()
    assert np.isnan(cut.table["finish"][~in_time]).all()


@pytest.mark.parametrize("name", ["ar", "lmdeploy-bd32", "optimus"])
def test_a_closed_loop_keeps_its_number_in_flight(name: str) -> None:
    n, workers = 30, 6
    trace, journal = crowd(n), Collector()
    result = simulate(trace, Setting(parse(small(name)), PROFILE), concurrency=workers, append=journal)
    steps, table = journal.steps, result.table
    assert (table["status"] == COMPLETED).all()
    finished = np.concatenate([[0], np.cumsum(steps["finished"])[:-1]])
    # As many as there are workers, until fewer are left.
    assert (steps["waiting"] + steps["running"]).tolist() == np.minimum(workers, n - finished).tolist()
    # Each request arrives at the moment another ends, in the trace's order.
    assert table["arrival"][:workers].tolist() == [0.0] * workers
    assert table["arrival"][workers:].tolist() == np.sort(table["finish"])[: n - workers].tolist()


def test_a_worker_whose_request_is_rejected_takes_the_next() -> None:
    trace = toy_trace([0.0] * 6, [5, 500, 5, 500, 500, 5], [3] * 6)
    journal = Collector()
    result = simulate(trace, Setting(parse(small("ar")), toy_profile(latency=SECOND)), concurrency=2, append=journal)
    assert result.table["status"].tolist() == [0, 1, 0, 1, 1, 0]
    # 0 and 2 start together; when both end, 5 comes, and 3 and 4 were rejected on the way.
    assert journal.steps["running"].tolist() == [2, 2, 2, 1, 1, 1]


SLOW = toy_profile(latency=SECOND)


def chats(*rows: tuple[float, Any, int, int]) -> Trace:
    arrival, sessions, prompts, answers = zip(*rows, strict=True)
    return Trace("chats", np.array(arrival), np.array(prompts), np.array(answers), {"session_id": list(sessions)})


def in_sessions(trace: Trace, **how: Any) -> RunRecords:
    return simulate(trace, Setting(parse("ar,max_batch=4"), SLOW), sessions=True, **how)


# A step takes 1 s: a prompt's gives the first token, and each token after it takes another.
CHATS = chats((0.0, "a", 10, 3), (1.0, "a", 20, 2), (1.5, "b", 10, 1), (1.7, "a", 30, 1), (30.0, "a", 40, 1))


def test_a_turn_is_not_sent_before_the_turn_before_has_ended() -> None:
    table = in_sessions(CHATS).table
    assert table["finish"].tolist() == [4.0, 6.0, 3.0, 7.0, 31.0]  # b's prompt stops the others for a second
    # The second turn is sent at the first one's end, the third at the second's, and the last at its own time.
    assert table["arrival"].tolist() == [0.0, 4.0, 1.5, 6.0, 30.0]
    alone = replace(CHATS, extras={"session_id": [None] * 5})
    assert in_sessions(alone).table["arrival"].tolist() == CHATS.arrival.tolist()


def test_who_waits_for_a_request_that_is_rejected_waits_no_longer() -> None:
    trace = chats((0.0, "a", 10, 3), (1.0, "a", 900_000, 1), (2.0, "a", 20, 1))
    table = in_sessions(trace).table
    assert table["status"].tolist() == [0, 1, 0]
    assert table["arrival"].tolist() == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("router", ["round-robin", "least-tokens", "prefix"])
def test_a_journal_of_sessions_on_several_replicas_replays_plan_for_plan(router: str) -> None:
    rng, journal = np.random.default_rng(3), Collector()
    rows = [(t * 0.9371, int(rng.integers(0, 5)), int(rng.integers(1, 40)), int(rng.integers(1, 9))) for t in range(40)]
    trace = chats(*rows)
    result = in_sessions(trace, replicas=2, router=router, append=journal)
    assert differences(Setting(result.policy, SLOW), result, journal) == []
    last: dict[int, float] = {}
    late = 0
    for i, (time, session, _, _) in enumerate(rows):
        assert result.table["arrival"][i] == max(time, last.get(session, 0.0))
        late += result.table["arrival"][i] > time
        last[session] = float(result.table["finish"][i])
    assert late > 5


@pytest.mark.parametrize("how", [{}, {"concurrency": 5}, {"replicas": 2}])
def test_an_interrupt_keeps_what_is_done(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.engine.STEPS_A_CALL", 4)
    trace, policy = crowd(), parse(small("optimus"))
    whole = simulate(trace, Setting(policy, PROFILE), **how)
    journal = Collector()
    ended, now = 0, 0.0

    def click(num: int, time: float) -> None:
        nonlocal ended, now
        ended, now = num, time
        if ended >= 10:
            raise KeyboardInterrupt

    cut = simulate(trace, Setting(policy, PROFILE), append=journal, progress=click, **how)
    assert cut.interrupted is True
    assert cut.end == now < whole.end
    done = cut.table["status"] == COMPLETED
    assert ended <= done.sum() < len(trace)
    for column in REQUEST_COLUMNS:
        assert np.array_equal(cut.table[column][done], whole.table[column][done], equal_nan=column != "status"), column
    # The journal was flushed: its steps are those that the totals count.
    steps = journal.steps
    assert (~steps["prefill"]).sum() == cut.totals.num_decode_steps
    assert steps["prefill"].sum() == cut.totals.num_prefill_steps
    assert steps["finished"].sum() == done.sum()


def test_a_trace_that_cannot_fit_is_one_line_with_both_values() -> None:
    trace = toy_trace([0.0, 1.0], [500, 320], [100, 1])
    assert refusal(TraceError, simulate, trace, Setting(parse(small("chunk:4")), PROFILE)) == (
        f"toy: none of its 2 requests fits into a step of {cut(small('chunk:4'))}, the context of 32768 tokens and 40 "
        "pages of 8: the shortest has 321 tokens (41 pages)"
    )


def test_a_request_that_fits_to_the_last_page_is_served_and_one_token_more_is_rejected() -> None:
    # 40 pages of 8 tokens are 320.
    trace = toy_trace([0.0, 0.0, 0.0], [300, 300, 4], [20, 21, 4])
    for name in BLOCK_PRESETS:
        if name.startswith(("lmdeploy", "multi-block")):  # whose pages are extended past the end
            continue
        result = simulate(trace, Setting(parse(small(name)), PROFILE))
        assert result.table["status"].tolist() == [COMPLETED, REJECTED, COMPLETED], name
        assert result.table["num_tokens"].tolist() == [20, 0, 4]
        assert np.isnan(result.table["finish"][1])


def test_bad_settings_are_refused_with_the_value() -> None:
    trace = crowd(3)
    with pytest.raises(PolicyError, match="replicas is 0, expected 1 to 4096"):
        simulate(trace, Setting(parse("ar"), PROFILE), replicas=0)
    with pytest.raises(TraceError, match="concurrency is 0, expected at least 1"):
        simulate(trace, Setting(parse("ar"), PROFILE), concurrency=0)
    with pytest.raises(
        ProfileError, match="profile l40s-llada-8b is of family full-sequence, and ar of autoregressive"
    ):
        simulate(trace, Setting(parse("ar"), load("l40s-llada-8b")))


def test_the_batch_is_bounded_by_what_one_prefill_holds() -> None:
    # LMDeploy: max_prefill_tokens // block_length, where no max_batch is given.
    profile = load("a100-sdar-8b")
    assert Setting(parse("lmdeploy-bd32,max_prefill_tokens=1024"), profile).limits.max_batch == 32
    assert Setting(parse("lmdeploy-bd32,max_prefill_tokens=1024,max_batch=77"), profile).limits.max_batch == 77
    assert Setting(parse("lmdeploy-bd32,max_prefill_tokens=1"), profile).limits.max_batch == 1
    assert Setting(parse("ar"), profile).limits.max_batch == profile.default_max_batch
    assert Setting(parse("ar,num_pages=123"), profile).limits.num_pages == 123


def test_a_batch_goes_by_memory_and_kind_and_never_by_the_gpu_s_name(tmp_path: Path) -> None:
    model, sheet = models.model("SDAR-8B"), tmp_path / "mine.toml"
    for known in hardware.GPUS.values():
        if known.memory_bytes < model.weight_bytes * 1.5:
            continue
        figures = f"bf16_tflops={known.peak / 1e12}\nbandwidth_gb_s={known.bandwidth / 1e9}"
        sheet.write_text(f'name="Mine"\nsource="s"\n{figures}\nmemory_gb={round(known.memory_bytes / 1e9)}\n')
        own, mine = roofline(known, model), roofline(hardware.gpu(str(sheet)), model)
        assert mine.device.name == "Mine"
        for spec in ("vllm-ar", "lmdeploy-bd32,max_prefill_tokens=40000"):
            assert Setting(parse(spec), mine).limits.max_batch == Setting(parse(spec), own).limits.max_batch
    h200, a100 = load("h200-sdar-8b"), load("a100-sdar-8b")
    renamed = replace(h200, device=replace(h200.device, name="NVIDIA A100"))
    rows = [Setting(parse("vllm-ar"), profile).limits.max_batch for profile in (h200, renamed, a100)]
    assert rows == [1024, 1024, 256]  # vLLM: 70 GiB and no A100
    sheet.write_text('name="H200"\nsource="s"\nbf16_tflops=500\nbandwidth_gb_s=4000\nmemory_gb=60\n')
    assert Setting(parse("vllm-ar"), roofline(hardware.gpu(str(sheet)), model)).limits.max_batch == 256
    sheet.write_text(sheet.read_text() + 'compute_capability = "9.0"\n')
    assert roofline(hardware.gpu(str(sheet)), model).default_max_batch == 1024  # LMDeploy, on Hopper


def test_a_request_costs_at_most_200_bytes() -> None:
    table = RequestTable(1000)
    assert sum(column.nbytes for column in table.columns.values()) <= 200 * 1000


@pytest.mark.usefixtures("compiled")
def test_a_runs_memory_does_not_grow_with_its_steps() -> None:
    profile = load("a100-sdar-8b")

    def peak(output: int, seen: list[int]) -> int:
        trace = toy_trace([0.0] * 8, [64] * 8, [output] * 8)

        def append(columns: Any, _lists: Any) -> None:
            seen.append(len(columns["step"]))

        tracemalloc.start()
        try:
            simulate(trace, Setting(parse("ar"), profile), append=append)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(64, [])  # compile, and fill what is cached once
    few: list[int] = []
    many: list[int] = []
    # Both hand on full batches of steps; one hands on three times as many.
    short, long = peak(10_000, few), peak(30_000, many)
    assert (sum(few), sum(many)) == (10_000, 30_000)
    assert max(few) == max(many) < 5_000
    assert long - short < 20_000  # less than a byte for each step more


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_steps_are_handed_on_loses_none_and_writes_none_twice(when: str) -> None:
    # Writing is a good share of a long run, so that is when Ctrl-C comes.
    journal = Collector()
    calls = itertools.count()

    def append(columns: Any, lists: Any) -> None:
        press = next(calls) == 0
        if press and when == "before":
            signal.raise_signal(signal.SIGINT)
        journal(columns, lists)
        if press and when == "after":
            signal.raise_signal(signal.SIGINT)

    n = 600
    result = simulate(toy_trace(np.arange(n) * 50.0, [9] * n, [16] * n), Setting(parse("ar"), PROFILE), append=append)
    assert result.interrupted is True
    step = journal.steps["step"]
    assert step.tolist() == list(range(len(step)))
    assert 4096 <= len(step) < 16 * n


def test_a_trace_s_own_steps_cap_a_law_request_by_request() -> None:
    bare = Trace("three", np.zeros(3), np.full(3, 9), np.full(3, 9))
    asked = replace(bare, extras={"diffusion_max_steps": [None, 12, 3]})
    assert (caps_of(None, bare), caps_of(8, bare)) == (None, 8)
    assert LawDraws(CanvasLaw("fixed", 256, 48.0), 0, 3, caps_of(None, asked)).arrays.requests["most"].tolist() == [
        48, 12, 3,
    ]  # fmt: skip
    assert list(caps_of(8, asked)) == [8, 8, 3]


def test_an_engine_s_own_threshold_takes_the_nearest_yield_and_says_so_and_another_is_refused() -> None:
    held = load("h100-sdar-8b")  # yields at 0.9
    for spec, own in (("lmdeploy-0.18", 0.85), ("sglang-fdfo", 0.95), ("sglang-sync", 0.95)):
        policy = parse(spec)
        assert policy.unmasking.threshold == own
        model = Setting(policy, held).commits
        assert model is not None
        assert model.threshold == 0.9
        assert warnings_of(Setting(policy, held)) == [
            f"{spec}: threshold is {own}, the engine's own, but h100-sdar-8b holds yields for {model.workload} at "
            "0.9: these are used"
        ]
        assert warnings_of(Setting(parse(spec + ",threshold=0.9"), held)) == []
        with pytest.raises(ProfileError, match=r"this run asks for 0\.7"):
            Setting(parse(spec + ",threshold=0.7"), held).check()
    # One that was fitted there is taken as it is.
    there = replace(held, commits=tuple(replace(m, threshold=0.85) for m in held.commits))
    assert warnings_of(Setting(parse("lmdeploy-0.18"), there)) == []


def test_joint_threshold_s_settings_bound_the_law_and_its_thresholds_are_the_text_s() -> None:
    profile = load("h20-llada2.1-mini-sglang")
    requests = Trace("two", np.zeros(2), np.full(2, 32), np.full(2, 64))
    spec = "sglang-joint,max_post_edit_steps={},block_length=32"
    forwards = [
        int(
            simulate(requests, Setting(parse(spec.format(most)), profile, "ifeval"), seed=1).table["num_forwards"].max()
        )
        for most in (0, 16)
    ]
    assert parse("sglang-joint").unmasking.most_steps(32) == 49
    assert parse("sglang-indel").unmasking.most_steps(32) == 50
    assert forwards[0] <= forwards[1] <= 2 * 49


def test_a_checkpoint_routed_by_block_is_refused_in_other_blocks_and_warns_of_a_borrowed_law() -> None:
    flash = roofline(hardware.gpu("H200"), models.model("LLaDA2.2-flash"), 4)
    setting = Setting(parse("sglang-indel"), flash).check()
    assert warnings_of(setting) == [
        "sglang-indel: forwards a block of LLaDA2.2-flash are not published: borrowed from LLaDA2.1-flash"
    ]
    mini = roofline(hardware.gpu("H100"), models.model("LLaDA2.2-mini"))
    assert warnings_of(Setting(parse("sglang-indel"), mini).check()) == []
    for policy in ("sglang-indel", "lmdeploy-bd32"):
        with pytest.raises(ProfileError, match=r"is 16, expected 32, by which LLaDA2\.2-flash routes experts"):
            Setting(parse(f"{policy},block_length=16"), flash).check()


def test_a_policy_chooses_by_the_price_that_its_steps_have() -> None:
    # The host's time overlaps the device's only where steps are decided ahead: Optimus decides each as it begins.
    latency = LatencyModel(((8.0, 1.0), (64.0, 2.0)), 0.05, host_step=0.4, overlap=True)
    for spec, overlaps in (("optimus", False), ("vllm-ar", True)):
        setting = Setting(parse(spec), toy_profile(latency=latency))
        foreseen, charged = setting.engine(RequestTable(1)).state[1].cost.numbers, setting.step_model(None).cost.numbers
        assert (bool(foreseen["overlap"][0]), bool(charged["overlap"][0])) == (overlaps, overlaps)
