"""Optimus's elastic chunk: N_commit(c) b / T(c, b) worked out by hand (elastic-chunking.md 6.3)."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.engine import _record_of as record_of
from dsim.engine.errors import DsimError
from dsim.engine.latency import LatencyModel
from dsim.engine.part import numbers_of
from dsim.engine.policies import optimus
from dsim.engine.policy import parse

from ..reference.optimus import CommitCurve, choose_chunk
from ..worlds import SECOND, World
from .hand import asked

# Blocks of 8, candidates 2, 4, 6, 8, two observed steps at the largest. The prompt's blocks are whole, so that
# prefill shows no masks. T(x) = 1 + x / 4: 1.5, 2, 2.5, 3 s for one sequence.
OPTIMUS = "optimus:8,block_length=8,page_size=8"
SLOPED = LatencyModel(((0.0, 1.0),), 0.25)


@pytest.fixture(autouse=True)
def cold_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the observed steps at the largest chunk; 2 unless a test sets others."""
    monkeypatch.setattr(optimus.ElasticChunk, "cold_start", 2)
    return lambda steps: monkeypatch.setattr(optimus.ElasticChunk, "cold_start", steps)


def after_cold_start(spec: str, latency: LatencyModel, **world: int) -> World:
    """The largest chunk twice: 8 masks of which the first 3 commit, then 5 masks of which the first does."""
    w = asked(World(spec, latency=latency, **world), (8, 16))
    assert w.step() == "prefill 0:PPPPPPPP"
    assert w.step({0: [0, 1, 2]}) == "decode 0D:MMMMMMMM"
    assert w.step({0: [3]}) == "decode 0D:PPPMMMMM"
    return w


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
    w = after_cold_start(OPTIMUS, SLOPED)
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


def test_when_steps_cost_the_same_the_smallest_of_the_best_chunks_runs() -> None:
    w = after_cold_start(OPTIMUS, SECOND)
    assert w.step() == "decode 0D:cccPMMMM"
    assert w.plan.chunk == 6  # N is 2 at 6 and at 8


def test_a_larger_batch_takes_a_smaller_chunk() -> None:
    # 1 s up to 8 tokens, then 0.25 s each: alone, 6 is free; for two, T is 1, 1, 2, 3.
    latency = LatencyModel(((8.0, 1.0),), 0.25)
    assert after_cold_start(OPTIMUS, latency).step() == "decode 0D:cccPMMMM"
    w = asked(World(OPTIMUS, latency=latency), (8, 16), (8, 16))
    w.step()
    w.step({0: [0, 1, 2], 1: [0, 1, 2]})
    w.step({0: [3], 1: [3]})
    assert expected(w) == pytest.approx([1, 5 / 3, 2, 2])
    assert w.step() == "decode 0D:cccPMMMm 1D:cccPMMMm"


def test_a_chunk_of_two_commits_one_token_a_step() -> None:
    w = after_cold_start(OPTIMUS, LatencyModel(((0.0, 0.0),), 1.0))  # no floor: the cheapest token wins
    assert expected(w)[0] == 1.0
    assert w.step({0: [4]}) == "decode 0D:cccPMmmm"
    assert w.step({0: [5]}) == "decode 0D:ccccPMmm"
    assert expected(w)[0] == 1.0


def test_the_average_forgets_exponentially(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimus.ElasticChunk, "memory", 2)
    w = after_cold_start(OPTIMUS, SLOPED)
    assert curve(w) == [1, 1.5, 2, 2, 2, 2, 2, 2]
    w.step({0: [4]})  # 1, 1, 1 with weight 1/2, and the rest by 1.5 / 2
    assert curve(w) == [1, 1.25, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]


def test_rows_of_a_step_are_averaged_where_they_reach() -> None:
    w = asked(World(OPTIMUS), (8, 16), (14, 10))  # two masks in its first block: prefill is an observation of them
    assert w.step({1: [6, 7]}) == "prefill 0:PPPPPPPP 1:PPPPPPMM"
    assert curve(w) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert learned(w).observed == 1
    assert w.step({0: [0, 1, 2, 3]}) == "decode 0D:MMMMMMMM 1F:ccccccPP"  # no mask, nothing to learn from row 1
    assert curve(w) == [1, 2, 2.5, 3, 3, 3, 3, 3]
    # 4 masks left of row 0, 8 new ones of row 1; at least one commit is counted where a mask is among the first.
    assert w.step({0: [5], 1: [0, 1]}) == "decode 0D:PPPPMMMM 1D:MMMMMMMM"
    seen = [1, 1.5, 1.5, 1.5, 2, 2, 2, 2]
    before = [1, 2, 2.5, 3, 3, 3, 3, 3]
    assert curve(w) == pytest.approx([b + (s - b) / 3 for b, s in zip(before, seen, strict=True)])


@pytest.mark.parametrize(("hysteresis", "chunk"), [(0.2, 4), (0.3, 8)])
def test_a_chunk_is_kept_unless_another_gains_enough(hysteresis: float, chunk: int) -> None:
    # The best, 0.8333, gains 25 % on the last, 0.6667.
    w = after_cold_start(f"{OPTIMUS},hysteresis={hysteresis}", SLOPED)
    w.step()
    assert w.plan.chunk == chunk


def test_the_cold_start_runs_the_largest_chunk(cold_start: Callable[[int], None]) -> None:
    cold_start(3)
    w = asked(World("optimus:4,block_length=8,page_size=8", latency=SLOPED), (8, 8))
    w.step()
    assert w.step({0: [0]}) == "decode 0D:MMMMmmmm"
    assert w.step() == "decode 0D:PMMMmmmm"
    assert w.step({0: [1]}) == "decode 0D:cMMMMmmm"
    assert w.step() == "decode 0D:cPMmmmmm"  # three seen: 1 commit a step, cheapest at 2


def test_pending_tokens_come_first_when_the_chunk_shrinks(cold_start: Callable[[int], None]) -> None:
    cold_start(1)
    w = World(OPTIMUS, latency=LatencyModel(((0.0, 0.0),), 1.0))  # no floor: the cheapest token wins
    w.submit(0, 8, 8)
    w.step()
    assert w.step({0: [5]}) == "decode 0D:MMMMMMMM"
    assert w.schedule() == "decode 0D:MmmmmPmm"
    assert w.features()[:3] == (2, 2 * 10, 10)


def test_a_prefill_that_denoises_counts_as_an_observation_at_the_largest_chunk(
    cold_start: Callable[[int], None],
) -> None:
    cold_start(1)
    w = asked(World(OPTIMUS, latency=SLOPED), (4, 4))
    assert w.step({0: [4]}) == "prefill 0:PPPPMMMM"
    assert learned(w).observed == 1
    assert curve(w) == [1, 1, 1, 1, 1, 1, 1, 1]
    w.step()
    assert w.plan.chunk == 2  # rates 1/1.5, 1/2, ...


def test_an_elastic_chunk_needs_a_latency_model() -> None:
    with pytest.raises(DsimError, match="latency"):
        World(OPTIMUS, latency=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", ["2/4", "2/8"])
def test_hysteresis_holds_on_to_no_chunk_before_the_first_is_chosen(
    candidates: str, cold_start: Callable[[int], None]
) -> None:
    cold_start(1)
    # Prefill is the one observation of the cold start, so that the first decode step chooses already.
    w = asked(World(f"optimus,block_length=16,page_size=16,hysteresis=0.5,candidates={candidates}"), (8, 8))
    assert w.step({0: [8]}) == "prefill 0:PPPPPPPPMMMMMMMM"
    assert w.step() == "decode 0D:ccccccccPMmmmmmm"


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 32]), st.booleans(), st.sampled_from([1, 5, 300]),
    st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_what_is_learned_and_chosen_is_the_oracle_s_bit_for_bit(
    seed: int, block: int, obs: bool, memory: int, hysteresis: float
) -> None:
    rng = np.random.default_rng(seed)
    policy = parse(f"optimus:{block},block_length={block},obs={str(obs).lower()},hysteresis={hysteresis}")
    p, m = (found.view(np.recarray)[0] for found in (numbers_of(policy), record_of(policy)))
    size = policy.width
    curve = m["curve"][: size + 1]
    chunks, oracle, last = np.array(policy.granularity.chunks()), CommitCurve(size, memory), 0
    for _ in range(20):
        counts, sums = np.zeros((2, size + 1), np.int64)
        top = int(rng.integers(0, size + 1))
        counts[1 : top + 1] = np.sort(rng.integers(1, 9, top))[::-1]
        sums[1 : top + 1] = np.minimum(np.cumsum(rng.integers(0, 3, top)) + 1, counts[1 : top + 1] * size)
        m["observed"] = optimus._observe(curve, counts, sums, m["observed"], memory)
        oracle.observe(counts, sums)
        assert (m["observed"], curve.tobytes()) == (oracle.observed, oracle.curve.tobytes())
        m["latency"][: len(chunks)] = np.sort(rng.random(len(chunks))) + 0.1
        m["last"] = optimus._best(p, m)
        last = choose_chunk(policy.granularity, oracle, chunks, m["latency"][: len(chunks)], last)
        assert m["last"] == last
