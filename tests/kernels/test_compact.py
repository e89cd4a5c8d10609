"""Retained rows arrive, in order and bit for bit, and sequences know where theirs begin."""

from typing import Any

import pytest
import torch

from dsim.kernels.compact import compact

from .places import EVERYWHERE, Place


def tensors(num_rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What a step carries past its second layer, in ugly sizes; q is a view of a projection."""
    return [
        torch.randn(num_rows, 1030, generator=generator).bfloat16(),  # hidden
        torch.randn(num_rows, 1030, generator=generator),  # residual
        torch.randn(num_rows, 5, 24, generator=generator).half()[:, :4],  # q
        torch.randn(num_rows, 1, 3, generator=generator).bfloat16(),  # k, of an odd number of two bytes
        torch.randn(num_rows, 2, 24, generator=generator).half(),  # v
        torch.randint(2**62, (num_rows,), generator=generator),  # positions
        torch.randn(num_rows, 7, generator=generator).double(),
        torch.rand(num_rows, 3, generator=generator) < 0.5,
    ]


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("starts", "share"),
    [([0, 1], 1.0), ([0, 1], 0.0), ([0, 0, 40, 63, 63], 0.4), ([0, 63], 1.0), ([0, 150, 200], 0.1), ([0, 0], 0.5)],
)
def test_the_rows_retained_arrive_in_order_and_bit_for_bit(place: Place, starts: list[int], share: float) -> None:
    generator = torch.Generator().manual_seed(starts[-1])
    own = tensors(starts[-1], generator)
    retained = torch.rand(starts[-1], generator=generator) < share
    query_start = torch.tensor(starts, dtype=torch.int32)
    with place.proved("compact"):
        start_after, rows, kept = compact(*(t.to(place.device) for t in (retained, query_start, *own)))
    expected = [i for i, r in enumerate(retained.tolist()) if r]
    assert rows.tolist() == expected
    assert start_after.tolist() == [sum(i < s for i in expected) for s in starts]
    for before, after in zip(own, kept, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after.cpu(), before[expected])


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_caller_that_knows_the_number_and_fewer_tensors_is_served_too(place: Place) -> None:
    retained, starts = torch.tensor([True, False, True]), torch.tensor([0, 3], dtype=torch.int32)
    with place.proved("compact"):
        arguments = [t.to(place.device) for t in (retained, starts, torch.arange(6).view(3, 2))]
        start_after, _, (kept,) = compact(*arguments, num_retained=2, check=False)
    assert (start_after.tolist(), kept.tolist()) == ([0, 2], [[0, 1], [4, 5]])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({2: torch.zeros(4, 2)}, {}, r"tensor 0 has shape \[4, 2\], expected 3 rows"),
        ({2: torch.zeros(3, 4)[:, ::2]}, {}, r"tensor 0 has strides \[4, 2\], expected rows that lie together"),
        (
            {1: torch.tensor([0, 2], dtype=torch.int32)},
            {},
            r"query_start is \[0, 2\], expected to rise from 0 to the 3",
        ),
        ({0: torch.ones(3)}, {}, r"retained is torch\.float32, expected torch\.bool"),
        ({}, {"num_retained": 2}, "num_retained is 2, expected 3"),
        (
            dict(zip(range(2, 11), [torch.zeros(3)] * 9, strict=True)),
            {},
            "9 tensors are to be compacted, expected 1 to 8",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(
    changes: dict[int, Any], options: dict[str, Any], message: str
) -> None:
    given = {0: torch.ones(3, dtype=torch.bool), 1: torch.tensor([0, 3], dtype=torch.int32), 2: torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=message):
        compact(*{**given, **changes}.values(), **options)
