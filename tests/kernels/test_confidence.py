"""The most probable token and its probability, against fp64, over vocabularies of ugly sizes."""

import pytest
import torch
from torch import Tensor

from dsim.kernels import confidence as confidence_module
from dsim.kernels.confidence import confidence, confidence_of_hidden

from .places import BF16, FP16, FP32, KERNEL, Place, normal

# The exponential of a logit against none at all is 0 by way of an overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply")


def check(found: tuple[Tensor, Tensor], logits: Tensor, temperature: float, rtol: float = 1e-5) -> None:
    """Against fp64, and the lowest index by comparison rather than by a library's promise."""
    tokens = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    expected = (logits.double() / (temperature or 1.0)).softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert (found[0].tolist(), found[0].dtype, found[1].dtype) == (tokens.tolist(), torch.int64, FP32)
    torch.testing.assert_close(found[1].cpu().double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(0, 7), (1, 1), (3, 63), (5, 1000), (2, 32001)])
def test_the_token_is_the_arg_max_and_its_probability_that_of_the_soft_max(
    place: Place, num_rows: int, num_tokens: int, temperature: float
) -> None:
    logits = 4 * normal(num_tokens, num_rows, num_tokens)
    check(place.call(confidence, logits, temperature), logits, temperature)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ties_go_to_the_lowest_index(place: Place, dtype: torch.dtype) -> None:
    # A coarse grid of values: hundreds of tokens share the maximum.
    logits = torch.randint(-3, 4, (4, 5000), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = 0
    logits[2, 4999] = 9
    found = place.call(confidence, logits)
    check(found, logits, 1.0)
    assert found[0].tolist()[1:3] == [0, 4999]


@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 99])
def test_a_row_may_be_split_among_any_number_of_programs(place: Place, num_splits: int) -> None:
    from dsim.kernels.confidence.confidence_kernel import confidence as launch

    logits = torch.randint(-6, 7, (3, 9000), generator=torch.Generator().manual_seed(2)).float()
    logits[1, :8192] = -torch.inf
    logits[2] = 1  # every lane of a program meets its maximum more than once
    check(launch(logits.to(place.device), 0.5, num_splits=num_splits), logits, 0.5)


def test_logits_of_minus_infinity_count_for_nothing_and_a_nan_is_not_hidden(place: Place) -> None:
    logits = torch.zeros(6, 2000)
    logits[0, :1500] = -torch.inf
    logits[1] = 1e4
    logits[2, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[5, 7] = torch.inf
    tokens, probabilities = place.call(confidence, logits)
    assert tokens.tolist() == [1500, 0, 0, 0, 0, 0]
    assert probabilities[:2].tolist() == pytest.approx([1 / 500, 1 / 2000], rel=1e-5)
    assert probabilities[2:].isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("num_rows", "num_tokens", "width"), [(0, 5, 8), (1, 1, 16), (7, 63, 24), (33, 1000, 96)])
def test_the_confidence_of_hidden_states_is_that_of_their_logits(
    place: Place, num_rows: int, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    hidden, head = normal(1, num_rows, width, dtype=dtype), normal(num_tokens, num_tokens, width, dtype=dtype)
    found = place.call(confidence_of_hidden, hidden, head, 0.8, 5)
    check(found, hidden.double() @ head.double().T, 0.8, rtol=1e-4)


def test_at_most_max_num_logits_rows_of_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, whole = [], confidence_module._most_probable
    monkeypatch.setattr(
        confidence_module, "_most_probable", lambda logits, t: (rows.append(len(logits)), whole(logits, t))[1]
    )
    confidence_of_hidden(torch.ones(11, 4), torch.ones(9, 4), max_num_logits=4)
    assert rows == [4, 4, 3]
