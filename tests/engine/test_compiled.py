"""The compiled rules are the plain ones, bit for bit."""

import hashlib
import inspect
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine import compiled, leap, rows

BLOCKS = (1, 2, 4, 8, 32, 64)
CASES = settings(max_examples=60, deadline=None, derandomize=True)


def same(a: object, b: object) -> None:
    """Equal types, shapes and bytes."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
        return
    x, y = np.asarray(a), np.asarray(b)
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


class Case:
    """A random batch: statuses, evaluations, windows of open positions, commits among the window's masks."""

    def __init__(self, seed: int, rows_: int, block: int, twice: bool) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.block, self.width = block, block * (2 if twice else 1)
        shape = (rows_, self.width)
        # Rows lean each their own way, so that some are all masked or all cached.
        lean = rng.dirichlet([0.5, 0.5, 0.5], rows_)
        self.status = np.array([rng.choice(3, self.width, p=p) for p in lean], np.uint8).reshape(shape)
        self.evaluations = rng.integers(0, 5, shape).astype(np.uint16)
        self.window = (rng.random(shape) < rng.random((rows_, 1))) & (self.status != rows.CACHED)
        self.masks = self.window & (self.status == rows.MASKED)
        self.committed = self.masks & (rng.random(shape) < rng.random((rows_, 1)))
        self.slots = rng.permutation(rows_).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 6)), draw(st.sampled_from(BLOCKS)), draw(st.booleans())
    )


def test_every_compiled_rule_is_held_to_its_plain_twin_here() -> None:
    def rules(module: object) -> set[str]:
        return {n for n, v in vars(module).items() if callable(v) and not n.startswith("_") and not isinstance(v, type)}

    plain = {name for name in rules(rows) if inspect.getmodule(getattr(rows, name)) is rows}
    assert {"select_window", "visible_keys", "apply", "count_prefixes", "draw_commits"} == plain & rules(compiled)


@CASES
@given(cases(), st.integers(0, 70), st.booleans())
def test_windows_are_the_same(case: Case, chunk: int, pending_first: bool) -> None:
    reach = case.rng.choice([case.block, case.width], len(case.status)).astype(np.int32)
    args = (case.status, reach, chunk, pending_first)
    window = rows.select_window(*args)
    same(window, compiled.select_window(*args))
    assert (window.sum(axis=1) <= chunk).all()


@CASES
@given(cases(), st.booleans())
def test_visible_keys_are_the_same(case: Case, listed: bool) -> None:
    args = (case.status, case.window, case.block, listed)
    same(rows.visible_keys(*args), compiled.visible_keys(*args))


@CASES
@given(cases(), st.sampled_from([rows.BLOCK_PASS, rows.DELAYED, rows.NEIGHBOUR]), st.integers(0, 3))
def test_states_after_a_step_are_the_same(case: Case, rule: int, more: int) -> None:
    out = []
    for module in (rows, compiled):
        status = np.zeros((len(case.slots) + more, case.width), np.uint8)
        evaluations = np.full(status.shape, 9, np.uint16)
        status[case.slots], evaluations[case.slots] = case.status, case.evaluations
        left = module.apply(status, evaluations, case.slots, case.window, case.committed, case.block, rule)
        out.append((status, evaluations, *left))
    same(*out)


@CASES
@given(cases(), st.booleans())
def test_prefix_counts_are_the_same(case: Case, pending_counts: bool) -> None:
    out = []
    for module in (rows, compiled):
        sums: npt.NDArray[np.int64] = np.zeros((2, case.width + 1), np.int64)
        module.count_prefixes(case.status, case.window, case.committed, pending_counts, sums[0], sums[1])
        out.append(sums)
    same(*out)


def draws_of(case: Case, chance: npt.NDArray[np.float64]) -> None:
    rng, n, block = case.rng, len(case.status), case.block
    first = rng.integers(0, 50, n)
    with np.errstate(divide="ignore"):
        odds = chance / (1 - chance)
    args = (
        case.status, case.evaluations, case.window, (first * block).astype(np.int32),
        (first + rng.integers(0, 3, n)).astype(np.int32), rng.integers(0, 3, n).astype(np.int32),
        rng.integers(0, 2**64, (n, 3), np.uint64), np.exp(rng.normal(size=n)), odds, np.exp(rng.normal(size=block + 1)),
        np.exp(np.sort(rng.normal(size=1024))), np.exp(np.sort(rng.normal(size=1024))), block,
    )  # fmt: skip
    committed = rows.draw_commits(*args)
    same(committed, compiled.draw_commits(*args))
    assert not (committed & ~case.masks).any()
    assert (committed.any(axis=1) == case.masks.any(axis=1)).all()


@settings(CASES, max_examples=120)
@given(cases())
def test_commits_are_the_same(case: Case) -> None:
    draws_of(case, case.rng.random(case.width) * case.rng.random())


@pytest.mark.parametrize("certain", [0.0, 1e-12, 1.0])
def test_commits_are_the_same_when_chance_is_nearly_none_or_certain(certain: float) -> None:
    for seed in range(20):
        case = Case(seed, 5, 8, seed % 2 == 0)
        draws_of(case, np.where(case.rng.random(case.width) < 0.5, certain, 0.3))
        draws_of(case, np.full(case.width, certain))


def test_leaps_know_which_rules_they_were_compiled_with() -> None:
    found = hashlib.sha256(Path(compiled.__file__).read_bytes()).hexdigest()[:12]
    assert found == leap.RULES, f"compiled.py has changed: leap.RULES is to be {found}"
