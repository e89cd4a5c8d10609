"""Optimus's elastic chunk: N_commit(c) b / T(c, b) worked out by hand, and its oracle (elastic-chunking.md 6.3)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.engine import record_of
from dsim.engine.errors import DsimError
from dsim.engine.latency import LatencyModel
from dsim.engine.part import numbers_of
from dsim.engine.policies import optimus
from dsim.engine.policies.optimus import ElasticChunk
from dsim.engine.spec import parse

from ..worlds import World, asked

TINY = 1e-12

Floats = npt.NDArray[np.float64]


@dataclass
class CommitCurve:
    """What Optimus learns while it runs: the commits to expect of a chunk, from the steps it has seen.

    f(m), the commits when the m leftmost masks are computed; N_commit(c) solves N = f(c - N), which leaves room for the
    committed tokens that take a slot once more.
    """

    size: int
    memory: int
    observed: int = 0  # steps
    # f[m]; f[0] = 0. Before the first observation: one commit a step.
    curve: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.curve):
            self.curve = np.ones(self.size + 1)
            self.curve[0] = 0.0

    def observe(self, counts: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]) -> None:
        """Take in a step: counts[m] rows computed at least m positions, whose first m committed sums[m] in all."""
        top = int(np.flatnonzero(counts).max(initial=0))
        if top == 0:
            return
        seen = sums[1 : top + 1] / counts[1 : top + 1]
        before = self.curve[top]
        # The plain mean at first, so that the start is forgotten; then an exponential one.
        weight = 1.0 / min(self.observed + 1, self.memory)
        self.curve[1 : top + 1] += weight * (seen - self.curve[1 : top + 1])
        if top < self.size:
            self.curve[top + 1 :] *= self.curve[top] / before
        self.observed += 1

    def expected(self, chunks: npt.NDArray[np.int64]) -> Floats:
        """N_commit(c): commits a sequence and step at each chunk."""
        slots = np.maximum.accumulate(np.arange(self.size + 1) + self.curve)
        below = np.clip(np.searchsorted(slots, chunks, side="right") - 1, 0, self.size - 1)
        # Masks computed when the window's slots are full, between whole numbers of them; never more than there are.
        masks = below + (chunks - slots[below]) / np.maximum(slots[below + 1] - slots[below], TINY)
        expected: Floats = chunks - np.minimum(masks, self.size)
        return expected


def choose_chunk(policy: ElasticChunk, curve: CommitCurve, chunks: npt.NDArray[np.int64], latency: Floats) -> int:
    """The chunk of the next step, for latencies T(c, b) of the candidates; ties go to the smallest."""
    largest = int(chunks[-1])
    if curve.observed < policy.cold_start:
        return largest
    rate = curve.expected(chunks) / latency
    best = int(np.argmax(rate))
    return int(chunks[best])


# Blocks of 8, candidates 2, 4, 6, 8, two observed steps at the largest. The prompt's blocks are whole, so that
# prefill shows no masks. T(x) = 1 + x / 4: 1.5, 2, 2.5, 3 s for one sequence.
OPTIMUS = "optimus:8,block_length=8,page_size=8"
SLOPED = LatencyModel(((0.0, 1.0),), 0.25)


@pytest.fixture(autouse=True)
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimus.ElasticChunk, "cold_start", 2)


def learned(w: World) -> CommitCurve:
    """What the policy remembers, as its oracle has it."""
    held, p = w.engine._own.record[0], w.engine._own.fields[0]
    seen = held["curve"][: held["width"] + 1]
    return CommitCurve(8, int(p["memory"]), int(held["observed"]), seen)


def curve(w: World) -> list[float]:
    values: list[float] = np.round(learned(w).curve[1:], 12).tolist()
    return values


def expected(w: World) -> list[float]:
    values: list[float] = np.round(learned(w).expected(np.array([2, 4, 6, 8])), 12).tolist()
    return values


def test_after_the_cold_start_the_chunk_with_most_commits_a_second_runs() -> None:
    w = asked(World(OPTIMUS, latency=SLOPED), (8, 16))
    assert w.step() == "prefill 0:PPPPPPPP"
    # The largest chunk twice: 8 masks of which the first 3 commit, then 5 masks of which the first does.
    assert w.step({0: [0, 1, 2]}) == "decode 0D:MMMMMMMM"
    assert w.step({0: [3]}) == "decode 0D:PPPMMMMM"
    # Means of 1, 2, 3, 3, 3 and 1, 1, 1, 1, 1; what the second step could not see falls with the fifth: 3 x 2/3.
    assert curve(w) == [1, 1.5, 2, 2, 2, 2, 2, 2]
    # N = f(c - N): f(1) = 1; f(2 1/3) = 1 2/3; f(4) = 2; f(6) = 2.
    assert expected(w) == pytest.approx([1, 5 / 3, 2, 2])
    # Rates 1/1.5, 1.667/2, 2/2.5, 2/3.
    assert w.step({0: [4]}) == "decode 0D:cccPMMMm"
    assert w.plan.chunk == 4
    # Three masks were seen: 1, 1, 1 with weight 1/3, and the rest falls with the third, by 5/6.
    assert curve(w) == pytest.approx([1, 4 / 3] + [5 / 3] * 6)
    # f(2.5) = 1.5; f(4 1/3) = 5/3.
    assert expected(w) == pytest.approx([1, 1.5, 5 / 3, 5 / 3])


def test_an_elastic_chunk_needs_a_latency_model() -> None:
    with pytest.raises(DsimError, match="latency"):
        World(OPTIMUS, latency=None)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 32]), st.integers(1, 2), st.sampled_from([1, 5, 300]),
)  # fmt: skip
def test_what_is_learned_and_chosen_is_the_oracle_s_bit_for_bit(
    seed: int, block: int, num_blocks: int, memory: int
) -> None:
    rng = np.random.default_rng(seed)
    policy = parse(f"optimus:{block},block_length={block},num_blocks={num_blocks}")
    p, m = (found.view(np.recarray)[0] for found in (numbers_of(policy), record_of(policy)))
    size = policy.width
    curve = m["curve"][: size + 1]
    chunks, oracle = np.arange(2, policy.granularity.max_chunk + 1, 2), CommitCurve(size, memory)
    for _ in range(20):
        counts, sums = np.zeros((2, size + 1), np.int64)
        top = int(rng.integers(0, size + 1))
        counts[1 : top + 1] = np.sort(rng.integers(1, 9, top))[::-1]
        sums[1 : top + 1] = np.minimum(np.cumsum(rng.integers(0, 3, top)) + 1, counts[1 : top + 1] * size)
        m["observed"] = optimus._observe(curve, counts, sums, m["observed"], memory)
        oracle.observe(counts, sums)
        assert (m["observed"], curve.tobytes()) == (oracle.observed, oracle.curve.tobytes())
        m["latency"][: len(chunks)] = np.sort(rng.random(len(chunks))) + 0.1
        expected = choose_chunk(policy.granularity, oracle, chunks, m["latency"][: len(chunks)])
        assert optimus._best(p, m) == expected
