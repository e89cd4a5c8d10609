"""FOCUS's selection: the engine's rule, the reference and the kernel agree bit for bit."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.policies.focus import budget, retain
from dsim.engine.state import MASKED, PENDING
from dsim.kernels.focus_select import Masks, focus_select

from .places import EVERYWHERE, Place, int32, starts


class Sequence(NamedTuple):
    delta: list[float]  # of masked tokens
    own: list[int]  # their positions
    others: list[int]  # positions of other tokens
    num_decoded: int = 0
    num_steps: int = 0
    progress: int = -1

    @property
    def layers(self) -> tuple[np.ndarray, np.ndarray]:
        """Importance in two layers that differs by about delta."""
        first = (np.arange(len(self.delta)) % 7 + 1).astype(np.float32)
        return first, first + np.array(self.delta, np.float32)

    @property
    def positions(self) -> list[int]:
        return sorted([*self.own, *self.others])


def by_the_rule(sequences: list[Sequence], alpha: float, sample: bool = False) -> tuple[list[bool], list[int]]:
    keep, progress = [], []
    for s in sequences:
        width = max(s.positions, default=0) + 1
        first, second = s.layers
        status, window = np.full(width, PENDING, np.uint8), np.zeros(width, np.bool_)
        change, retained = np.zeros(width, np.float32), np.zeros(width, np.bool_)
        status[s.own], window[s.positions], change[s.own] = MASKED, True, second - first
        scratch = np.zeros(width, np.int64), np.zeros(width, np.uint8)
        num = budget(s.num_decoded, s.num_steps, alpha)
        retain(status, window, change, num, s.progress, sample, retained, *scratch)
        keep += retained[s.positions].tolist()
        progress.append(max([s.progress, *(p for p in s.own if retained[p])]))
    return keep, progress


def check(place: Place, sequences: list[Sequence], alpha: float, sample: bool = False) -> None:
    masked, positions = [], []
    for s in sequences:
        masked += [len(positions) + s.positions.index(p) for p in s.own]
        positions += s.positions
    layers = [torch.tensor([x for s in sequences for x in s.layers[i].tolist()], dtype=torch.float32) for i in (0, 1)]
    masks = Masks(
        torch.tensor(masked, dtype=torch.int64), starts([len(s.own) for s in sequences]), int32(*positions),
        *(int32(*(getattr(s, name) for s in sequences)) for name in ("num_decoded", "num_steps", "progress")),
    )  # fmt: skip
    keep, progress = place.call(focus_select, *layers, masks, alpha, sample_deviation=sample)
    assert (keep.tolist(), progress.tolist()) == by_the_rule(sequences, alpha, sample)


@st.composite
def a_sequence(draw: st.DrawFn) -> Sequence:
    order = draw(st.lists(st.sampled_from("mo."), max_size=40))  # masked, other, not computed
    own, others = ([i for i, kind in enumerate(order) if kind == wanted] for wanted in "mo")
    # Thirds tie often, and are rounded in every sum; the others are what scores look like.
    values = st.one_of(st.integers(-3, 3).map(lambda n: n / 3), st.floats(-40, 40, width=32, allow_subnormal=False))
    delta = [float(np.float32(draw(values))) for _ in own]
    return Sequence(delta, own, others, *(draw(st.integers(*bounds)) for bounds in ((0, 20), (0, 6), (-1, 40))))


@pytest.mark.parametrize("place", EVERYWHERE)
@settings(max_examples=20, deadline=None, derandomize=True)
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
@pytest.mark.parametrize("num_masked", [0, 1, 63, 64, 65, 257])
def test_lists_of_ugly_lengths_are_selected_as_the_rule_selects_them(place: Place, num_masked: int) -> None:
    generator = np.random.default_rng(num_masked)
    positions = np.cumsum(generator.integers(1, 3, 2 * num_masked)).tolist()
    delta = generator.normal(size=num_masked).astype(np.float32).tolist()
    own = sorted(generator.choice(positions, num_masked, replace=False).tolist()) if num_masked else []
    others = sorted({*positions} - {*own})
    check(place, [Sequence(delta, own, others, 7, 2, num_masked // 2), Sequence([], [], [3])], 1.5)
    check(place, [], 1.5)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_importance_exactly_at_the_threshold_is_high(place: Place) -> None:
    equal = [Sequence([0.5] * m, list(range(m)), [], progress=m) for m in (3, 7, 49, 63)]
    halves = [Sequence([0.0, 1.0] * m, list(range(0, 4 * m, 2)), [], progress=4 * m) for m in (3, 7, 11, 49)]
    check(place, [*equal, *halves], 1.0)
    assert by_the_rule(equal[:1], 1.0)[0] == [True] * 3
    check(place, [*equal, *halves], 1.0, sample=True)
    # The sample's deviation is a little more: a half less its mean no longer reaches it, and the leftmost is taken.
    assert by_the_rule(halves[:1], 1.0, sample=True)[0] == [False, True, False, False, False, False]
    assert by_the_rule(halves[:1], 1.0)[0] == [False, True] * 3
