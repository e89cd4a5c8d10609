"""Measuring a model on this machine: every part of its profile is there and says where it came from."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.cache_overhead import CACHES
from dsim.engine.errors import ModelError, ProfileError
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.live.config import Experts, ModelConfig
from dsim.live.padding import MAX_ROWS
from dsim.live.weights import random_model
from dsim.profiler import measure
from dsim.profiler.measure import Loaded, check_same_model, measure_cache_overhead, measure_steps, open_any, select
from dsim.profiler.profile import Profile, from_json, load, to_json
from dsim.profiler.samples import Samples, points
from dsim.research.tiny.saved import save_model
from dsim.results.on_device import LiveSetting

from ..worlds import refusal

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


def profiled(loaded: Loaded, **how: Any) -> tuple[Profile, Samples]:
    """A profile without commits, unless told otherwise."""
    return measure.profile_model(loaded, **{"name": "here", "workloads": {}, "thresholds": (), "max_batch": 2} | how)


@pytest.fixture
def a_second_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that passes a second at every look: no machine is too slow."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, strftime=time.strftime)
    monkeypatch.setattr(measure, "time", clock)


@pytest.mark.slow
def test_batches_of_every_size_are_measured_until_the_budget_ends(loaded: Loaded) -> None:
    shares: list[float] = []
    parts: list[Samples] = []
    for given in (loaded, replace(loaded, graphs=True)):
        assert measure_steps(given, 2.0, parts, max_batch=3, on_progress=lambda _, share: shares.append(share)) == 0
    steps = measure.all_of(parts)
    assert set(steps.column("batch").tolist()) == {1.0, 2.0, 3.0}
    assert {0, 1} == set((steps.column("prefill_tokens") > 0).astype(int).tolist())
    assert {2.0, 4.0} <= set(steps.column("tokens").tolist())  # half and whole blocks
    assert np.isnan(steps.device).all()  # a CPU is its own host
    assert min(shares) < 0.01
    assert max(shares) <= 1.0
    assert measure.spread(10) == [10, 1, 2, 4, 8]


def test_a_batch_that_the_device_has_no_memory_for_leaves_the_smaller_ones(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def serve(_: Any, policy: Any, *__: Any) -> int:
        batches.append(policy.batching.max_batch)
        if batches[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(batches) == 8:
            raise ProfileError("enough")
        return 0

    monkeypatch.setattr(measure, "_measure_batch", serve)
    most = 2
    assert "enough" in refusal(ProfileError, lambda: measure_steps(loaded, 1e3, [], max_batch=8))
    assert batches == [8, 1, 1, 2, 2, 4, 1, 1]
    most = 0
    assert "out of memory at a batch of 1" in refusal(ModelError, lambda: measure_steps(loaded, 1e3, [], max_batch=1))


@pytest.mark.slow
def test_captured_steps_are_fitted_by_their_buckets(loaded: Loaded) -> None:
    graphs = replace(loaded, graphs=True)
    assert (loaded.graph_tokens, graphs.graph_tokens) == (0, MAX_ROWS)
    profile, steps = profiled(graphs, budget=6.0, max_batch=3)
    assert (profile.latency.graph_tokens, profile.provenance.settings["graphs"]) == (MAX_ROWS, True)
    assert profile.latency.early == pytest.approx(loaded.shape.early, rel=1e-5)
    tokens = [x for x, _ in profile.latency.knots]
    assert tokens == sorted(set(tokens))
    assert profile.fit.held_out is not None
    assert profile.provenance.settings["made_ready"] == 0
    assert len(points(steps)) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("device lost")], ids=["Ctrl-C", "failure"])
def test_steps_measured_before_a_failure_are_kept(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    runs, serve = itertools.count(), measure.run

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(runs) == 2:
            raise error
        return serve(*arguments, **options)

    monkeypatch.setattr(measure, "run", fail)
    kept: list[Any] = []
    with pytest.raises(type(error)):
        profiled(loaded, budget=40.0, keep=lambda *parts: kept.append(parts))
    [(profile, steps)] = kept
    assert len(steps) > 10
    assert from_json(json.loads(json.dumps(to_json(profile))), "here.json") == profile


@pytest.mark.slow
@pytest.mark.usefixtures("a_second_a_look")
def test_experts_of_a_checkpoint_are_measured_on_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = replace(SMALL, name="mixed", architecture="SDARMoeForCausalLM", experts=Experts(4, 2, 16))
    save_model(random_model(mixed, "cpu", torch.float32), folder / "mixed", torch.float32)
    mixture = open_any(str(folder / "mixed"), "cpu")

    def none_is_random(config: Any, seed: int) -> Any:
        raise AssertionError("random tokens")

    workloads = {"ids": str(folder / "ids.jsonl")}
    with monkeypatch.context() as patched:
        patched.setattr(measure, "random_prompts", none_is_random)
        profile, _ = profiled(mixture, budget=60.0, workloads=workloads, thresholds=(0.9,))
    assert profile.provenance.settings["routing"] == "of the text ids"
    blind, _ = profiled(mixture, budget=60.0)
    assert any("random tokens chose the experts" in doubt for doubt in blind.fit.doubts)


@pytest.mark.slow
@pytest.mark.usefixtures("a_second_a_look")
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
    with pytest.raises(ProfileError, match=r"holds commit models of threshold 0\.5, 0\.9; this run asks for 0\.7"):
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
@pytest.mark.usefixtures("a_second_a_look")
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


def test_what_a_device_does_not_answer_is_found_out_before_anything_is_measured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuses(_: Loaded) -> dict[str, Any]:
        asked.append("settings")
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(Loaded, "settings", property(refuses))
    monkeypatch.setattr("dsim.profiler.measure.measure_steps", lambda *_, **__: asked.append("steps"))
    assert "the driver is gone" in refusal(RuntimeError, lambda: profiled(loaded, budget=1.0))
    assert "the driver is gone" in refusal(RuntimeError, lambda: LiveSetting(loaded, None, "twin").about())
    assert asked == ["settings", "settings"]


def test_a_device_is_chosen_by_its_number_and_its_pool_comes_from_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30_000_000_000, 80_000_000_000))
    assert select("cuda:1") == select("cuda") == 30_000_000_000
    assert chosen == [1]
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
    monkeypatch.setattr(measure.weights, "load", lambda name, *how: told.append(how[:2]) or opened.model)
    monkeypatch.setattr(measure, "describe", lambda device: opened.device)
    assert [open_any("tiny", "cuda:1", graphs=graphs).graphs for graphs in (None, False)] == [True, False]
    assert told == [("cuda:1", torch.bfloat16)] * 2
