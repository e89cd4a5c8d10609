"""Full-sequence serving step by step: dLLM-Serve's scheduler as published and repaired, and static batches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import Phase, StepOutcome

from ..serving import Loop, Served
from ..worlds import toy_trace
from .hand import asked

SERVE = "dllm-serve,max_batched_tokens=1000"
COMPLETED, REJECTED = 0, 1


def collided(flag: str = "", num_pages: int = 10**6) -> Served:
    """R0 and R1 of 900 tokens about to refresh in the same step of 1,000, and N of 84 waiting."""
    w = asked(Served(SERVE + flag, num_pages=num_pages), (900 - 256, 256))
    assert w.steps(31) == ["0F", "0K", *["0r"] * 29]
    w.submit(1, 900 - 256, 256)
    assert w.step() == "0r 1F"  # 32 + 900 tokens
    w.submit(2, 20, 64)
    return w


# ---- dLLM-Serve as published (4.3) -----------------------------------------------------------------------------


def test_a_newcomer_takes_what_a_stalled_refresh_leaves_and_stands_before_it() -> None:
    w = collided()
    assert w.step() == "0F 2F"
    assert w.features()[0] == 900 + 84
    assert (w.plan.running, w.plan.waiting) == (3, 0)
    assert w.step() == "0K 2K"
    # In the running order the newcomer stands before the stalled request.
    assert w.step() == "0r 2r 1K"
    assert w.step() == "0r 2r 1r"


def behind_a_stalled(flag: str = "") -> Served:
    """Running 0 and 1 of 60 tokens, about to refresh in the same step of 100, and 2 of 12 behind them."""
    w = asked(Served("dllm-serve,max_batched_tokens=100,block_length=4,page_size=4" + flag), (52, 8))
    assert w.steps(3) == ["0F", "0K", "0r"]
    w.submit(1, 52, 8)
    w.submit(2, 4, 8)
    assert w.step() == "0r 1F 2F"
    return w


def test_who_runs_behind_a_stalled_refresh_is_skipped_whatever_it_needs() -> None:
    w = behind_a_stalled()
    assert w.steps(6) == ["0F", "0K", "0r 1K 2K", "0r 1r 2r", "1r 2r", "1F 2F"]


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    w = asked(Served(SERVE), (568, 32), (469, 32))  # 501: 101 too many
    w.submit(2, 10, 32)
    assert w.steps(3) == ["0F", "0K", "0r 1F 2F"]
    exactly = Served(SERVE)
    for i in range(2):
        exactly.submit(i, 468, 32)
    assert exactly.step() == "0F 1F"


def test_admission_is_in_order_of_arrival_and_a_newcomer_s_two_refreshes_keep_others_out() -> None:
    w = Served("dllm-serve,max_batched_tokens=1000,max_batch=3")
    for i, length in enumerate((400, 300, 300, 200, 100)):
        w.submit(i, length - 32, 32)
    assert w.steps(3) == ["0F 1F 2F", "0K 1K 2K", "0r 1r 2r"]
    w.steps(29)
    assert w["status"][:3] == [COMPLETED] * 3
    assert w.steps(2) == ["3F 4F", "3K 4K"]
    assert w["scheduled"][:5] == [0, 0, 0, 32, 32]


def test_a_request_waits_for_pages_and_all_behind_it_wait_with_it() -> None:
    w = asked(Served("dllm-serve,max_batched_tokens=4000", num_pages=3), (968, 32))  # 2 pages
    w.submit(1, 968, 32)
    w.submit(2, 68, 32)  # 1 page, and is free
    assert w.steps(32) == ["0F", "0K", *["0r"] * 30]
    assert w.step() == "1F 2F"


def test_a_request_that_no_step_or_pool_could_hold_is_rejected() -> None:
    w = Served(SERVE, num_pages=1)
    assert w.submit(0, 969, 32) is False  # 1,001 tokens in a step
    assert w.submit(1, 481, 32) is False  # 2 pages
    assert w.submit(2, 968, 33) is False  # two blocks
    assert w.submit(3, 480, 32) is True
    assert w.steps(33)[::32] == ["3F", "nothing"]
    assert w["status"][:4] == [REJECTED, REJECTED, REJECTED, COMPLETED]
    context = Served("dllm-serve")
    assert context.submit(0, 4064, 32) is True
    assert context.submit(1, 4065, 32) is False  # tokens of the context
    assert context.submit(2, 4064, 33) is False


def test_a_request_takes_as_many_steps_as_its_canvas_has_tokens() -> None:
    w = asked(Served("dllm-serve"), (100, 40))
    assert " ".join(w.steps(65)) == " ".join(["0F 0K", *["0r"] * 30] * 2 + ["nothing"])
    assert (w["num_committed"][0], w["num_tokens"][0], w["num_emissions"][0]) == (64, 40, 2)
    assert (w["first_commit"][0], w["first_block"][0], w["finish"][0]) == (1.0, 32.0, 64.0)


def test_features_of_a_step_add_up_over_its_rows() -> None:
    w = asked(Served("dllm-serve"), (100, 32))  # floor(0.5 * 100) = 50 kept
    w.steps(2)
    w.submit(1, 301, 64)
    assert w.step() == "0r 1F"
    # The head takes a block of each.
    assert w.features() == (32 + 365, 32 * 82 + 365**2, 82 + 365, 64, 64, 2, 0, 1)
    w.steps(2)
    assert w.features() == (64, 32 * (82 + 198), 82 + 198, 64, 64, 2, 0, 1)  # floor(0.5 * 333) = 166


# ---- each fault repaired alone ---------------------------------------------------------------------------------


def test_without_holding_who_runs_behind_a_stalled_refresh_runs() -> None:
    w = behind_a_stalled(",hold_behind_stalled=false")
    # The stalled one keeps its place.
    assert w.steps(4) == ["0F 2K", "0K 2r", "0r 1K 2r", "0r 1r 2F"]


def test_look_ahead_lets_no_one_in_whose_second_refresh_would_collide() -> None:
    w = asked(Served(SERVE + ",look_ahead=true"), (644, 256))
    w.steps(31)
    w.submit(1, 644, 256)
    # Published: let in now, and stalled in the next two steps.
    assert w.steps(4) == ["0r", "0F", "0K", "0r 1F"]
    assert w.step() == "0r 1K"


def test_look_ahead_reckons_with_a_request_s_end() -> None:
    w = asked(Served(SERVE + ",look_ahead=true"), (868, 32))
    w.steps(31)
    w.submit(1, 644, 256)
    assert w.steps(2) == ["0r 1F", "1K"]  # no block of 0 begins with the step after this one


CACHES = (
    "vanilla,",
    "fast-dllm:dual,",
    "fast-dllm:prefix,",
    "sparse-dllm:0.5,",
    "sparse-dllm:0.1,",
    "dllm-serve:0.5,",
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 2, 3, 7]), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=25
    ),
    st.sampled_from(CACHES), st.integers(20, 200), st.integers(1, 30), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_looking_ahead_no_one_is_ever_stalled(
    requests: list[tuple[int, int, int]], cache: str, budget: int, max_batch: int, steps: int
) -> None:
    gaps, prompts, outputs = zip(*requests, strict=True)
    arrival = np.cumsum(gaps) - gaps[0]
    base, _, fields = cache.partition(",")
    policy = parse(
        f"dllm-serve,max_batched_tokens={budget},max_batch={max_batch},block_length=4,page_size=4,look_ahead=true"
    )
    policy = replace(
        policy,
        cache=parse(f"{base},{fields}".rstrip(",")).cache,
        unmasking=replace(policy.unmasking, denoising_steps=steps),
    )
    loop = Loop(policy, toy_trace(arrival, prompts, outputs), Limits(10**6, 4096, max_batch)).run()
    assert all(plan.running == len(plan.requests) for plan in loop.plans)
    assert len(loop.ended) == len(requests)


def test_refreshes_at_other_periods_than_the_block_s_collide_beyond_what_is_looked_at() -> None:
    # dLLM-Cache's prompt of 100 every 7 steps, its response of 80 every 5, and blocks of 4 steps: room in the next 4
    # is not room in all.
    serve = parse("dllm-serve,max_batched_tokens=110,look_ahead=true,block_length=4,page_size=4")
    cache = parse("dllm-cache:7,response_refresh=5").cache
    loop = Loop(replace(serve, cache=cache), toy_trace([0, 2], [100, 10], [8, 80]), Limits(200, 4096, 8)).run()
    assert [i for i, plan in enumerate(loop.plans) if plan.running > len(plan.requests)] == [7]
    assert loop.plans[7].phases.tolist() == [Phase.REFRESH_PROMPT]
    assert len(loop.ended) == 2


def test_who_was_stalled_waits_for_a_place_in_the_batch_when_there_are_tokens_again() -> None:
    # Request 2 is stalled at step 9, and 3 comes in before it. At steps 11 and 12 all three have the tokens, 48, and
    # the batch two places.
    policy = parse("dllm-serve,max_batched_tokens=48,block_length=4,page_size=4")
    trace = toy_trace([0, 1, 3, 5], [4, 10, 36, 5], [6, 10, 4, 9])
    loop = Loop(policy, trace, Limits(10**6, 4096, 2)).run()
    steps = [(plan.requests.tolist(), plan.running, plan.features.tokens) for plan in loop.plans]
    assert steps[8:14] == [
        ([1, 2], 2, 44), ([1, 3], 3, 39), ([1, 3], 3, 39), ([1, 3], 3, 8), ([1, 3], 3, 8), ([3], 2, 17)
    ]  # fmt: skip
    assert len(loop.ended) == 4


# ---- the published scheduler under load (4.3, replayed) --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "budget", "num_pages", "mean"),
    [
        # The pages of a small card bound the batch.
        (500, 4000, 27, {"running": (27, 0.1), "stalled": (0, 0), "full": (1.7, 0.05), "tokens": (1653.75, 3.3)}),
        # Without pages 4,000 tokens do: printed as about 3.9k, and 3 to 4 stalled, for all lengths together. No whole
        # number of 700 fills the rest.
        (300, 4000, 10**6, {"batch": (80, 1), "tokens": (3900, 100), "stalled": (3, 3)}),
        (700, 4000, 10**6, {"batch": (50, 1), "tokens": (3700, 100), "stalled": (3, 3)}),
        (500, 16384, 160, {"running": (160, 0.1), "stalled": (0, 0), "full": (10, 0.05)}),
    ],
)
def test_pages_or_tokens_bound_the_batch_of_a_queue_that_never_runs_dry(
    length: int, budget: int, num_pages: int, mean: dict[str, tuple[float, float]]
) -> None:
    """Means over steps 512 to 768, of requests of one length and an answer of 256 tokens."""
    policy = parse(f"dllm-serve,max_batched_tokens={budget}")
    engine = Engine(policy, Limits(num_pages, 4096, 512), RequestTable(2500))
    for i in range(2500):
        engine.submit(Request(i, 0.0, length - 256, 256))
    draws, seen = ScheduledCommits(32, None), []
    for now in range(768):
        plan = engine.schedule(float(now))
        assert plan is not None
        engine.commit(StepOutcome(1.0, draws.draw(plan)), now + 1.0)
        full = int(np.isin(plan.phases, (Phase.FULL, Phase.PACK)).sum())
        batch = len(plan.requests)
        seen.append((batch, plan.running, plan.running - batch, full, plan.features.tokens))
    assert engine.num_waiting > 0
    found = np.mean(seen[512:], axis=0).tolist()
    for name, value in zip(("batch", "running", "stalled", "full", "tokens"), found, strict=True):
        expected, off = mean.get(name, (value, 0))
        assert value == pytest.approx(expected, abs=off), name


# ---- a static batch (5) ----------------------------------------------------------------------------------------


def test_a_static_batch_is_padded_to_its_longest_prompt_and_output_and_ends_as_one() -> None:
    w = asked(Served("sparse-dllm,max_batch=2"), (10, 40), (50, 96))
    full, reuse = (292, 2 * 146**2, 292, 292, 292, 2, 0, 1), (64, 64 * 89, 178, 64, 64, 2, 0, 1)
    for block in range(3):
        a = "0-" if block == 2 else "0F"  # carried along: its canvas has two blocks
        assert w.step() == f"{a} 1F"
        assert w.features() == full
        assert w.step() == ("0- 1K" if block == 2 else "0K 1K")
        assert w.features() == full
        for _ in range(30):
            assert w["num_tokens"][:2] == [0, 0]
            assert w.step() == ("0- 1r" if block == 2 else "0r 1r")
            assert w.features() == reuse  # floor(0.5 * (146 - 32)) + 32 keys
    assert w.step() == "nothing"
    assert w["finish"][:2] == w["first_emission"][:2] == w["last_emission"][:2] == [96.0, 96.0]
    assert (w["num_tokens"][:2], w["num_committed"][:2], w["num_emissions"][:2]) == ([40, 96], [64, 96], [1, 1])
    assert (w["first_commit"][:2], w["num_forwards"][:2]) == ([1.0, 1.0], [96, 96])
    assert (w.engine.pages_held, w.engine.outstanding_tokens, w.engine.idle) == (0, 0, True)


def test_who_is_carried_along_computes_what_the_others_do() -> None:
    w = asked(Served("fast-dllm:prefix,max_batch=2"), (10, 5), (50, 128))
    tokens = []
    for _ in range(128):
        w.step()
        tokens.append(w.features()[0])
    assert tokens == [n for left in (128, 96, 64, 32) for n in (2 * 178, *[2 * left] * 31)]
    for spec, total in (("vanilla", 128 * 356), ("fast-dllm", 4 * 356 + 124 * 64), ("sparse-dllm", 8 * 356 + 120 * 64)):
        w = asked(Served(spec + ",max_batch=2"), (50, 0), (10, 128))
        w.steps(128)
        assert w.engine.totals.tokens == total
        assert w.step() == "nothing"


def test_a_static_batch_goes_on_when_its_slowest_block_is_complete() -> None:
    # Who has decoded its block waits for the others: a tensor's rows are at the same block.
    table = RequestTable(2)
    e = Engine(parse("fast-dllm,max_batch=2,block_length=4,page_size=4"), Limits(99, 4096, 2), table)
    for i in range(2):
        e.submit(Request(i, 0.0, 4, 8))

    def step(*columns: list[int]) -> tuple[list[int], list[int]]:
        plan = e.schedule(0.0)
        assert plan is not None
        committed = np.zeros((2, 4), np.bool_)
        for row, which in enumerate(columns):
            committed[row, which] = True
        e.commit(StepOutcome(1.0, committed), 1.0)
        return plan.phases.tolist(), plan.block_start.tolist()

    assert step([0, 1, 2, 3], [1]) == ([Phase.FULL] * 2, [4, 4])
    assert step([], [0]) == ([Phase.REUSE] * 2, [4, 4])
    assert step([], [2, 3]) == ([Phase.REUSE] * 2, [4, 4])
    assert step([0], [0, 1, 2, 3]) == ([Phase.FULL] * 2, [8, 8])
    assert step([1, 2, 3], []) == ([Phase.REUSE] * 2, [8, 8])
    assert table["num_tokens"].tolist() == [8, 8]
    assert e.idle


def test_a_batch_begins_with_whoever_waits_and_lets_no_one_in() -> None:
    w = asked(Served("vanilla,max_batch=2,block_length=4,page_size=4"), (5, 4))
    assert w.step() == "0F"
    for i in (1, 2, 3):
        w.submit(i, 5, 4)
    assert w.steps(3) == ["0F"] * 3
    assert w.steps(4) == ["1F 2F"] * 4
    assert w.steps(5) == [*["3F"] * 4, "nothing"]
    assert w["scheduled"][:4] == [0.0, 4.0, 4.0, 8.0]


def test_a_static_batch_takes_those_that_pages_have_room_for() -> None:
    w = Served("fast-dllm,max_batch=8,block_length=4,page_size=4", num_pages=5)
    for i, prompt in enumerate((4, 4, 8)):
        w.submit(i, prompt, 4)  # 2, 2 and 3 pages
    assert w.steps(5) == ["0F 1F", *["0r 1r"] * 3, "2F"]


def test_a_request_for_no_tokens_is_over_with_its_first_step_or_its_batch() -> None:
    w = asked(Served("vanilla,max_batch=2,block_length=4,page_size=4"), (5, 0), (6, 0), (7, 0), (7, 4))
    assert w.step() == "0F 1F"
    assert w.features()[:2] == (12, 72)
    assert w["finish"][:2] == [1.0, 1.0]
    assert w.steps(5) == ["2F 3F", *["2- 3F"] * 3, "nothing"]
    assert (w["finish"][:4], w["num_emissions"][:4]) == ([1.0, 1.0, 5.0, 5.0], [0, 0, 0, 1])
    m = asked(Served("dllm-serve,block_length=4,page_size=4"), (5, 0), (5, 4))
    assert m.steps(5) == ["0F 1F", "1K", "1r", "1r", "nothing"]
    assert (m["finish"][:2], m["num_tokens"][:2], m["status"][:2]) == ([1.0, 4.0], [0, 4], [COMPLETED] * 2)


def test_a_request_for_no_tokens_that_is_shorter_than_a_block_is_let_in_with_look_ahead() -> None:
    w = Served("dllm-serve,max_batched_tokens=10,look_ahead=true")
    assert w.submit(0, 5, 0)
    assert w.steps(2) == ["0F", "nothing"]


@pytest.mark.parametrize("spec", ["vanilla", "dllm-serve"])
def test_steps_commit_their_quota_the_first_what_is_left_over(spec: str) -> None:
    w = asked(Served(f"{spec},denoising_steps=5", emit="step"), (7, 40))
    gained, before = [], 0
    for _ in range(10):
        w.step()
        gained.append(w["num_committed"][0] - before)
        before = w["num_committed"][0]
    assert gained == [7, 7, 6, 6, 6] * 2
    assert w["num_tokens"][0] == 40
    assert w["num_emissions"][0] == (1 if spec == "vanilla" else 5 + 2)  # the rest is trimmed
    assert w.step() == "nothing"


@pytest.mark.parametrize(("emit", "first", "emissions"), [("block", 4.0, 3), ("step", 1.0, 10), ("end", 12.0, 1)])
def test_tokens_come_by_block_by_step_or_at_the_end(emit: str, first: float, emissions: int) -> None:
    w = asked(Served("dllm-serve,block_length=4,page_size=4", emit=emit), (3, 10))
    w.steps(13)
    assert (w["first_emission"][0], w["num_emissions"][0], w["num_tokens"][0]) == (first, emissions, 10)
    static = asked(Served("vanilla,block_length=4,page_size=4", emit=emit), (3, 10))
    static.steps(13)
    assert (static["first_emission"][0], static["num_emissions"][0]) == (12.0, 1)
