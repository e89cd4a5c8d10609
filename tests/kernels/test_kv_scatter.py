"""Keys and values land in the slots they are sent to, and nowhere else."""

from typing import Any

import pytest
import torch

from dsim.kernels.kv_scatter import kv_scatter

from .places import EVERYWHERE, Place


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [(0, torch.float32), (1, torch.float16), (63, torch.float16), (63, torch.bfloat16), (200, torch.float32)],
)
def test_every_row_lands_in_its_slot_and_no_other_slot_is_touched(
    place: Place, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    page_size, num_pages = 16, num_tokens // 16 + 2
    k, v = (torch.randn(num_tokens, 2, 24, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    k_pages, v_pages = (torch.full((num_pages, page_size, 2, 24), torch.nan, dtype=dtype) for _ in range(2))
    arguments = [t.to(place.device) for t in (k, v, k_pages, v_pages, slots)]
    with place.proved("kv_scatter"):
        kv_scatter(*arguments)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_pages[slot // page_size, slot % page_size] = k[row]
            v_pages[slot // page_size, slot % page_size] = v[row]
    torch.testing.assert_close(arguments[2].cpu(), k_pages, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(arguments[3].cpu(), v_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_one_layer_of_a_pool_and_columns_of_a_projection_are_written_where_they_lie(place: Place) -> None:
    pool = torch.zeros(2, 3, 4, 16, 2, 8, device=place.device)  # [k or v, layer, page, slot, Hkv, D]
    projection = torch.arange(5 * 48.0, device=place.device).view(5, 6, 8)  # queries, keys and values side by side
    slots = torch.tensor([0, 17, 63, -1, 2], device=place.device)
    with place.proved("kv_scatter"):
        kv_scatter(projection[:, 2:4], projection[:, 4:6], pool[0, 1], pool[1, 1], slots)
    assert torch.equal(pool[0, 1].flatten(0, 1)[slots[[0, 1, 2, 4]]], projection[[0, 1, 2, 4], 2:4])
    assert torch.equal(pool[1, 1].flatten(0, 1)[slots[[0, 1, 2, 4]]], projection[[0, 1, 2, 4], 4:6])
    assert int(pool.count_nonzero()) == 2 * 4 * 2 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.zeros(3, 2, 4)}, r"v has shape \[3, 2, 4\], expected \[3, 2, 8\]"),
        (
            {"k_pages": torch.zeros(2, 16, 1, 8)},
            r"k_pages has shape \[2, 16, 1, 8\], expected \[num_pages, page_size, 2",
        ),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots has shape \[4\], expected \[3\]"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots is torch.int32, expected torch.int64"),
        ({"v_pages": torch.zeros(2, 16, 2, 8).half()}, "v_pages is torch.float16, expected torch.float32"),
        ({"slots": torch.tensor([0, 32, 1])}, "slots holds 32, expected at most 31"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "k_pages": torch.zeros(2, 16, 2, 8),
        "v_pages": torch.zeros(2, 16, 2, 8),
        "slots": torch.arange(3),
    }
    with pytest.raises(ValueError, match=message):
        kv_scatter(**{**arguments, **changes})
