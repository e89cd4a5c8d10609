"""FOCUS's selection: the engine's rule, the reference and the kernel agree bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.policies.focus import budget, retain
from dsim.engine.state import MASKED, PENDING
from dsim.kernels.focus_select import focus_select

from .places import EVERYWHERE, Place

Sequence = tuple[list[float], list[int], list[int], int, int, int]  # see `arguments`


def layers(delta: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Importance in two layers that differs by about that."""
    first = (np.arange(len(delta)) % 7 + 1).astype(np.float32)
    return first, first + np.array(delta, np.float32)


def arguments(sequences: list[Sequence]) -> list[torch.Tensor]:
    """Sequences as (delta of masked tokens, their positions, others' positions, num_decoded, num_steps, progress)."""
    masked, positions, first, second = [], [], [], []
    for delta, own, others, *_ in sequences:
        row = len(positions)
        order = sorted([*own, *others])
        positions += order
        masked += [row + order.index(p) for p in own]
        for layer, values in zip((first, second), layers(delta), strict=True):
            layer += values.tolist()
    return [
        torch.tensor(first),
        torch.tensor(second),
        torch.tensor(masked, dtype=torch.int64),
        torch.tensor([0, *(len(delta) for delta, *_ in sequences)]).cumsum(0).int(),
        torch.tensor(positions, dtype=torch.int32),
        *(torch.tensor([s[i] for s in sequences], dtype=torch.int32) for i in (3, 4, 5)),
    ]


def by_the_rule(sequences: list[Sequence], alpha: float, sample: bool = False) -> tuple[list[bool], list[int]]:
    keep, progress = [], []
    for delta, own, others, num_decoded, num_steps, before in sequences:
        width = max([*own, *others], default=0) + 1
        first, second = layers(delta)
        status, window = np.full(width, PENDING, np.uint8), np.zeros(width, np.bool_)
        change, kept = np.zeros(width, np.float32), np.zeros(width, np.bool_)
        status[own], window[[*own, *others]], change[own] = MASKED, True, second - first
        scratch = np.zeros(width, np.int64), np.zeros(width, np.uint8)
        retain(status, window, change, budget(num_decoded, num_steps, alpha), before, sample, kept, *scratch)
        keep += kept[sorted([*own, *others])].tolist()
        progress.append(max([before, *(p for p in own if kept[p])]))
    return keep, progress


def check(place: Place, sequences: list[Sequence], alpha: float, sample: bool = False) -> None:
    given = [t.to(place.device) for t in arguments(sequences)]
    with place.proved("focus_select"):
        keep, progress = focus_select(*given, alpha, sample_deviation=sample)
    assert (keep.tolist(), progress.tolist()) == by_the_rule(sequences, alpha, sample)


@st.composite
def a_sequence(draw: st.DrawFn) -> Sequence:
    order = draw(st.lists(st.sampled_from("mo."), max_size=40))  # masked, other, not computed
    own = [i for i, kind in enumerate(order) if kind == "m"]
    # Thirds tie often, and are rounded in every sum; the others are what scores look like.
    values = st.one_of(st.integers(-3, 3).map(lambda n: n / 3), st.floats(-40, 40, width=32, allow_subnormal=False))
    delta = [float(np.float32(draw(values))) for _ in own]
    others = [i for i, kind in enumerate(order) if kind == "o"]
    return delta, own, others, draw(st.integers(0, 20)), draw(st.integers(0, 6)), draw(st.integers(-1, 40))


@pytest.mark.parametrize("place", EVERYWHERE)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sequences=st.lists(a_sequence(), min_size=1, max_size=4),
    alpha=st.sampled_from([1.0, 1.2, 1.5, 1.8, 3.0]),
    sample=st.booleans(),
)
def test_any_batch_is_selected_as_the_rule_selects_it(
    place: Place, sequences: list[Sequence], alpha: float, sample: bool
) -> None:
    check(place, sequences, alpha, sample)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("num_masked", [1, 63, 64, 65, 257])
def test_lists_of_ugly_lengths_are_selected_as_the_rule_selects_them(place: Place, num_masked: int) -> None:
    generator = np.random.default_rng(num_masked)
    positions = np.cumsum(generator.integers(1, 3, 2 * num_masked)).tolist()
    delta = generator.normal(size=num_masked).astype(np.float32).tolist()
    own = sorted(generator.choice(positions, num_masked, replace=False).tolist())
    others = sorted({*positions} - {*own})
    check(place, [(delta, own, others, 7, 2, num_masked // 2), ([], [], [3], 0, 0, -1)], 1.5)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_importance_exactly_at_the_threshold_is_high(place: Place) -> None:
    equal = [([0.5] * m, list(range(m)), [], 0, 0, m) for m in (3, 7, 49, 63)]
    halves = [([0.0, 1.0] * m, list(range(0, 4 * m, 2)), [], 0, 0, 4 * m) for m in (3, 7, 11, 49)]
    check(place, [*equal, *halves], 1.0)
    assert by_the_rule(equal[:1], 1.0)[0] == [True] * 3
    check(place, [*equal, *halves], 1.0, sample=True)
    # The sample's deviation is a little more: a half less its mean no longer reaches it, and the leftmost is taken.
    assert by_the_rule(halves[:1], 1.0, sample=True)[0] == [False, True, False, False, False, False]
    assert by_the_rule(halves[:1], 1.0)[0] == [False, True] * 3


@pytest.mark.parametrize("place", EVERYWHERE)
def test_an_empty_batch_retains_nothing(place: Place) -> None:
    check(place, [], 1.5)


@pytest.mark.parametrize(
    ("changes", "alpha", "message"),
    [
        ({0: torch.zeros(3)}, 1.5, r"importance_first has shape \[3\], expected \[2\]"),
        ({1: torch.zeros(2).half()}, 1.5, r"importance_second is torch\.float16, expected torch\.float32"),
        ({2: torch.tensor([0, 3])}, 1.5, "masked holds 3, expected 0 to 2"),
        ({7: torch.zeros(2, dtype=torch.int32)}, 1.5, r"progress has shape \[2\], expected \[1\]"),
        ({}, 0.5, r"alpha is 0\.5, expected a finite number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_values(changes: dict[int, Any], alpha: float, message: str) -> None:
    sample = dict(enumerate(arguments([([1.0, 2.0], [0, 2], [1], 0, 0, -1)])))
    with pytest.raises(ValueError, match=message):
        focus_select(*{**sample, **changes}.values(), alpha)
