"""Tokens by chance: shares are the probabilities, keys decide, and confidences are what each family means by them."""

import numpy as np
import pytest
import torch

from dsim.engine import chance
from dsim.engine.engine import Limits
from dsim.engine.policy import parse
from dsim.live.sampling import Sampling, sample, sample_of_hidden

from .test_executor import decoder
from .watched import Texts

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
DRAWS = 20_000
UNIFORM = torch.from_numpy(chance.uniform(chance.key(3, np.arange(DRAWS))))


def shares(how: Sampling) -> tuple[np.ndarray, np.ndarray]:
    tokens, confidence = sample(LOGITS.expand(DRAWS, -1), UNIFORM, how)
    return np.bincount(tokens.numpy(), minlength=5) / DRAWS, confidence.numpy()[
        [tokens.tolist().index(i) for i in (0, 1)]
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_are_likely(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).numpy()
    found, _ = shares(Sampling(temperature))
    assert found[4] == 0
    # Five standard deviations.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS)).all()


def test_the_confidence_is_of_the_distribution_drawn_from() -> None:
    _, confidence = shares(Sampling(0.5))
    np.testing.assert_allclose(confidence, (LOGITS / 0.5).softmax(0)[:2], rtol=1e-5)


def test_logits_in_parts_are_drawn_from_as_in_one() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(70, 16), torch.randn(50, 16)
    one, parts = (sample_of_hidden(hidden, head, UNIFORM[:70], Sampling(0.7), rows) for rows in (100, 9))
    assert torch.equal(one[0], parts[0])
    torch.testing.assert_close(one[1], parts[1])


@pytest.mark.parametrize(
    "spec",
    [
        "lmdeploy-bd32:4", "chunk:3,block_length=4", "focus,block_length=4", "fast-dllm,block_length=4",
        "maskkv,block_length=4,page_size=32", "ar",
    ],
)  # fmt: skip
def test_a_request_is_answered_alike_with_the_same_seed_and_otherwise_with_another(spec: str) -> None:
    policy = parse(spec + ("" if "page_size" in spec else ",page_size=8") + ",max_batch=1")
    lengths, limits = [(7, 12), (8, 12)], Limits(200, 256, 1, state_tokens=2)
    answers = [Texts(decoder(), policy, lengths, limits, sampling=Sampling(1.0, seed)).texts for seed in (0, 0, 1)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
