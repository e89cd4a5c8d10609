"""Ragged paged attention against its definition and against PyTorch's own, and what it refuses."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.kernels.ragged_paged_attention import ragged_paged_attention

from .places import EVERYWHERE, KERNEL, Place

# Relative to the largest value read: fp32 sums in another order, otherwise the rounding to the dtype of the weights and
# of the result, half an epsilon each (the interpreter leaves the weights alone and truncates the result).
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}


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
    lengths, starts, table, offered = history.tolist(), query_start.tolist(), page_table.tolist(), listed.tolist()
    group = q.shape[1] // k_pages.shape[2]
    page_size = k_pages.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for s, own in enumerate(lengths):
        for row in range(starts[s], starts[s + 1]):
            block = int(positions[row]) // block_length
            seen = [
                (table[s][j // page_size], j % page_size)
                for j in range(own + listed.shape[1])
                if j // block_length <= block and (j < own or offered[s][j - own])
            ]
            if seen:
                pages, slots = torch.tensor(seen).T
                k = k_pages[pages, slots].double().repeat_interleave(group, 1)  # [keys, H, D]
                v = v_pages[pages, slots].double().repeat_interleave(group, 1)
                weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * scale).softmax(-1)
                out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


def check(found: torch.Tensor, expected: torch.Tensor, sample: World) -> None:
    assert found.shape == expected.shape
    if not expected.numel():
        return
    bound = TOLERANCE[found.dtype] * sample.arguments["v_pages"].nan_to_num().abs().max()
    assert bool(((found.cpu().double() - expected).abs() <= bound).all())


BATCHES = {
    "prefill of 1, 63 and 5": [(list(range(1)), 1, []), (list(range(63)), 63, []), (list(range(5)), 5, [])],
    "decode, ragged": [([8, 9, 10, 11], 8, [0, 1, 2, 3]), ([41], 40, [0, 1]), ([4, 6], 4, [0, 2])],
    "empty sequences": [([], 0, []), ([12, 13], 12, [0, 1]), ([], 20, []), ([0], 0, [0])],
    "a block across a page edge": [([14, 15, 16, 17], 14, [0, 1, 2, 3]), ([31, 33], 30, [1, 3])],
    "queries that see nothing": [([0, 3], 0, []), ([5, 2], 4, [1]), ([0], 0, [1, 2])],
    "one token": [([0], 0, [0])],
}


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_query_reads_the_keys_that_its_definition_lists(place: Place, batch: Any) -> None:
    sample = world(batch)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device))
    check(found, by_definition(**sample.arguments), sample)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("block_length", [1, 3, 8])
@pytest.mark.parametrize("num_queries", [1, 63, 200])
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
    check(found, expected[0].transpose(0, 1), sample)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_the_result_has_the_dtype_of_the_queries_and_its_precision(
    place: Place, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    sample = world([([30, 31, 33], 30, [0, 1, 3]), ([64], 64, [0])], heads=heads, head_dim=128, dtype=dtype)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device), scale=0.3)
    assert found.dtype == dtype
    check(found, by_definition(**sample.arguments, scale=0.3), sample)


LONG = [([100, 101, 103], 100, [0, 1, 3]), ([300], 300, [0]), ([], 40, []), ([2, 0], 0, [0, 2]), ([5], 0, [])]


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_of_every_size_are_read(place: Place, page_size: int, head_dim: int) -> None:
    sample = world(LONG, page_size=page_size, head_dim=head_dim, seed=page_size)
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device))
    check(found, by_definition(**sample.arguments), sample)


@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [2, 7])  # one is the default of a small device
def test_keys_may_be_split_among_any_number_of_programs(place: Place, num_splits: int, dtype: torch.dtype) -> None:
    from dsim.kernels.ragged_paged_attention.kernel import ragged_paged_attention as launch

    sample = world(LONG, dtype=dtype, heads=(4, 1))
    with place.proved():  # below the launcher
        found = launch(**sample.to(place.device), scale=0.125, num_splits=num_splits)
    check(found, by_definition(**sample.arguments), sample)


def test_keys_are_split_for_the_programs_that_reside_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsim.kernels.ragged_paged_attention import kernel

    monkeypatch.setattr(kernel, "num_multiprocessors", lambda device: 132)
    cpu, two = torch.device("cpu"), kernel.Tile(64, 4, 3, resident=2)
    # Blocks of 32 positions, 8 KV heads, 16 positions a tile: 16 programs a sequence, and 264 places for them.
    assert [kernel.most_splits(32 * n, n, 8, 16, two, cpu) for n in (1, 2, 8, 16, 17, 64)] == [16, 8, 2, 1, 1, 1]
    assert kernel.most_splits(1, 1, 8, 16, two, cpu) == 33
    assert kernel.most_splits(1, 1, 8, 16, two._replace(resident=1), cpu) == 16


@st.composite
def batches(draw: st.DrawFn) -> World:
    block_length = draw(st.integers(1, 9))
    width = draw(st.integers(0, 9))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        history = draw(st.integers(0, 80))
        own = draw(st.lists(st.integers(0, history + width), max_size=9))
        block = draw(st.lists(st.integers(0, width - 1), unique=True)) if width else []
        sequences.append((own, history, block))
    heads = draw(st.sampled_from([(1, 1), (3, 1), (4, 2)]))
    page_size, head_dim = draw(st.sampled_from([(1, 8), (5, 24), (16, 64)]))
    return world(
        sequences, page_size=page_size, heads=heads, head_dim=head_dim, block_length=block_length, width=width,
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@pytest.mark.parametrize("place", EVERYWHERE)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sample=batches())
def test_any_batch_is_read_by_the_definition(place: Place, sample: World) -> None:
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**sample.to(place.device))
    check(found, by_definition(**sample.arguments), sample)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_view_of_a_projection_and_one_layer_of_a_pool_are_read_where_they_lie(place: Place) -> None:
    sample = world(LONG)
    arguments = sample.to(place.device)
    whole = torch.full((len(arguments["q"]), 8, 64), torch.nan, device=place.device)
    whole[:, 2:6] = arguments["q"]
    pool = torch.full((2, 3, *arguments["k_pages"].shape), torch.nan, device=place.device)
    pool[0, 1], pool[1, 1] = arguments["k_pages"], arguments["v_pages"]
    views = {"q": whole[:, 2:6], "k_pages": pool[0, 1], "v_pages": pool[1, 1]}
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(**{**arguments, **views})
    check(found, by_definition(**sample.arguments), sample)


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
