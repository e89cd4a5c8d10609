"""Keys and values land in the slots they are sent to, and nowhere else."""

import pytest
import torch

from dsim.kernels.kv_scatter import kv_scatter

from .places import BF16, EVERYWHERE, FP16, FP32, Place, normal


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(("num_tokens", "dtype"), [(0, FP32), (1, FP16), (63, FP16), (63, BF16), (200, FP32)])
def test_every_row_lands_in_its_slot_and_no_other_slot_is_touched(
    place: Place, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    page_size, num_pages = 16, num_tokens // 16 + 2
    k, v = normal(num_tokens, 2, num_tokens, 2, 24, dtype=dtype).unbind()
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    pages = [torch.full((num_pages, page_size, 2, 24), torch.nan, dtype=dtype, device=place.device) for _ in range(2)]
    expected = [x.cpu().clone() for x in pages]
    with place.proved("kv_scatter"):
        kv_scatter(k.to(place.device), v.to(place.device), *pages, slots.to(place.device))
    for rows, held, found in zip((k, v), expected, pages, strict=True):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                held[slot // page_size, slot % page_size] = rows[row]
        torch.testing.assert_close(found.cpu(), held, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_one_layer_of_a_pool_and_columns_of_a_projection_are_written_where_they_lie(place: Place) -> None:
    pool = torch.zeros(2, 3, 4, 16, 2, 8, device=place.device)  # [k or v, layer, page, slot, Hkv, D]
    projection = torch.arange(5 * 48.0, device=place.device).view(5, 6, 8)  # queries, keys and values side by side
    slots = torch.tensor([0, 17, 63, -1, 2], device=place.device)
    with place.proved("kv_scatter"):
        kv_scatter(projection[:, 2:4], projection[:, 4:6], pool[0, 1], pool[1, 1], slots)
    for i in range(2):
        own = projection[[0, 1, 2, 4], 2 * i + 2 : 2 * i + 4]
        assert torch.equal(pool[i, 1].flatten(0, 1)[slots[[0, 1, 2, 4]]], own)
    assert int(pool.count_nonzero()) == 2 * 4 * 2 * 8
