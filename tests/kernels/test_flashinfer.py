"""FlashInfer's attention behind the launcher, by a stand-in of its signatures: no device has run the real one."""

from typing import Any

import numpy as np
import pytest
import torch

from dsim.kernels import taken
from dsim.kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from dsim.kernels.ragged_paged_attention.flashinfer import Paged, seen_by_all

from . import fake_flashinfer

BLOCK = 4


class Blocks:
    """A whole block of each of some sequences, their keys in pages anywhere in a pool."""

    def __init__(self, lengths: list[int], page: int, seed: int) -> None:
        chance = np.random.default_rng(seed)
        n, most = len(lengths), -(-(max(lengths) + BLOCK) // page)
        self.history = np.array(lengths)
        self.query_start = np.arange(n + 1) * BLOCK
        self.positions = (self.history[:, None] + np.arange(BLOCK)).reshape(-1)
        self.listed = np.ones((n, BLOCK), np.bool_)
        self.table = chance.permutation(n * most).reshape(n, most).astype(np.int32)
        random = torch.Generator().manual_seed(seed)
        self.q = torch.randn(n * BLOCK, 6, 16, generator=random)
        self.keys, self.values = (torch.randn(n * most, page, 2, 16, generator=random) for _ in range(2))
        self.page = page

    def seen(self, **other: Any) -> Any:
        return seen_by_all(self.sequences()._replace(**other), self.page)

    def sequences(self) -> Sequences[Any]:
        return Sequences(self.table, self.query_start, self.positions, self.history, self.listed, BLOCK)

    def attend(self, planned: Any = None) -> torch.Tensor:
        *integers, listed, block = self.sequences()
        arrays = [torch.from_numpy(x.astype(np.int32)) for x in integers]
        sequences = Sequences(*arrays, torch.from_numpy(listed), block)
        return ragged_paged_attention(self.q, self.keys, self.values, sequences, planned=planned)


def paged(page: int) -> Paged:
    return Paged(fake_flashinfer, 6, 2, 16, page, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("page", [3, 8, 64])
@pytest.mark.parametrize("lengths", [[0], [4, 60, 0, 8], [12, 12]])
def test_whole_blocks_read_the_same(page: int, lengths: list[int]) -> None:
    blocks = Blocks(lengths, page, seed=page)
    before = taken.copy()
    read = blocks.attend(paged(page).plan(blocks.seen()))
    assert taken - before == {("ragged_paged_attention", "flashinfer"): 1}
    torch.testing.assert_close(read, blocks.attend(), rtol=1e-5, atol=1e-5)


def test_a_captured_step_reads_where_the_last_plan_of_its_shape_said() -> None:
    ours = paged(8)
    first, second = Blocks([4, 20], 8, 1), Blocks([28, 0], 8, 2)
    captured = ours.plan(first.seen(), most_pages=5)
    torch.testing.assert_close(first.attend(captured), first.attend(), rtol=1e-5, atol=1e-5)
    ours.plan(second.seen(), most_pages=5)
    torch.testing.assert_close(second.attend(captured), second.attend(), rtol=1e-5, atol=1e-5)


def test_a_row_that_does_not_see_all_keys_is_ours() -> None:
    blocks = Blocks([4, 20], 8, 1)
    hole = blocks.listed.copy()
    hole[1, 2] = False
    assert blocks.seen(listed=hole) is None
    hole[1, 3] = False  # nothing behind it: fewer keys, and all rows see them
    assert blocks.seen(listed=hole).last.tolist() == [8, 6]
    assert blocks.seen(history=blocks.history + BLOCK) is None  # as prompts are: rows see blocks before their own


def test_padding_sees_the_pools_first_key() -> None:
    blocks = Blocks([4, 20], 8, 1)
    blocks.table[1] = -1
    nothing = np.array([[True] * BLOCK, [False] * BLOCK])
    seen = blocks.seen(history=np.array([4, 0]), listed=nothing, positions=np.array([4, 5, 6, 7, 0, 0, 0, 0]))
    assert (seen.page_start.tolist(), seen.last.tolist(), seen.pages[1]) == ([0, 1, 2], [8, 1], 0)
