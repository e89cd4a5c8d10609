"""Ragged paged attention against its definition and against PyTorch's own, and what it refuses."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dsim.kernels.ragged_paged_attention import ragged_paged_attention

from .places import REFERENCE, Place

# Relative to an exact result rounded to the dtype: fp32 sums in another order, otherwise the dtype's own rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass(frozen=True)
class World:
    """A batch's arguments by name, on the CPU."""

    arguments: dict[str, Any]

    def to(self, device: str) -> dict[str, Any]:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.arguments.items()}

    def but(self, **changes: Any) -> "World":
        return replace(self, arguments={**self.arguments, **changes})


def world(
    sequences: list[tuple[list[int], int, list[int]]],
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_length: int = 4,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> World:
    """Sequences as (positions of the queries, history, listed positions of the block), pages in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    num_keys = [history + width for _, history, _ in sequences]
    held = [-(-n // page_size) for n in num_keys]
    num_pages = sum(held) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    page_table = torch.full((len(sequences), max(held, default=0) + 1), -1, dtype=torch.int32)
    listed = torch.zeros(len(sequences), width, dtype=torch.bool)
    k_pages = torch.randn(num_pages, page_size, heads[1], head_dim, generator=generator)
    v_pages = torch.randn(num_pages, page_size, heads[1], head_dim, generator=generator)
    unwritten = torch.ones(num_pages, page_size, dtype=torch.bool)
    for s, (_, history, block) in enumerate(sequences):
        listed[s, block] = True
        page_table[s, : held[s]] = torch.tensor(order[: held[s]])
        order = order[held[s] :]
        for j in [*range(history), *(history + i for i in block)]:
            unwritten[page_table[s, j // page_size], j % page_size] = False
    k_pages[unwritten] = v_pages[unwritten] = torch.nan
    positions = [p for own, _, _ in sequences for p in own]
    starts = torch.tensor([0, *(len(own) for own, _, _ in sequences)]).cumsum(0)
    return World(
        {
            "q": torch.randn(len(positions), heads[0], head_dim, generator=generator).to(dtype),
            "k_pages": k_pages.to(dtype),
            "v_pages": v_pages.to(dtype),
            "page_table": page_table,
            "query_start": starts.to(torch.int32),
            "positions": torch.tensor(positions, dtype=torch.int32),
            "history": torch.tensor([history for _, history, _ in sequences], dtype=torch.int32),
            "listed": listed,
            "block_length": block_length,
        }
    )


def by_definition(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    listed: torch.Tensor,
    block_length: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Every query and head for itself, in fp64, over a list of the keys that it sees."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[2]
    page_size = k_pages.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for s in range(len(history)):
        for row in range(int(query_start[s]), int(query_start[s + 1])):
            seen = [
                (int(page_table[s, j // page_size]), j % page_size)
                for j in range(int(history[s]) + listed.shape[1])
                if j // block_length <= int(positions[row]) // block_length
                and (j < history[s] or listed[s, j - int(history[s])])
            ]
            if seen:
                pages, slots = torch.tensor(seen).T
                k = k_pages[pages, slots].double().repeat_interleave(group, 1)  # [keys, H, D]
                v = v_pages[pages, slots].double().repeat_interleave(group, 1)
                weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * scale).softmax(-1)
                out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The largest error over the largest value expected, both in the whole batch."""
    error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[found.dtype], f"{float(error)} > {TOLERANCE[found.dtype]}"


BATCHES = {
    "prefill of 1, 63 and 5": [(list(range(1)), 1, []), (list(range(63)), 63, []), (list(range(5)), 5, [])],
    "decode, ragged": [([8, 9, 10, 11], 8, [0, 1, 2, 3]), ([41], 40, [0, 1]), ([4, 6], 4, [0, 2])],
    "empty sequences": [([], 0, []), ([12, 13], 12, [0, 1]), ([], 20, []), ([0], 0, [0])],
    "a block across a page edge": [([14, 15, 16, 17], 14, [0, 1, 2, 3]), ([31, 33], 30, [1, 3])],
    "queries that see nothing": [([0, 3], 0, []), ([5, 2], 4, [1]), ([0], 0, [1, 2])],
    "one token": [([0], 0, [0])],
}


@pytest.mark.parametrize("place", [REFERENCE], ids=["reference"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_query_reads_the_keys_that_its_definition_lists(place: Place, batch: Any) -> None:
    sample = world(batch)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device))
    check(found, by_definition(**sample.arguments))


@pytest.mark.parametrize("place", [REFERENCE], ids=["reference"])
@pytest.mark.parametrize("block_length", [1, 3, 8])
@pytest.mark.parametrize("num_queries", [1, 63, 600])
def test_a_prefill_is_what_torch_computes_under_the_block_causal_mask(
    place: Place, num_queries: int, block_length: int
) -> None:
    sample = world([(list(range(num_queries)), num_queries, [])], block_length=block_length, page_size=64)
    blocks = torch.arange(num_queries) // block_length
    a = sample.arguments
    own = a["page_table"][0, a["page_table"][0] >= 0]
    k, v = (a[name][own].flatten(0, 1)[:num_queries].transpose(0, 1)[None].double() for name in ("k_pages", "v_pages"))
    q = a["q"].transpose(0, 1)[None].double()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=blocks <= blocks[:, None], enable_gqa=True)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device))
    check(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("place", [REFERENCE], ids=["reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_the_result_has_the_dtype_of_the_queries_and_its_precision(
    place: Place, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    sample = world([([30, 31, 33], 30, [0, 1, 3]), ([64], 64, [0])], heads=heads, head_dim=128, dtype=dtype)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device), scale=0.3)
    assert found.dtype == dtype
    check(found, by_definition(**sample.arguments, scale=0.3))


DECODE = world([([8, 9, 10], 8, [0, 1, 2]), ([41], 40, [0, 1])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_pages": torch.zeros(1, 16, 2, 64)}, r"v_pages has shape \[1, 16, 2, 64\], expected \[7, 16, 2, 64\]"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions has shape \[3\], expected \[4\]"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, r"query_start has shape \[2\], expected \[3\]"),
        ({"q": torch.zeros(4, 3, 64)}, "q has 3 heads, expected a multiple of the 2 of k_pages"),
        ({"q": torch.zeros(4, 4, 64, dtype=torch.float64)}, "q is torch.float64, expected torch.float32 or"),
        ({"history": torch.tensor([8, 40])}, "history is torch.int64, expected torch.int32"),
        ({"q": torch.zeros(4, 4, 128)[:, :, ::2]}, "q has stride 2 in its last dimension, expected 1"),
        ({"block_length": 0}, "block_length is 0, expected at least 1"),
        (
            {"query_start": torch.tensor([0, 3, 5], dtype=torch.int32)},
            r"query_start is \[0, 3, 5\], expected to rise from 0 to the 4 rows of q",
        ),
        ({"positions": torch.tensor([8, -9, 1, 2], dtype=torch.int32)}, "positions holds -9, expected at least 0"),
        ({"history": torch.tensor([-1, 4], dtype=torch.int32)}, "history holds -1, expected at least 0"),
        (
            {"history": torch.tensor([8, 90], dtype=torch.int32)},
            "sequence 1 has 92 keys, expected at most the 64 of its pages",
        ),
        (
            {"page_table": torch.tensor([[0, -1, -1, -1], [1, 7, 2, 3]], dtype=torch.int32)},
            r"page_table\[1, 1\] is 7, expected 0 to 6",
        ),
        (
            {"page_table": torch.tensor([[-1, 0, -1, -1], [1, 6, 2, 3]], dtype=torch.int32)},
            r"page_table\[0, 0\] is -1, expected 0 to 6",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**DECODE.but(**changes).arguments)


def test_pages_that_no_query_needs_may_be_absent() -> None:
    table = DECODE.arguments["page_table"].clone()
    table[0, 1:] = -1  # 11 keys fit the first page
    before = ragged_paged_attention(**DECODE.arguments)
    assert torch.equal(ragged_paged_attention(**DECODE.but(page_table=table).arguments), before)
