"""The shipped model: small, trained, and of two yields; its corpus is the same wherever it is made."""

import numpy as np
import pytest
import torch

from dsim.live.model import Decoder
from dsim.live.prompts import WORKLOADS, read_tokens
from dsim.live.tiny import corpus, evaluate
from dsim.live.tiny.train import CONTEXT, held_out_loss, hidden_suffix, masks
from dsim.live.weights import FOLDERS, config_of, load


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load("tiny", "cpu", torch.float32)


def test_it_is_small() -> None:
    assert (FOLDERS["tiny"] / "model.safetensors").stat().st_size <= 4_000_000
    assert config_of("tiny").num_params < 2_000_000


def test_it_learned_both_kinds_of_text(model: Decoder) -> None:
    # A byte of 256 costs 5.5 nats unlearned. The shipped prompts were not trained on.
    for workload, most in zip(WORKLOADS, (2.5, 0.8), strict=True):
        text = read_tokens(workload, "tiny", model.config).astype(np.uint8)
        assert held_out_loss(model, text, rows=4) < most


def test_records_yield_more_than_source_and_a_lower_threshold_more_than_a_higher(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "NUM_REQUESTS", 2)
    monkeypatch.setattr(evaluate, "OUTPUT", 96)
    found = {(w, t): evaluate.yield_of(model, w, t)[0] for w in WORKLOADS for t in (0.7, 0.9)}
    assert found["records", 0.9] > found["source", 0.9] > 1.2
    assert found["records", 0.9] > 2.5
    for workload in WORKLOADS:
        assert found[workload, 0.7] > 1.1 * found[workload, 0.9]


def test_records_are_their_seeds(model: Decoder) -> None:
    assert corpus.records(1, 5000).tobytes() == corpus.records(1, 9000)[:5000].tobytes()
    assert corpus.records(1, 5000).tobytes() != corpus.records(2, 5000).tobytes()
    # What is shipped is what the generator makes, and not what was trained on.
    assert read_tokens("records", "tiny", model.config).astype(np.uint8).tobytes() == corpus.records(1, 65536).tobytes()


def test_no_file_is_both_trained_on_and_held_out() -> None:
    sizes = len(corpus.source(held_out=False)), len(corpus.source(held_out=True))
    assert min(sizes) > 100_000
    assert sizes[0] > 8 * sizes[1]


def test_every_block_that_is_trained_on_has_a_mask_and_every_share_occurs() -> None:
    masked = masks(np.random.default_rng(0), 64, 32).reshape(-1, 32)
    counts = masked.sum(axis=1)
    assert counts.min() >= 1
    assert set(range(1, 33)) <= set(counts.tolist())
    hidden = hidden_suffix(np.random.default_rng(1), 32)
    assert hidden.shape == (CONTEXT,)
    for block in hidden.view(-1, 32).tolist():  # a suffix, never the first two positions
        assert not any(block[:2])
        assert block == sorted(block)
