"""The most probable token and its probability, against fp64, over vocabularies of ugly sizes."""

import pytest
import torch

from dsim.kernels.confidence import confidence, confidence_of_hidden

from .places import EVERYWHERE, KERNEL, Place

# The exponential of a logit against none at all is 0 by way of an overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply")


def expected(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64, and the lowest index by comparison rather than by a library's promise."""
    tokens = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    return tokens, (logits.double() / (temperature or 1.0)).softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(0, 7), (1, 1), (3, 63), (5, 1000), (2, 32001)])
def test_the_token_is_the_arg_max_and_its_probability_that_of_the_soft_max(
    place: Place, num_rows: int, num_tokens: int, temperature: float
) -> None:
    logits = 4 * torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(num_tokens))
    with place.proved("confidence"):
        tokens, probabilities = confidence(logits.to(place.device), temperature)
    tokens_expected, probabilities_expected = expected(logits, temperature)
    assert tokens.tolist() == tokens_expected.tolist()
    assert (tokens.dtype, probabilities.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(probabilities.cpu().double(), probabilities_expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_index(place: Place, dtype: torch.dtype) -> None:
    # A coarse grid of values: hundreds of tokens share the maximum.
    logits = torch.randint(-3, 4, (4, 5000), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = 0
    logits[2, 4999] = 9
    with place.proved("confidence"):
        tokens, probabilities = confidence(logits.to(place.device))
    assert tokens.tolist() == expected(logits, 1.0)[0].tolist()
    assert tokens.tolist()[1:3] == [0, 4999]
    torch.testing.assert_close(probabilities.cpu().double(), expected(logits, 1.0)[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 99])
def test_a_row_may_be_split_among_any_number_of_programs(place: Place, num_splits: int) -> None:
    from dsim.kernels.confidence.kernel import confidence as launch

    logits = torch.randint(-6, 7, (3, 9000), generator=torch.Generator().manual_seed(2)).float()
    logits[1, :8192] = -torch.inf
    logits[2] = 1  # every lane of a program meets its maximum more than once
    with place.proved():  # below the launcher
        tokens, probabilities = launch(logits.to(place.device), 0.5, num_splits=num_splits)
    assert tokens.tolist() == expected(logits, 0.5)[0].tolist()
    torch.testing.assert_close(probabilities.cpu().double(), expected(logits, 0.5)[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_logits_of_minus_infinity_count_for_nothing_and_a_nan_is_not_hidden(place: Place) -> None:
    logits = torch.zeros(4, 2000)
    logits[0, :1500] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3] = 1e4
    with place.proved("confidence"):
        tokens, probabilities = confidence(logits.to(place.device))
    assert (int(tokens[0]), int(tokens[3])) == (1500, 0)
    assert probabilities[[0, 3]].tolist() == pytest.approx([1 / 500, 1 / 2000], rel=1e-5)
    assert probabilities[1:3].isnan().all()


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_tokens", "width"), [(0, 5, 8), (1, 1, 16), (7, 63, 24), (33, 1000, 96)])
def test_the_confidence_of_hidden_states_is_that_of_their_logits(
    place: Place, num_rows: int, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_rows, width, generator=generator).to(dtype)
    head = torch.randn(num_tokens, width, generator=generator).to(dtype)
    with place.proved("confidence_of_hidden"):
        tokens, probabilities = confidence_of_hidden(hidden.to(place.device), head.to(place.device), 0.8, 5)
    tokens_expected, probabilities_expected = expected(hidden.double() @ head.double().T, 0.8)
    assert tokens.tolist() == tokens_expected.tolist()
    torch.testing.assert_close(probabilities.cpu().double(), probabilities_expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("place", KERNEL)
def test_of_256_rows_and_more_the_product_is_the_librarys(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsim.kernels.confidence import kernel

    assert (kernel.MANY, kernel.CHUNK) == (256, 1024)
    rows, whole = [], kernel._logits
    monkeypatch.setattr(kernel, "MANY", 7)
    monkeypatch.setattr(kernel, "_logits", lambda hidden, head: (rows.append(len(hidden)), whole(hidden, head))[1])
    hidden, head = torch.randn(7, 24), torch.randn(63, 24)
    for num, logits in ((7, [5, 2]), (6, [])):  # chunks of at most max_num_logits rows
        rows.clear()
        with place.proved("confidence_of_hidden"):
            found, sure = confidence_of_hidden(hidden[:num].to(place.device), head.to(place.device), 0.8, 5)
        tokens, probabilities = expected(hidden[:num].double() @ head.double().T, 0.8)
        assert (rows, found.tolist()) == (logits, tokens.tolist())
        torch.testing.assert_close(sure.cpu().double(), probabilities, rtol=1e-4, atol=0)


def test_at_most_max_num_logits_rows_of_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsim.kernels.confidence import reference

    rows, whole = [], reference.confidence
    monkeypatch.setattr(reference, "confidence", lambda logits, t: (rows.append(len(logits)), whole(logits, t))[1])
    confidence_of_hidden(torch.ones(11, 4), torch.ones(9, 4), max_num_logits=4)
    assert rows == [4, 4, 3]


def test_what_makes_no_sense_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \[3\], expected \[R, V\]"):
        confidence(torch.zeros(3))
    with pytest.raises(ValueError, match=r"temperature is -1\.0, expected a finite number of at least 0"):
        confidence(torch.zeros(2, 3), -1.0)
    with pytest.raises(ValueError, match="the vocabulary has 0 tokens, expected at least 1"):
        confidence(torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"head has shape \[9, 5\], expected \[V, 4\]"):
        confidence_of_hidden(torch.ones(3, 4), torch.ones(9, 5))
    with pytest.raises(ValueError, match=r"head is torch\.float16, expected torch\.float32"):
        confidence_of_hidden(torch.ones(3, 4), torch.ones(9, 4).half())
    with pytest.raises(ValueError, match="max_num_logits is 0, expected at least 1"):
        confidence_of_hidden(torch.ones(3, 4), torch.ones(9, 4), max_num_logits=0)
