"""Logits read by a denoising step against the definition in fp64."""

import pytest
import torch
from torch import Tensor

from dsim.kernels.read_logits import read_logits

from .places import BF16, FP32, Place, moved, normal

CAP = 30.0


def read(place: Place, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, ...]:
    """Drawn and likeliest tokens, entropies, and the probabilities that lie where the logits were."""
    given = moved((logits, temperature, uniform), place.device)
    with place.proved("read_logits"):
        found = read_logits(*given, CAP)
    return tuple(x.cpu() for x in (*found, given[0]))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, FP32), (63, BF16), (8192, FP32), (8193, BF16), (32001, FP32)])
def test_a_row_s_distribution_is_drawn_from_and_said(place: Place, num_tokens: int, dtype: torch.dtype) -> None:
    rows = 7
    logits = normal(num_tokens, rows, num_tokens, dtype=dtype) * torch.tensor([0.0, 0.3, 1, 4, 20, 60, 2])[:, None]
    logits = logits.to(dtype)
    temperature = torch.tensor([0.4, 0.8, 0.5, 0.6, 0.4, 0.8, 1.0])
    uniform = torch.tensor([0.0, 1.0, 0.5, 1e-7, 0.999, 0.25, 0.75])
    drawn, likeliest, entropy, probabilities = read(place, logits, temperature, uniform)
    scaled = (logits.double() / CAP).tanh() * CAP / temperature.double()[:, None]
    logs = scaled.log_softmax(-1)
    expected = logs.exp()
    torch.testing.assert_close(entropy.double(), -(logs * expected).sum(-1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4 if dtype == FP32 else 8e-3, atol=1e-7)
    assert (scaled.gather(1, likeliest[:, None])[:, 0] >= scaled.amax(-1) - 1e-5).all()
    reached = torch.nn.functional.pad(expected.cumsum(-1), (1, 0))
    at = drawn[:, None]
    assert (reached.gather(1, at)[:, 0] <= uniform.double() + 1e-5).all()
    assert (reached.gather(1, at + 1)[:, 0] >= uniform.double() - 1e-5).all()


def test_ties_go_to_the_lowest_token_and_a_token_without_weight_is_never_drawn(place: Place) -> None:
    logits = torch.full((4, 20000), -300.0)
    logits[:, 17000] = logits[:, 9000] = logits[:, 9002] = 300.0
    drawn, likeliest, entropy, probabilities = read(
        place, logits, torch.full((4,), 0.5), torch.tensor([0.0, 0.4, 0.99, 1.0])
    )
    assert likeliest.tolist() == [9000] * 4
    assert drawn.tolist() == [9000, 9002, 17000, 17000]
    torch.testing.assert_close(entropy, torch.full((4,), 3.0).log())
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4))


def test_no_rows_are_nothing(place: Place) -> None:
    none = torch.zeros(0)
    assert all(len(x) == 0 for x in read(place, torch.zeros(0, 5), none, none))
