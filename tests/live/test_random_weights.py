"""Random weights: made in place from a config.json alone, with experts that rows draw, and said in every output."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live import model as decoder
from dsim.live import weights
from dsim.live.canvas_model import canvas_config, num_params
from dsim.live.config import Settings, named
from dsim.live.model import route
from dsim.live.random_weights import drawn_experts, of_rows
from dsim.live.shipped_configs import CONFIGS
from dsim.live.weights import source_of
from dsim.profiler import measure, models
from dsim.profiler.measure import open_any
from dsim.profiler.profile import Device, load
from dsim.results.world import World
from dsim.serve.open import open_live
from dsim.serve.words import Filler

from ..cli.command import dsim, succeed
from .checkpoints import LLADA2
from .dense import Dense, block_causal

RANDOM = Settings(random_weights=True)
GEMMA: dict[str, Any] = {
    **CONFIGS["diffusiongemma"], "canvas_length": 8,
    "text_config": {
        **CONFIGS["diffusiongemma"]["text_config"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 8,
        "global_head_dim": 16, "vocab_size": 97, "max_position_embeddings": 128, "sliding_window": 12, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"diffusiongemma"}))
def test_a_shipped_config_has_the_dimensions_of_the_shape_that_the_profiler_knows(name: str) -> None:
    config, known = weights.config_of(name), models.MODELS[CONFIGS[name]["name"]]
    ours = measure.shape_of(config)
    for field in ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "experts"):
        assert getattr(ours, field) == getattr(known, field), field
    bias = 0 if config.experts is None or not config.experts.bias else config.experts.num
    biases = bias * (config.layers - (0 if config.experts is None else config.experts.dense_layers))
    assert config.num_params - biases == known.total_params


def test_the_shipped_canvas_model_has_its_layers() -> None:
    config = canvas_config(source_of("diffusiongemma", RANDOM))
    assert sum(layer.sliding for layer in config.layers) == 25
    assert (len(config.layers), config.window, config.canvas_length) == (30, 1024, 256)
    assert num_params(config) == pytest.approx(25.2e9, rel=0.005)  # production-dllm-serving.md 1.1


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A config.json of a LLaDA2 with 8 experts, and nothing else."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({**LLADA2, "max_position_embeddings": 512}))
    return tmp_path / "small"


def test_a_config_alone_makes_a_model_with_finite_logits_and_experts_that_rows_draw(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights.load(str(mixed / "config.json"), "cpu", torch.float32, 3, RANDOM)
    tokens = torch.full((24,), 96)
    chosen: list[torch.Tensor] = []

    def spied(logits: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = route(logits, *how)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(decoder, "route", spied)
    with torch.no_grad():
        hidden = model(tokens, torch.arange(24), Dense(block_causal(24, 4)))
    tables = drawn_experts(8, 3, 3, "cpu")  # the first layer is dense
    about = model.config.experts
    assert about is not None
    assert [layer.tolist() for layer in chosen] == [
        route(t[:24], about, torch.zeros(8))[0].tolist() for t in tables[1:]
    ]
    logits = model.logits(hidden)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01
    again = weights.load(str(mixed), "cpu", torch.float32, 3, RANDOM)  # its folder is the same
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def shares(num: int, top_k: int, **other: Any) -> np.ndarray:
    """Each expert's share of the picks of all rows of a layer."""
    about = weights.config_of("llada2-mini").experts
    assert about is not None
    about = type(about)(num, top_k, 8, **other)
    table = drawn_experts(num, 2, 5, "cpu")[1]
    chosen, weight = route(table, about, None)
    assert torch.isfinite(weight).all()
    return np.bincount(chosen.flatten().numpy(), minlength=num) / chosen.numel()


@pytest.mark.parametrize("other", [{}, {"scoring": "sigmoid", "groups": 8, "top_groups": 4}])
def test_rows_draw_experts_evenly(other: dict[str, Any]) -> None:
    found = shares(32, 4, **other)
    assert np.abs(found * 32 - 1).max() < 0.06  # 4,096 picks an expert: a standard deviation is 1.6 %


def test_a_step_of_more_rows_than_the_table_repeats_it() -> None:
    table = torch.arange(6.0).reshape(3, 2)
    assert of_rows(table, 7)[:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", None)  # nothing is made
    monkeypatch.setattr(measure, "describe", lambda device: Device("CPU", 1, 64 * 10**9))
    for name, size in (("llada2-flash", 411.6), ("diffusiongemma", 101.0)):
        says = f"{name}: its weights take {size} GB, and cpu has 64.0 GB: expected a smaller model"
        with pytest.raises(ModelError, match=f"^{re.escape(says)}$"):
            open_any(name, "cpu")


def test_what_cannot_be_made_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"^--random-weights is nowhere, expected a config.json, its folder, or"):
        open_any("nowhere", "cpu", settings=RANDOM)
    with pytest.raises(ModelError, match=r"^--model is tiny and --random-weights is sdar-8b, expected one of them"):
        named("tiny", "sdar-8b")
    assert dsim("live", "azure-conv", "--model", "tiny", "--random-weights", "tiny").code == 2


@pytest.mark.slow
def test_a_run_and_a_profile_say_that_the_weights_are_random(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = "random (seed 0), experts drawn evenly"
    ran = dsim(
        "profile", "--random-weights", str(mixed), "--budget", "2s", "--max-batch", "2",
        "--yields", "a100-llada2-mini", "-o", "p.json",
    )  # fmt: skip
    assert "small with random weights on " in ran.out, ran.err
    profile, known = load("p.json"), load("a100-llada2-mini")
    assert profile.provenance.settings["weights"] == made
    assert (profile.commits, profile.focus) == (known.commits, known.focus)
    ran = succeed(
        "live", "azure-conv", "--random-weights", str(mixed / "config.json"), "--profile",
        "p.json", "--lengths", "fixed:8,8", "--num-requests", "2", "--rate", "50", "-o", "run",
    )  # fmt: skip
    assert f"weights {made}" in " ".join(ran.out.split())
    live = json.loads(Path("run", "run.json").read_text())["live"]
    assert live["weights"] == made
    assert f"small ({made}) on " in dsim("compare", "run", "run").out
    assert f"weights {made}" in (tmp_path / "run" / "report.html").read_text()


def test_a_server_of_random_weights_without_a_tokenizer_answers_in_filler(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLADA2, "vocab_size": 600, "max_position_embeddings": 512}))
    loaded, world = open_any(str(tmp_path), "cpu", settings=RANDOM), World(trace="", policy="lmdeploy-bd32")
    profile = replace(load("a100-llada2-mini"), model=measure.shape_of(loaded.model.config))
    behind = open_live(loaded, world, profile=profile)
    assert isinstance(behind.words, Filler)
    assert behind.about.endswith("lmdeploy-bd32, weights random (seed 0), experts drawn evenly")
    assert behind.info.live.weights == "random (seed 0), experts drawn evenly"
