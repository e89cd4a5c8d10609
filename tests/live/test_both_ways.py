"""The shipped full-sequence model: small, trained in both directions, and told apart by what caches leave out."""

import numpy as np
import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.live.agreement import answers, compare
from dsim.live.model import Decoder
from dsim.live.prompts import WORKLOADS, prompts_from, read_tokens
from dsim.live.tiny.train_both_ways import CONTEXT, NAME, held_out_loss, masks
from dsim.live.weights import FOLDERS, config_of, load


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load(NAME, "cpu", torch.float32)


def test_it_is_small_and_says_what_it_is() -> None:
    assert (FOLDERS[NAME] / "model.safetensors").stat().st_size <= 4_000_000
    config = config_of(NAME)
    assert (config.both_ways, config.num_params < 2_000_000, config.mask_token) == (True, True, 256)


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
