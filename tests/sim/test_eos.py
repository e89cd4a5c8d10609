"""An EOS at its own place: where engines stop, what they pay, what is counted; and a prefill cut to its memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.errors import TraceError
from dsim.engine.spec import parse
from dsim.engine.state import COMPLETED
from dsim.profiler.profile import Profile, load
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace

from ..worlds import refusal

PROFILE = load("a100-sdar-8b")


def test_a_prefill_that_leaves_no_room_for_pages_is_made_smaller() -> None:
    asked = 1_000_000_000
    limits = Setting(parse(f"lmdeploy-bd32,max_batch=128,max_prefill_tokens={asked}"), PROFILE).limits
    assert limits.max_prefill_tokens is not None
    assert limits.max_prefill_tokens < asked
    assert limits.num_pages == PROFILE.memory.num_pages(64, 128, limits.max_prefill_tokens)
    # A prompt beyond it is split into forwards of that size.
    small = replace(PROFILE, memory=replace(PROFILE.memory, fixed_num_pages=5000))
    assert Setting(parse("lmdeploy-bd32"), small).limits.max_prefill_tokens == 4096


FULL = load("l40s-llada-8b")
ALONE = "lmdeploy-bd32,num_loops=1,decide_ahead=false"


def one(
    spec: str, input_length: int, answer: int, limit: int | None, profile: Profile = PROFILE, **how: Any
) -> dict[str, Any]:
    """What becomes of a request that is alone; not what it told a scheduler of its wishes and its length."""
    extras = {} if limit is None else {"max_tokens": [limit]}
    trace = Trace("one", np.zeros(1), np.array([input_length]), np.array([answer]), extras)
    table = simulate(trace, Setting(parse(spec), profile), **how).table
    return {name: column[0].item() for name, column in table.columns.items() if name not in ("estimate", "deadline")}


def test_a_canvas_is_denoised_to_its_limit_and_its_tokens_count_up_to_the_eos() -> None:
    whole, cut = one("vanilla", 32, 128, None, FULL), one("vanilla", 32, 40, 128, FULL)
    assert (cut["num_tokens"], cut["status"]) == (40, COMPLETED)
    for name in ("num_forwards", "num_committed", "num_computed", "finish"):
        assert cut[name] == whole[name], name
    # A static batch hands out all answers at its end: how many tokens they have changes nothing of when.
    assert cut["last_emission"] == whole["last_emission"]


def test_a_full_sequence_model_that_stops_at_its_eos_pays_for_the_canvas_of_its_limit() -> None:
    block = parse("dllm-serve").block_length
    short, cut = (one("dllm-serve,eos=block", 64, 2 * block - 3, limit, FULL) for limit in (None, 8 * block))
    ignored = one("dllm-serve", 64, 2 * block - 3, 8 * block, FULL)
    assert cut["num_tokens"] == ignored["num_tokens"] == 2 * block - 3
    assert cut["num_forwards"] == short["num_forwards"] == 2 * block
    assert ignored["num_forwards"] == 8 * block
    assert cut["finish"] > short["finish"]  # of longer sequences, as many passes
    assert cut["finish"] == ignored["last_emission"] < ignored["finish"]


def test_a_block_diffusion_engine_ends_with_the_block_of_the_eos_or_at_the_limit() -> None:
    ends = {eos: one(f"{ALONE},eos={eos}", 64, 40, 160) for eos in ("block", "ignored")}
    assert [ends[eos]["num_tokens"] for eos in ends] == [40, 40]
    assert ends["block"]["num_committed"] == 64
    assert ends["ignored"]["num_committed"] == 160
    assert ends["block"]["finish"] < ends["ignored"]["finish"]
    # Behind the EOS's block come the KV pass of each block, and one step for all 32 positions of the next.
    assert ends["ignored"]["num_forwards"] - ends["block"]["num_forwards"] == 3 * 2
    assert ends["ignored"]["last_emission"] == ends["block"]["finish"]


def test_a_scheduler_knows_the_limit_and_not_the_answer() -> None:
    context = PROFILE.model.context_limit
    with pytest.raises(TraceError, match=f"the context of {context} tokens"):
        one(ALONE, 64, 40, context)
    # Pages of a canvas of 160 behind 64 tokens, though the answer takes half of them.
    assert "4 pages" in refusal(TraceError, one, f"{ALONE},num_pages=3", 64, 40, 160)
    assert one(f"{ALONE},num_pages=4", 64, 40, 160)["num_tokens"] == 40


def test_a_trace_of_which_no_request_fits_so_is_refused() -> None:
    spec = "lmdeploy-bd32,block_length=4,page_size=4,num_pages=3"  # of both its blocks, and one ahead
    assert one(spec, 5, 1, None)["num_tokens"] == 1
    assert "the shortest has 9 tokens" in refusal(TraceError, lambda: one(spec, 5, 1, None, eos=True))


def test_an_eos_in_the_prompts_block_is_missed_up_to_the_limit() -> None:
    missed, asked = one(ALONE, 33, 5, 100), one(ALONE, 33, 5, None, eos=True)
    assert missed | {"max_tokens": 32, "limited": False} == asked  # the next block is padding here, too
    assert one(ALONE, 33, 5, 31)["num_tokens"] == 5  # the limit ends the block
    assert one(ALONE, 33, 5, 5, eos=True)["num_tokens"] == 5  # which no EOS did


def test_an_autoregressive_engine_that_ignores_an_eos_goes_on_to_the_limit() -> None:
    whole, cut = one("ar,eos=ignored", 10, 30, None), one("ar,eos=ignored", 10, 12, 30)
    assert (cut["num_tokens"], cut["num_emissions"]) == (12, 12)
    assert cut["finish"] == whole["finish"]
    assert one("ar", 10, 12, 30)["finish"] == one("ar", 10, 12, None)["finish"]
