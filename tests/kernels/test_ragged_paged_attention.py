"""Ragged paged attention against its definition."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsim.kernels.ragged_paged_attention import WHOLE, Sequences, ragged_paged_attention
from dsim.live.padding import padded_shape

from ..checks import cases
from .places import BF16, FP16, FP32, KERNEL, Place, attended, int32, moved, normal, starts

# Relative to the largest value read: fp32 sums in another order, otherwise the rounding to the dtype of the weights and
# of the result, half an epsilon each (the interpreter leaves the weights alone and truncates the result).
TOLERANCE = {FP32: 2e-6, BF16: torch.finfo(BF16).eps, FP16: torch.finfo(FP16).eps}
World = tuple[Tensor, Tensor, Tensor, Sequences[Tensor]]  # q, k_pages, v_pages


def world(
    sequences: list[tuple[list[int], int, list[int]]],
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_length: int = 4,
    width: int = 4,
    dtype: torch.dtype = FP32,
    seed: int = 0,
    window: int = 0,
) -> World:
    """Sequences as (positions of the queries, history, listed positions of the block), pages in shuffled order.

    Pages and slots that no query's window reaches are absent and NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    held = [-(-(history + width) // page_size) for _, history, _ in sequences]
    num_pages = sum(held) + 3
    order = torch.randperm(num_pages, generator=generator).int()
    page_table = torch.full((len(sequences), max(held, default=0) + 1), -1, dtype=torch.int32)
    listed = torch.zeros(len(sequences), width, dtype=torch.bool)
    pages = normal(seed + 1, 2, num_pages, page_size, heads[1], head_dim, dtype=dtype)
    unwritten = torch.ones(num_pages, page_size, dtype=torch.bool)
    for s, (own, history, block) in enumerate(sequences):
        listed[s, block] = True
        page_table[s, : held[s]] = order[sum(held[:s]) :][: held[s]]
        low = max(0, min([*own, history]) - window + 1) if window else 0
        for j in [*range(low, history), *(history + i for i in block)]:
            unwritten[page_table[s, j // page_size], j % page_size] = False
        page_table[s, : low // page_size] = -1
    pages[:, unwritten] = torch.nan
    positions = int32(*(p for own, _, _ in sequences for p in own))
    history = int32(*(history for _, history, _ in sequences))
    start = starts([len(own) for own, _, _ in sequences])
    q = normal(seed + 2, len(positions), heads[0], head_dim, dtype=dtype)
    return q, pages[0], pages[1], Sequences(page_table, start, positions, history, listed, block_length)


def by_definition(sample: World, scale: float, window: int = 0) -> Tensor:
    """Every query and head for itself, in fp64, over a list of the keys that it sees."""
    q, k_pages, v_pages, sequences = sample
    out = torch.zeros(q.shape, dtype=torch.float64)
    table, start, positions, history, listed = (x.tolist() for x in sequences[:5])
    page_size, block_length = k_pages.shape[1], sequences.block_length
    for s, own in enumerate(history):
        for row in range(start[s], start[s + 1]):
            block = positions[row] // block_length
            seen = [
                (table[s][j // page_size], j % page_size)
                for j in range(own + len(listed[s]))
                if j // block_length <= block
                and (j < own or listed[s][j - own])
                and (not window or j > min(positions[row], own) - window)
            ]
            if seen:
                out[row] = attended(q[row], (k_pages, v_pages), seen, scale)
    return out


def near(found: Tensor, expected: Tensor, sample: tuple[Tensor, Tensor, Tensor, Any]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, sample[0].dtype)
    if expected.numel():
        bound = TOLERANCE[found.dtype] * sample[2].nan_to_num().abs().max()
        assert bool(((found.cpu().double() - expected).abs() <= bound).all())


def check(place: Place, sample: World) -> None:
    found = place.call(ragged_paged_attention, *sample)
    near(found, by_definition(sample, sample[0].shape[2] ** -0.5), sample)


BATCHES = {
    "prefill of 1, 63 and 5": [(list(range(1)), 1, []), (list(range(63)), 63, []), (list(range(5)), 5, [])],
    "decode, ragged": [([8, 9, 10, 11], 8, [0, 1, 2, 3]), ([41], 40, [0, 1]), ([4, 6], 4, [0, 2])],
    "empty sequences": [([], 0, []), ([12, 13], 12, [0, 1]), ([], 20, []), ([0], 0, [0])],
    "a block across a page edge": [([14, 15, 16, 17], 14, [0, 1, 2, 3]), ([31, 33], 30, [1, 3])],
    "queries that see nothing": [([0, 3], 0, []), ([5, 2], 4, [1]), ([0], 0, [1, 2])],
    "one token": [([0], 0, [0])],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_query_reads_the_keys_that_its_definition_lists(place: Place, batch: Any) -> None:
    check(place, world(batch))


LONG: Any = [([100, 101, 103], 100, [0, 1, 3]), ([300], 300, [0]), ([], 40, []), ([2, 0], 0, [0, 2]), ([5], 0, [])]


FEW: Any = [([30, 31, 33], 30, [0, 1, 3]), ([64], 64, [0])]


@cases(
    "batch shape",
    *(
        ([(list(range(num)), num, [])], {"block_length": block_length, "page_size": 64})
        for num, block_length in ((1, 3), (63, 1), (63, 8), (200, 3))
    ),
    *(
        (FEW, {"heads": heads, "dtype": dtype, "head_dim": 128})
        for heads, dtype in (((4, 4), FP32), ((8, 2), BF16), ((7, 1), FP16), ((7, 1), BF16), ((4, 4), FP16))
    ),
    *(
        (LONG, {"page_size": page_size, "head_dim": head_dim, "seed": page_size})
        for page_size, head_dim in ((16, 128), (64, 64), (256, 128))
    ),
)
def test_blocks_heads_dtypes_and_pages_of_every_size_are_read(place: Place, batch: Any, shape: Any) -> None:
    check(place, world(batch, **shape))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize(("num_splits", "dtype"), [(2, FP32), (7, FP32), (7, BF16), (70, FP32)])  # a small device: 1
def test_keys_may_be_split_among_any_number_of_programs(place: Place, num_splits: int, dtype: torch.dtype) -> None:
    from dsim.kernels.ragged_paged_attention.ragged_paged_attention_kernel import ragged_paged_attention as launch

    sample = world(LONG, dtype=dtype, heads=(4, 1))
    found = launch(*moved(sample, place.device), num_splits=num_splits)
    near(found, by_definition(sample, 0.125), sample)


TEXT: Any = [(list(range(36, 41)), 41, []), ([0], 1, []), (list(range(87, 90)), 90, []), (list(range(12)), 12, [])]
CANVAS: Any = [(list(range(36, 42)), 36, list(range(6))), (list(range(6)), 0, list(range(6))), ([], 5, [])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("batch", "block_length"), [(TEXT, 1), (CANVAS, WHOLE)], ids=["text", "canvas"])
@cases(
    "window page_size heads head_dim dtype",
    (9, 16, (4, 2), 32, FP32),
    (20, 64, (8, 1), 24, FP32),
    (20, 10, (4, 2), 32, FP32),
    (0, 64, (6, 2), 512, BF16),
    (9, 64, (4, 2), 256, BF16),
)
def test_a_window_hides_earlier_keys_of_text_and_of_canvases(
    place: Place,
    batch: Any,
    block_length: int,
    window: int,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    shape: Any = {"page_size": page_size, "heads": heads, "head_dim": head_dim, "block_length": block_length}
    sample = world(batch, **shape, width=6, dtype=dtype, window=window)
    output = place.call(ragged_paged_attention, *sample, window, 0.3)
    near(output, by_definition(sample, 0.3, window), sample)


@pytest.mark.parametrize("place", KERNEL)
@pytest.mark.parametrize("num_splits", [2, 5])
def test_a_window_is_split_among_programs(place: Place, num_splits: int) -> None:
    from dsim.kernels.ragged_paged_attention.ragged_paged_attention_kernel import ragged_paged_attention as launch

    batch: Any = [(list(range(600, 606)), 600, list(range(6))), ([0, 1], 0, [0, 1])]
    sample = world(batch, width=6, window=500, block_length=WHOLE)
    output = launch(*moved(sample, place.device), 500, num_splits=num_splits)
    near(output, by_definition(sample, 0.125, 500), sample)


@pytest.mark.parametrize(
    ("n", "window", "rows", "splits"),
    [(1, 1, 16, 33), (2, 5, 32, 16), (4, 9, 64, 8), (8, 12, 64, 4), (16, 20, 128, 1), (64, 7, 32, 1), (64, 12, 64, 1)],
)
def test_a_padded_step_is_launched_for_its_sequences_without_the_spare_one(
    n: int, window: int, rows: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention_kernel as kernel

    attend, padded = MagicMock(), padded_shape(max(1, n * window - 1), n)
    monkeypatch.setattr(kernel, "_attend", attend)
    monkeypatch.setattr(kernel, "_merge", MagicMock())
    monkeypatch.setattr(kernel, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel, "shared_memory", lambda device: 227 * 1024)
    q, pages = (torch.empty(*shape, 128, dtype=BF16, device="meta") for shape in ((padded[0], 32), (1, 64, 8)))
    table = torch.empty(padded[1], 512, dtype=torch.int32, device="meta")
    none = table[0]
    kernel.ragged_paged_attention(q, pages, pages, Sequences(table, none, none, none, table[:, :32], 32, 1))
    ((grid,), _) = attend.__getitem__.call_args
    assert (attend[grid].call_args.args[-1].rows, grid[1]) == (rows, splits)


@st.composite
def batches(draw: st.DrawFn) -> World:
    width = draw(st.integers(0, 9))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        history = draw(st.integers(0, 80))
        own = draw(st.lists(st.integers(0, history + width), max_size=9))
        block = draw(st.lists(st.integers(0, width - 1), unique=True)) if width else []
        sequences.append((own, history, block))
    page_size, head_dim = draw(st.sampled_from([(1, 8), (5, 24), (16, 64)]))
    return world(
        sequences, page_size=page_size, heads=draw(st.sampled_from([(1, 1), (3, 1), (4, 2)])), head_dim=head_dim,
        block_length=draw(st.integers(1, 9)), width=width, seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sample=batches(), spare=st.integers(0, 1))
def test_any_batch_is_read_by_the_definition(place: Place, sample: World, spare: int) -> None:
    check(place, (*sample[:3], sample[3]._replace(spare=spare)))


def test_a_view_of_a_projection_and_one_layer_of_a_pool_are_read_where_they_lie(place: Place) -> None:
    sample = world(LONG)
    whole = torch.full((len(sample[0]), 8, 64), torch.nan, device=place.device)
    whole[:, 2:6] = sample[0]
    pool = torch.full((2, 3, *sample[1].shape), torch.nan, device=place.device)
    pool[0, 1], pool[1, 1] = sample[1], sample[2]
    with place.proved("ragged_paged_attention"):
        found = ragged_paged_attention(whole[:, 2:6], pool[0, 1], pool[1, 1], moved(sample[3], place.device))
    near(found, by_definition(sample, 0.125), sample)
