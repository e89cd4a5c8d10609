"""An EOS in a prompt's partial block (block-diffusion.md 1.6), and a prefill that is cut to its memory."""

from dataclasses import replace

import numpy as np

from dsim.engine.policy import parse
from dsim.profiler.profile import load
from dsim.sim.twin import limits_of, simulate
from dsim.traces import Trace

PROFILE = load("a100-sdar-8b")


def tokens(input_length: int, output_length: int, eos: bool) -> int:
    trace = Trace("one", np.zeros(1), np.array([input_length]), np.array([output_length]))
    return int(simulate(trace, PROFILE, parse("lmdeploy-bd32"), eos=eos).table["num_tokens"][0])


def test_an_eos_in_the_prompts_own_block_is_missed_and_the_next_block_begins() -> None:
    # A prompt of 33 leaves 31 positions of its block: the request goes on to the first of the next block.
    assert tokens(33, 5, eos=True) == 32
    assert tokens(33, 31, eos=True) == 32


def test_any_other_eos_ends_a_request_where_it_stands() -> None:
    assert tokens(33, 32, eos=True) == 32
    assert tokens(32, 5, eos=True) == 5
    assert tokens(33, 5, eos=False) == 5


def test_the_block_after_a_missed_eos_is_padding_and_commits_at_once() -> None:
    trace = Trace("one", np.zeros(1), np.array([33]), np.array([5]))
    policy = parse("lmdeploy-bd32,num_loops=1,decide_ahead=false")
    table = simulate(trace, PROFILE, policy, eos=True).table
    assert table["num_committed"][0] == 31 + 32
    bare = simulate(trace, PROFILE, policy).table
    # The KV pass of the first block, and one step for all 32 positions of the second.
    assert table["num_forwards"][0] - bare["num_forwards"][0] == 2


def test_a_prefill_that_leaves_no_room_for_pages_is_made_smaller() -> None:
    asked = 1_000_000_000
    limits = limits_of(parse(f"lmdeploy-bd32,max_batch=128,max_prefill_tokens={asked}"), PROFILE)
    assert limits.max_prefill_tokens is not None
    assert limits.max_prefill_tokens < asked
    assert limits.num_pages == PROFILE.memory.num_pages(64, 128, limits.max_prefill_tokens)
    # A prompt beyond it is split into forwards of that size.
    small = replace(PROFILE, memory=replace(PROFILE.memory, fixed_num_pages=5000))
    assert limits_of(parse("lmdeploy-bd32"), small).max_prefill_tokens == 4096
