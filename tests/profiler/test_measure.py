"""Measuring a model on this machine: every part of its profile is there and says where it came from."""

import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.device.on_device import LiveSetting
from dsim.engine.cache_overhead import CACHES
from dsim.engine.errors import ModelError, ProfileError
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.live import measure as live_measure
from dsim.live.config import Experts, ModelConfig
from dsim.live.measure import Shape, shapes
from dsim.live.padding import MAX_ROWS
from dsim.live.weights import random_model
from dsim.profiler import measure
from dsim.profiler.clocks import Clocks
from dsim.profiler.measure import Loaded, check_same_model, measure_cache_overhead, measure_steps, open_any, select
from dsim.profiler.profile import Profile, from_json, load, to_json
from dsim.profiler.samples import Evidence, points
from dsim.research.tiny.saved import save_model

SMALL = ModelConfig("small", 2, 48, 4, 2, 16, 80, 97, 128, 4, 96, rope_theta=1e4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, saved as if they meant something, and its prompts."""
    folder = tmp_path_factory.mktemp("model")
    save_model(random_model(SMALL, "cpu", torch.float32), folder / "small", torch.float32)
    (folder / "ids.jsonl").write_text(json.dumps(list(range(90))) + "\n")
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return open_any(str(folder / "small"), "cpu")


def profiled(loaded: Loaded, **how: Any) -> tuple[Profile, Evidence]:
    """A profile without commits, unless told otherwise."""
    return measure.profile_model(loaded, **{"name": "here", "workloads": {}, "thresholds": (), "max_batch": 2} | how)


@pytest.fixture
def two_seconds_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that passes a second at every look, of which a profile's shape takes two: no machine is too slow."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, strftime=time.strftime)
    monkeypatch.setattr(measure, "time", clock)


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_steps_of_many_shapes_are_measured_and_one_of_them_in_every_round(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ROUND", 8)
    rounds = [8 + 1] * 4  # with the reference
    whats: list[str] = []
    told: list[float] = []

    def tell(what: str, share: float) -> None:
        whats.append(what)
        told.append(share)

    measured: list[Any] = []
    measure_steps(loaded, 8.0 * len(rounds), measured, max_batch=4, on_progress=tell)
    taken = measure._samples(measured, False)
    every = points(taken)
    assert len(whats) >= sum(rounds)
    (reference, times), (_, others) = Counter(whats).most_common(2)
    assert (times, others) == (4, 1)
    assert [whats[end - 1] for end in np.cumsum(rounds)] == [reference] * 4
    assert len(every) >= 20
    assert {0, 1} == set((every.column("prefill_tokens") > 0).astype(int).tolist())
    assert set(every.column("batch").tolist()) <= {1, 2, 3, 4}
    assert np.isnan(taken.device).all()  # a CPU is its own host
    assert np.bincount(taken.group).max() >= 3 * measure.REPEATS  # the reference
    assert told == sorted(told)
    assert told[-1] <= 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_steps_of_padded_batches_are_fitted_as_the_staircase_they_are(loaded: Loaded) -> None:
    graphs = replace(loaded, graphs=True)
    assert (loaded.graph_tokens, graphs.graph_tokens) == (0, MAX_ROWS)
    profile, taken = profiled(graphs, budget=120.0, max_batch=3)
    assert (profile.latency.graph_tokens, profile.provenance.settings["graphs"]) == (MAX_ROWS, True)
    assert profile.latency.early == pytest.approx(loaded.shape.early, rel=1e-5)
    every = points(taken.steps)
    # Steps are taken as they were planned; what was computed of the largest is their bucket.
    assert (every.column("tokens").min(), every.column("tokens").max()) == (1.0, 12.0)
    assert profile.fit.domain == (1.0, 16.0)
    assert (every.column("prefill_tokens") > 0).any()


@pytest.mark.slow
def test_a_journal_serves_batches_of_every_size_and_compiles_nothing(loaded: Loaded) -> None:
    for given in (loaded, replace(loaded, graphs=True)):
        found, late = measure.serve_journal(given, 1e3, max_batch=3)
        assert late == 0
        assert set(found.column("batch").tolist()) == {1.0, 2.0, 3.0}
        assert (found.column("prefill_tokens") > 0).any()
        assert len(np.unique(found.column("tokens"))) > 8  # of no lattice


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_a_device_is_measured_on_every_level_and_judged_by_a_journal(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loaded, "on_gpu", property(lambda self: True))
    device = replace(loaded, graphs=True)
    profile, taken = profiled(device, budget=200.0, max_batch=3)
    assert profile.fit.held_out is not None
    # Of 200 seconds 10 are for evictions and 15 % of the others, 28.5, the journal's; a step looks once, and so do its
    # beginning and the one that ends it: 27 served steps, of which every second one judges.
    assert profile.fit.held_out.num_points == 13
    assert profile.latency.captured_evictions
    assert profile.provenance.settings["made_ready"] == 0
    tokens = [x for x, _ in profile.latency.knots]
    assert tokens == sorted(set(tokens))
    assert {1.0, 2.0, 4.0, 8.0, 16.0} <= set(tokens)
    assert not np.isnan(taken.steps.device).any()
    assert set(taken.steps.column("tokens")) >= {1.0, 2.0, 4.0, 8.0}  # every level that fits


def test_the_reference_is_the_largest_step_that_is_still_quick_and_decodes_if_it_can() -> None:
    found = [measure.compute_bound(shapes(block, 256, 8192, 4064, 64, 10**6)) for block in (32, 1)]
    assert found == [Shape(64, 32, 32), Shape(256, 0, 8)]


@pytest.mark.parametrize(("budget", "num_steps"), [(1e9, 7), (3.5, 3)])
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_a_device_is_heated_until_its_time_is_steady_or_the_budget_is_spent(budget: float, num_steps: int) -> None:
    times = iter([2.0, 1.5, 1.2, 1.009, 1.0, 1.0, 1.005, 1.0, 1.0])
    measure.heat(times.__next__, budget)
    assert len(list(times)) == 9 - num_steps


@pytest.mark.usefixtures("two_seconds_a_shape")
@pytest.mark.parametrize(
    ("num_shapes", "error"),
    [(1, KeyboardInterrupt()), (16, KeyboardInterrupt()), (100, ModelError("out of memory"))],
    ids=["the warm-up", "Ctrl-C", "all"],
)
def test_steps_measured_before_a_failure_are_kept(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, num_shapes: int, error: BaseException
) -> None:
    def fail(*_: object) -> float:
        raise error

    shapes_before = itertools.count()

    def measure_shape(*arguments: Any) -> Any:
        return live_measure.measure(*arguments) if next(shapes_before) < num_shapes else fail()

    monkeypatch.setattr(measure, "measure_shape", measure_shape)
    monkeypatch.setattr(measure, "measure_eviction", fail)
    kept: list[Any] = []
    with pytest.raises(type(error)):
        profiled(loaded, budget=40.0, keep=lambda *parts: kept.append((parts[0], len(points(parts[1].steps)))))
    assert [num >= 15 for _, num in kept] == [True] * (num_shapes > 1)
    for profile, _ in kept:
        assert from_json(json.loads(json.dumps(to_json(profile))), "here.json") == profile


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_experts_of_a_checkpoint_are_measured_on_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = replace(SMALL, name="mixed", architecture="SDARMoeForCausalLM", experts=Experts(4, 2, 16))
    save_model(random_model(mixed, "cpu", torch.float32), folder / "mixed", torch.float32)
    mixture = open_any(str(folder / "mixed"), "cpu")

    def none_is_random(config: Any, seed: int) -> Any:
        raise AssertionError("random tokens")

    workloads = {"ids": str(folder / "ids.jsonl")}
    with monkeypatch.context() as patched:
        for module in (measure, live_measure):
            patched.setattr(module, "random_prompts", none_is_random)
        profile, _ = profiled(mixture, budget=60.0, workloads=workloads, thresholds=(0.9,))
    assert profile.provenance.settings["routing"] == "of the text ids"
    blind, _ = profiled(mixture, budget=60.0)
    assert any("random tokens chose the experts" in doubt for doubt in blind.fit.doubts)


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_a_profile_says_what_was_measured_on_what(loaded: Loaded, folder: Path) -> None:
    workloads = {"ids": str(folder / "ids.jsonl")}
    profile, _ = profiled(loaded, budget=240.0, workloads=workloads, thresholds=(0.5, 0.9), max_batch=4)
    assert profile.origin == "measured"
    assert profile.device.name.startswith("CPU ")
    assert profile.model.hidden == 48
    assert [(m.workload, m.block_length, m.threshold, m.temperature) for m in profile.commits] == [
        ("ids", 4, 0.5, 1.0), ("ids", 4, 0.9, 1.0),
    ]  # fmt: skip
    assert profile.fit.held_out is not None
    assert profile.provenance.torch == torch.__version__
    assert profile.provenance.settings["dtype"] == "float32"
    assert len(profile.commit_fits) == 2
    assert from_json(json.loads(json.dumps(to_json(profile))), "here.json") == profile
    with pytest.raises(
        ProfileError, match=r"holds commit models for ids at thresholds 0.50, 0.90; this run asks for 0"
    ):
        profile.commit_model("ids", 4, 0.7)


@pytest.mark.slow
def test_every_phase_of_every_kind_of_cache_is_measured(loaded: Loaded) -> None:
    # Beside a model by which steps take next to nothing, and beside one by which they take longer than they do.
    nothing, ages = (LatencyModel(((0.0, seconds),), 0.0, layers=2) for seconds in (1e-9, 1e3))
    found = measure_cache_overhead(loaded, nothing, 1e3)
    phases = ["full", "refresh_response", "refresh_prompt", "partial"]
    assert {cache: [u.phase for u in found if u.cache == cache] for cache in CACHES if cache != "PeriodicCache"} == {
        "NoCache": ["full"], "FastCache": ["full", "reuse"], "SparseCache": ["full", "pack", "reuse"],
        "MaskKV": phases,
    }  # fmt: skip
    assert all(u.row >= 0 and u.token >= 0 and u.row + 100 * u.token > 1e-6 for u in found)
    assert measure_cache_overhead(loaded, ages, 1e3) == ()


@pytest.mark.slow
@pytest.mark.usefixtures("two_seconds_a_shape")
def test_a_full_sequence_profile_holds_the_cache_overhead_measured_in_a_quarter_of_the_budget(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[LatencyModel, float]] = []
    found = (CacheOverhead("MaskKV", "partial", 0.001, 2e-6),)

    def measured(_: Loaded, latency: LatencyModel, budget: float, on_progress: object) -> tuple[CacheOverhead, ...]:
        given.append((latency, budget))
        return found

    monkeypatch.setattr(measure, "measure_cache_overhead", measured)
    profile, _ = profiled(loaded, budget=80.0, both_ways=True)
    assert (profile.family, profile.commits, profile.latency.eviction) == ("full-sequence", (), 0.0)
    assert given == [(replace(profile.latency, cache_overhead=()), 20.0)]
    assert profile.latency.cache_overhead == found


def test_random_weights_are_not_asked_what_they_would_commit() -> None:
    loaded = open_any("tiny", "cpu")
    assert measure.default_workloads(loaded) == {"source": "source", "records": "records"}
    assert measure.default_workloads(loaded, "my/prompts.txt") == {"prompts": "my/prompts.txt"}
    guess = replace(loaded, name="sdar-8b", trained=False)
    assert measure.default_workloads(guess) == {}
    with pytest.raises(ProfileError, match=r"the weights of sdar-8b are random"):
        profiled(guess, budget=1.0, workloads={"source": "source"}, thresholds=(0.9,))


def test_a_profile_of_another_model_and_a_device_that_is_not_there_are_refused(loaded: Loaded) -> None:
    with pytest.raises(ProfileError, match=r"profile a100-sdar-8b is of SDAR-8B with layers 36, and .* has 2"):
        check_same_model(load("a100-sdar-8b"), loaded.shape)
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match=r"device is cuda, and PyTorch .* finds no CUDA device here: expected cpu"):
            open_any("tiny", "cuda")


def test_a_gpu_is_known_by_its_uuid_where_pytorch_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.uuid_of(torch.device("cpu")) is None
    for properties, said in ((SimpleNamespace(uuid="a-b"), "a-b"), (SimpleNamespace(), None)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert measure.uuid_of(torch.device("cuda:1")) == said


def test_the_clocks_of_a_profile_are_those_of_its_steps(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(lambda: {"clock_mhz": 1410.0})
    forward = measure._forward(replace(loaded, clocks=clocks), 4, 16, 1, 0)
    assert not clocks.samples
    assert forward.cache.all_keys.all()  # zeros would draw less power
    measure.measure_shape(forward, Shape(1, 4, 4), 4, 1)
    assert {sample["clock_mhz"] for sample in clocks.samples} == {1410}
    assert forward.meanwhile == [clocks.sample]  # the loop's own work is taken back


def test_what_a_device_does_not_answer_is_found_out_before_anything_is_measured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuses(_: Loaded) -> dict[str, Any]:
        asked.append("settings")
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(Loaded, "settings", property(refuses))
    monkeypatch.setattr("dsim.profiler.measure.measure_steps", lambda *_, **__: asked.append("steps"))
    with pytest.raises(RuntimeError, match="the driver is gone"):
        profiled(loaded, budget=1.0)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        LiveSetting(loaded, None, "twin").about()
    assert asked == ["settings", "settings"]


def test_a_device_is_chosen_by_its_number_and_its_pool_comes_from_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30_000_000_000, 80_000_000_000))
    assert select("cuda:1") == select("cuda") == 30_000_000_000
    assert chosen == [1, 0]
    assert select("cpu") is None
    for name in ("cuda:2", "cuda:x", "cuda:"):
        with pytest.raises(ModelError, match=f"device is {name}, expected cuda:0 to cuda:1"):
            select(name)
    # All of the model's figures but the pool are those of the whole device.
    monkeypatch.setattr("dsim.profiler.measure.select", lambda device: 1_000_000_000)
    opened = open_any("tiny", "cpu")
    assert opened.memory.capacity_bytes == 1_000_000_000 < opened.device.memory_bytes
    assert (opened.graphs, opened.graph_cache) == (False, None)  # of a CPU's steps nothing is captured unless asked
    asked = open_any("tiny", "cpu", graphs=True)
    assert asked.graph_cache is asked.captured
    # On a GPU they are, in bf16, unless that is refused.
    told: list[Any] = []
    for name, fake in (
        ("weights.load", lambda name, *how: told.append(how[:2]) or opened.model),
        ("describe", lambda device: opened.device),
    ):
        monkeypatch.setattr(f"dsim.profiler.measure.{name}", fake)
    assert [open_any("tiny", "cuda:1", graphs=graphs).graphs for graphs in (None, False)] == [True, False]
    assert told == [("cuda:1", torch.bfloat16)] * 2
