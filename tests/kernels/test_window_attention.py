"""Attention within a window against its definition."""

import pytest
import torch
from torch import Tensor

from dsim.kernels.window_attention import Spans, window_attention

from .places import BF16, EVERYWHERE, FP32, Place, attended, int32, normal, starts
from .test_ragged_paged_attention import near

World = tuple[Tensor, Tensor, Tensor, Spans]


def world(
    sequences: list[tuple[int, int]], window: int, *, page_size: int = 16, heads: tuple[int, int] = (4, 2),
    head_dim: int = 32, dtype: torch.dtype = FP32,
) -> World:  # fmt: skip
    """Sequences as (rows, keys); slots and pages that no row's window reaches are NaN and absent."""
    held = [-(-max(keys, 1) // page_size) for _, keys in sequences]
    num_pages = sum(held) + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(sequences), max(held) + 1), -1, dtype=torch.int32)
    pages = normal(2, 2, num_pages, page_size, heads[1], head_dim, dtype=dtype)
    unwritten = torch.ones(num_pages, page_size, dtype=torch.bool)
    for s, (rows, keys) in enumerate(sequences):
        table[s, : held[s]] = order[sum(held[:s]) :][: held[s]]
        low = max(0, keys - rows - window + 1) if window else 0
        for j in range(low, keys):
            unwritten[table[s, j // page_size], j % page_size] = False
        table[s, : low // page_size] = -1
    pages[:, unwritten] = torch.nan
    q = normal(3, sum(rows for rows, _ in sequences), heads[0], head_dim, dtype=dtype)
    spans = Spans(table, starts([rows for rows, _ in sequences]), int32(*(keys for _, keys in sequences)))
    return q, pages[0], pages[1], spans


def by_definition(sample: World, window: int, causal: bool, scale: float) -> Tensor:
    """Every row for itself, in fp64, over a list of the keys that it sees."""
    q, k_pages, v_pages, spans = sample
    out = torch.zeros(q.shape, dtype=torch.float64)
    page_size, start, table = k_pages.shape[1], spans.query_start.tolist(), spans.page_table.tolist()
    for s, keys in enumerate(spans.lengths.tolist()):
        begin = keys - (start[s + 1] - start[s])
        for row in range(start[s], start[s + 1]):
            position = begin + row - start[s]
            first = position if causal else begin
            seen = [
                (table[s][j // page_size], j % page_size)
                for j in range(keys)
                if (not causal or j <= position) and (not window or j > first - window)
            ]
            if seen:
                out[row] = attended(q[row], (k_pages, v_pages), seen, scale)
    return out


SEQUENCES = [(5, 41), (0, 7), (1, 1), (12, 12), (3, 90), (4, 0), (2, 17)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("window", "page_size", "heads", "head_dim", "dtype"),
    [
        (0, 16, (4, 2), 32, FP32),
        (9, 16, (4, 2), 32, FP32),
        (20, 64, (8, 1), 24, FP32),
        (20, 64, (6, 2), 512, BF16),
        (9, 64, (4, 2), 256, BF16),
    ],
)
def test_every_row_reads_the_keys_of_its_window(
    place: Place, causal: bool, window: int, page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    sample = world(SEQUENCES, window, page_size=page_size, heads=heads, head_dim=head_dim, dtype=dtype)
    found = place.call(window_attention, *sample, window, causal, 0.3)
    near(found, by_definition(sample, window, causal, 0.3), sample)


def test_rows_of_many_tiles_are_read_tile_by_tile(place: Place) -> None:
    sample = world([(70, 300), (1, 5)], 40, head_dim=16)
    found = place.call(window_attention, *sample, 40, True, 1.0)
    near(found, by_definition(sample, 40, True, 1.0), sample)
