"""The shipped full-sequence model: small, trained in both directions, and told apart by what caches leave out."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.errors import ModelError
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.live.agreement import answers, compare
from dsim.live.model import Decoder
from dsim.live.prompts import WORKLOADS, prompts_from, read_tokens
from dsim.live.tiny.train_both_ways import CONTEXT, NAME, held_out_loss, masks
from dsim.live.weights import FOLDERS, config_of, load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load(NAME, "cpu", torch.float32)


def test_it_is_small_and_says_what_it_is() -> None:
    assert (FOLDERS[NAME] / "model.safetensors").stat().st_size <= 4_000_000
    config = config_of(NAME)
    assert (config.both_ways, config.num_params < 2_000_000, config.mask_token) == (True, True, 256)


def test_the_wheel_leaves_it_out_and_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    tiny = FOLDERS["tiny"]
    files = [path for pattern in settings["package-data"]["dsim.live.tiny"] for path in tiny.glob(pattern)]
    assert [path for path in files if path.suffix == ".safetensors"] == [tiny / "model.safetensors"]
    assert sum(path.stat().st_size for path in files) <= 4_000_000

    monkeypatch.setitem(FOLDERS, NAME, tmp_path / "both_ways")
    for refused in (lambda: config_of(NAME), lambda: load(NAME, "cpu", torch.float32)):
        with pytest.raises(
            ModelError, match=r"^model tiny-both-ways is not in the wheel, expected a directory: live/tiny"
        ):
            refused()


def test_a_directory_of_it_is_the_same_model() -> None:
    folder = str(FOLDERS[NAME])
    assert replace(config_of(folder), name=NAME) == config_of(NAME)
    prompts = [read_tokens("records", name, config_of(name)) for name in (folder, NAME)]
    assert np.array_equal(*prompts)


def test_it_learned_both_kinds_of_text_in_both_directions(model: Decoder) -> None:
    # Whole answers are masked, too, whose far bytes nothing tells: 5.5 nats unlearned. The block-diffusion model, which
    # never saw what lies ahead, is worse at it; of source, whose far bytes are the hardest to tell, by little.
    before = load("tiny", "cpu", torch.float32)
    for workload, most, share in zip(WORKLOADS, (2.7, 1.4), (1.0, 0.85), strict=True):
        text = read_tokens(workload, NAME, model.config).astype(np.uint8)
        found = held_out_loss(model, text, rows=6)
        assert found < most
        assert found < share * held_out_loss(before, text, rows=6)


def test_what_a_cache_leaves_out_shows_in_its_answers(model: Decoder) -> None:
    prompts = prompts_from(read_tokens("records", NAME, model.config), 0)
    requests = [Request(i, 0.0, 96, 32) for i in range(2)]
    limits = Limits(200, 512, 1, state_tokens=model.config.state_tokens)
    found = {
        spec: answers(model, parse(spec), limits, requests, prompts)
        for spec in ("vanilla", "sparse-dllm:0.9", "sparse-dllm:0.05")
    }
    near, far = (
        compare(model, found["vanilla"], found[spec]).equal for spec in ("sparse-dllm:0.9", "sparse-dllm:0.05")
    )
    assert near > 0.8
    assert near > far + 0.05


def test_every_row_that_is_trained_on_has_a_mask_and_a_prompt() -> None:
    masked = masks(np.random.default_rng(0), 200, 32)
    assert masked.any(axis=1).all()
    assert not masked[:, :8].any()
    assert masked.shape == (200, CONTEXT)
    # Of half of the rows what lies behind a block is all masks.
    assert 60 < masked[:, -1].sum() < 190
