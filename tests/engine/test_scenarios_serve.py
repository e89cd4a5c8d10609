"""Full-sequence serving step by step: dLLM-Serve's scheduler as published and repaired, and static batches."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import Phase, StepOutcome

from ..serving import Loop, Served
from ..worlds import asked, toy_trace

SERVE = "dllm-serve,max_batched_tokens=1000"
COMPLETED, REJECTED = 0, 1


def test_a_newcomer_takes_what_a_stalled_refresh_leaves_and_stands_before_it() -> None:
    # R0 and R1 of 900 tokens about to refresh in the same step of 1,000, and N of 84 waiting.
    w = asked(Served(SERVE), (900 - 256, 256))
    assert w.steps(31) == ["0F", "0K", *["0r"] * 29]
    w.submit(1, 900 - 256, 256)
    assert w.step() == "0r 1F"  # 32 + 900 tokens
    w.submit(2, 20, 64)
    assert w.step() == "0F 2F"
    assert w.features()[0] == 900 + 84
    assert (w.plan.running, w.plan.waiting) == (3, 0)
    assert w.step() == "0K 2K"
    # In the running order the newcomer stands before the stalled request.
    assert w.step() == "0r 2r 1K"
    assert w.step() == "0r 2r 1r"


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


def test_look_ahead_lets_no_one_in_whose_second_refresh_would_collide() -> None:
    w = asked(Served(SERVE + ",look_ahead=true"), (644, 256))
    w.steps(31)
    w.submit(1, 644, 256)
    # Published: let in now, and stalled in the next two steps.
    assert w.steps(4) == ["0r", "0F", "0K", "0r 1F"]
    assert w.step() == "0r 1K"


CACHES = ("vanilla,", "fast-dllm:dual,", "fast-dllm:prefix,", "sparse-dllm:0.5,", "sparse-dllm:0.1,", "dllm-serve:0.5,")


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
    assert (w.engine.pages_held, w.engine.expected_tokens, w.engine.idle) == (0, 0, True)


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
