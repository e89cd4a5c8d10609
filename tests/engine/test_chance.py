"""Chance keyed by what it is about."""

import numpy as np
import pytest

from dsim.engine.chance import COMMIT, LENGTH, key, mix, uniform


def test_the_mixer_is_splitmix64_s_finalizer() -> None:
    # The published sequence of seed 0: state += golden, then the finalizer.
    states = np.array([0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A, 0xDAA66D2C7DDF743F], np.uint64)
    assert [hex(v) for v in mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_a_key_is_the_same_alone_and_among_others() -> None:
    index = np.arange(1000)
    together = key(7, COMMIT, index)
    assert together.tolist() == [int(key(7, COMMIT, int(i))[0]) for i in index]
    assert together[::-1].tolist() == key(7, COMMIT, index[::-1]).tolist()


def test_every_part_of_a_key_and_their_order_matter() -> None:
    keys = {int(key(*parts)[0]) for parts in [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 3, 0), (0, 1, 2, 3), (2, 2, 3)]}
    assert len(keys) == 6
    assert len(np.unique(key(0, np.arange(1, 8)[:, None], np.arange(10_000)))) == 70_000


@pytest.mark.parametrize("purpose", [COMMIT, LENGTH])
def test_draws_are_uniform_and_uncorrelated_between_neighbours(purpose: int) -> None:
    u = uniform(key(3, purpose, np.arange(100_000)))
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees: P < 0.001
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.012
    assert abs(np.corrcoef(u, uniform(key(4, purpose, np.arange(100_000))))[0, 1]) < 0.012


def test_a_draw_lies_strictly_between_0_and_1() -> None:
    u = uniform(np.array([0, 2**64 - 1], np.uint64))
    assert 0 < u[0] < 1e-15
    assert 1 - 1e-15 < u[1] < 1
