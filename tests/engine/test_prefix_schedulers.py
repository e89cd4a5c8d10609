"""Prefix caching under the other schedulers, which reuse prefixes as their engines do."""

import numpy as np
import pytest

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.policy import parse
from dsim.engine.replay import replay
from dsim.sim.step_model import StepModel
from dsim.traces.prefixes import prefixes_of

from ..worlds import SECOND, Collector, World, draws_of, table_bytes
from .hand import asked
from .singly import run_singly
from .test_prefix import check_account, conversations, prefixes

FDFO = "sglang-fdfo,block_length=4,page_size=4,prefix_caching=true"
AHEAD = "lmdeploy-0.18:4,page_size=8,prefix_caching=true"
DIFFUSION = "vllm-diffusion,canvas_length=4,page_size=4,prefix_caching=true,async_scheduling=false"


def step(w: World) -> str:
    """A step, which commits every mask that it computes, in words."""
    text = w.plan_tokens()
    if w.plan is not None:
        w.commit_masks()
    return text


def steps_of(w: World, request: int) -> list[str]:
    """Such steps to the end of a request."""
    found = []
    while np.isnan(w["finish"][request]):
        found.append(step(w))
    return found


# ---- SGLang's rounds ---------------------------------------------------------------------------------------------


def test_rounds_prefill_only_the_blocks_that_are_not_there() -> None:
    w = asked(World(FDFO, prefixes=prefixes(4, [0, 1, 2], [0, 1, 3], [0, 1, 2], named=[10, 11, 8])), (10, 2))
    assert steps_of(w, 0) == ["prefill 0P4/4", "prefill 0P4/8", "decode 0D4/12", "decode 0F4/12"]
    w.submit(1, 11, 1)  # its two whole blocks are there: it decodes at once
    assert steps_of(w, 1) == ["decode 1D4/12", "decode 1F4/12"]
    w.submit(2, 8, 1)  # so they are where the prompt ends with them: its own masks are computed, no token of the prompt
    assert steps_of(w, 2) == ["decode 2D4/12", "decode 2F4/12"]
    assert w.engine._own.cache.cached.tolist() == [0, 8, 8]
    assert (w.engine.totals.prefix_queries, w.engine.totals.prefix_hits) == (29, 16)
    assert (w.engine.pages_held, w.engine.expected_tokens) == (0, 0)


def test_a_round_s_newcomers_do_not_find_what_it_has_yet_to_compute() -> None:
    w = asked(World(FDFO, prefixes=prefixes(4, [0, 1], [0, 1], named=[8, 8])), (8, 1), (8, 1))
    assert w.step_tokens({}) == "prefill 0P4/4 1P4/4"
    assert w.engine.pages_held == 2  # computed twice ...
    assert w.step_tokens({}) == "prefill 0P4/8 1P4/8"
    assert w.engine.pages_held == 3  # ... and kept once from the next round on
    assert w.engine._own.cache.cached.tolist() == [0, 0]


def test_a_prompt_beside_a_newcomer_that_decodes_in_step_is_computed_again_in_each_of_its_forwards() -> None:
    spec = FDFO.replace("fdfo", "sync")
    w = asked(World(spec, prefixes=prefixes(4, [0, 1], [2, 3], [0, 1], named=[8, 8, 8])), (8, 1))
    steps_of(w, 0)
    w.submit(1, 8, 4)
    w.submit(2, 8, 4)  # its prompt is there
    assert w.step_tokens({}) == "decode 1P4/4 2D4/12"
    assert w.step_tokens({2: range(4)}) == "decode 1I4/4 2D4/12"
    assert w.step_tokens({}) == "decode 1I4/4 2F4/12"
    assert w.step_tokens({}) == "prefill 1P4/8"


# ---- LMDeploy's look-ahead ---------------------------------------------------------------------------------------


def test_a_prefill_leaves_out_the_pages_that_are_there() -> None:
    w = asked(World(AHEAD, prefixes=prefixes(8, [0, 1, 2], [0, 1, 3], [0, 4], named=[20, 21, 9])), (20, 4))
    assert steps_of(w, 0)[0] == "prefill 0P20/20"
    step(w)  # the one decided on ahead
    w.submit(1, 21, 3)
    # Of 24 positions 16 are there; queries see blocks of 4: 24 * 28 / 2 less 16 * 20 / 2 pairs.
    assert w.plan_tokens() == "prefill 1P8/24"
    assert w.features() == (8, 24 * 28 // 2 - 16 * 20 // 2, 24, 4, 4, 1, 8, 1)
    w.commit()
    w.submit(2, 9, 3)
    assert "prefill 2P4/12" in [step(w) for _ in range(4)]
    assert w.engine._own.cache.cached.tolist() == [0, 16, 8]


# ---- vLLM's canvases ---------------------------------------------------------------------------------------------


def test_only_committed_tokens_of_canvases_are_found() -> None:
    w = World(DIFFUSION, prefixes=prefixes(4, [0, 1, 2, 3], [0, 1, 6, 7, 8], [0, 1, 2, 3, 5], named=[16, 20, 20]))
    w.submit(0, 4, 12)
    assert w.step_tokens({}) == "prefill 0P4/4"
    assert w.step_tokens({}) == "decode 0D4/8"
    w.submit(1, 18, 1)
    assert w.step_tokens({}) == "decode 0D4/8 1P14/18"  # the prompt is there, and no canvas that is being denoised
    assert w.engine._own.cache.cached[:2].tolist() == [0, 4]
    assert [step(w).split(" 1")[0] for _ in range(3)] == ["decode 0D4/8", "decode 0F4/8", "decode 0D4/12"]
    w.submit(2, 18, 1)
    assert "2P10/18" in step(w)  # one canvas is committed


# ---- whole runs --------------------------------------------------------------------------------------------------


def test_eagle_shares_a_page_only_if_the_next_token_is_equal_too() -> None:
    names = prefixes(1, [*range(9)], [*range(8), 9], [*range(9)], named=[9, 9, 9])
    for drafter, second in (("eagle", "1P5/9"), ("ngram", "1P3/11")):
        spec = f"vllm-ar-spec:2,page_size=4,prefix_caching=true,async_scheduling=false,drafter={drafter}"
        w = asked(World(spec, prefixes=names), (9, 1))
        assert step(w) == "prefill 0P9/9"
        w.submit(1, 9, 1)
        assert step(w) == f"prefill {second}"
        w.submit(2, 9, 1)
        assert step(w) == "prefill 2P3/11"


@pytest.mark.parametrize(
    "spec",
    [
        "sglang-fdfo,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
        "sglang-sync,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
        "sglang-joint,block_length=4,page_size=8,max_running_requests=4,num_pages=32",
        "sglang-fdfo,block_length=4,page_size=8,num_pages=40",
        "lmdeploy-0.18:4,page_size=8,max_batch=4,num_pages=30,max_prefill_tokens=64",
        "vllm-diffusion,canvas_length=4,page_size=8,max_num_seqs=4,max_num_batched_tokens=64,num_pages=30",
        "vllm-ar-spec,page_size=8,max_num_seqs=4,max_num_batched_tokens=64,num_pages=26",
    ],
)
def test_every_scheduler_keeps_account_and_serves_all_and_its_journal_replays(spec: str) -> None:
    trace, policy = conversations(30), parse(spec + ",prefix_caching=true")
    num_pages = policy.memory.num_pages or 0
    limits = Limits(num_pages, 4096, policy.batching.max_batch or 4)

    def fresh() -> Engine:
        table = RequestTable(len(trace))
        return Engine(policy, limits, table, latency=SECOND, prefixes=prefixes_of(trace))

    engine, journal = fresh(), Collector()
    model = StepModel(SECOND, draws_of(policy, trace, 3), policy.cache)
    run_singly(engine, model, trace, StepRecorder(journal, policy.width), check_account)
    assert (engine.table["status"] == 0).all()
    assert (engine.table["num_tokens"] == trace.output_length).all()
    assert (engine.pages_held, engine.expected_tokens) == (0, 0)
    assert engine.totals.prefix_hits > 300
    assert engine.totals.prefix_queries == trace.input_length.sum()
    again = fresh()
    assert list(replay(again, 0, engine.table.columns, journal.steps, journal.lists)) == []
    assert table_bytes(again.table) == table_bytes(engine.table)
    assert np.array_equal(again._own.cache.cached, engine._own.cache.cached)
