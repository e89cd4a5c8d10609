"""Retained rows arrive, in order and bit for bit, and sequences know where theirs begin."""

import pytest
import torch

from dsim.kernels.compact import compact

from .places import BF16, EVERYWHERE, FP16, Place, int32, normal


def carried(num_rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What a step carries past its second layer, in ugly sizes; q is a view of a projection."""
    return [
        normal(1, num_rows, 1030, dtype=BF16),  # hidden
        normal(2, num_rows, 1030),  # residual
        normal(3, num_rows, 5, 24, dtype=FP16)[:, :4],  # q
        normal(4, num_rows, 1, 3, dtype=BF16),  # k, of an odd number of two bytes
        normal(5, num_rows, 2, 24, dtype=FP16),  # v
        torch.randint(2**62, (num_rows,), generator=generator),  # positions
        normal(6, num_rows, 7).double(),
        torch.rand(num_rows, 3, generator=generator) < 0.5,
    ]


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("starts", "share"),
    [([0, 1], 1.0), ([0, 1], 0.0), ([0, 0, 40, 63, 63], 0.4), ([0, 63], 1.0), ([0, 150, 200], 0.1), ([0, 0], 0.5)],
)
def test_the_rows_retained_arrive_in_order_and_bit_for_bit(place: Place, starts: list[int], share: float) -> None:
    generator = torch.Generator().manual_seed(starts[-1])
    own = carried(starts[-1], generator)
    retained = torch.rand(starts[-1], generator=generator) < share
    start_after, rows, moved = place.call(compact, retained, int32(*starts), *own)
    expected = [i for i, r in enumerate(retained.tolist()) if r]
    assert rows.tolist() == expected
    assert start_after.tolist() == [sum(i < s for i in expected) for s in starts]
    for before, after in zip(own, moved, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before[expected])


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_caller_that_knows_the_number_and_fewer_tensors_is_served_too(place: Place) -> None:
    retained, rows = torch.tensor([True, False, True]), torch.arange(6).view(3, 2)
    start_after, _, (moved,) = place.call(compact, retained, int32(0, 3), rows, num_retained=2, check=False)
    assert (start_after.tolist(), moved.tolist()) == ([0, 2], [[0, 1], [4, 5]])
