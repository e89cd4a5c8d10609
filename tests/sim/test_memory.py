"""A step's memory: what is counted, that no step is larger than the largest, and which tensor is the one too many."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.spec import parse
from dsim.profiler.footprint import of_forward
from dsim.profiler.models import MODELS
from dsim.profiler.profile import load
from dsim.sim.memory import Forward, StepMemory
from dsim.sim.setting import Setting
from dsim.traces import synth

from ..checks import cases
from ..cli.command import dsim
from ..engine import golden

SDAR = MODELS["SDAR-8B"]
GIB = 2**30


def memory_of(spec: str, profile: str = "a100-sdar-8b") -> StepMemory:
    return StepMemory(Setting(parse(spec), load(profile)))


def test_logits_are_those_that_exist_at_once() -> None:
    whole, capped = (of_forward(SDAR, 8192, 8192, max_num_logits=cap) for cap in (None, 256))
    assert whole["logits"] == 8192 * 151936 * 10  # bf16, and fp32 twice
    assert sum(capped.values()) < sum(whole.values())
    # 256 rows of logits are less than what a layer keeps of 8,192 tokens.
    assert max(capped, key=lambda name: capped[name]) == "activations of the feed-forward"
    assert of_forward(SDAR, 0, 0) == {}


@pytest.mark.usefixtures("uncompiled")
@cases(
    "spec",
        "lmdeploy-bd32,num_pages=11", "optimus,num_blocks=2,num_pages=11", "focus,num_pages=11", "ar", "dllm-serve",
        "maskkv,max_batch=2",
)  # fmt: skip
def test_no_step_is_larger_than_the_largest(spec: str) -> None:
    policy = parse(spec)
    memory = memory_of(spec, golden.profile_name(policy))
    largest = sum(memory.sizes(memory.largest(golden.trace_of(policy.family == "full-sequence"))).values())
    batches = golden.run(spec, {"replicas": 2})[1]
    tokens, num, rows = (
        np.concatenate([columns[name] for columns, _ in batches]) for name in ("tokens", "num_forwards", "head_rows")
    )
    forwards = -(-tokens // np.maximum(1, num)), rows
    sizes = [sum(memory.sizes(Forward(*size)).values()) for size in zip(*map(np.ndarray.tolist, forwards), strict=True)]
    assert 0 < min(sizes) <= max(sizes) <= largest


def test_a_forward_takes_whole_prompts_of_canvases_and_a_block_of_each_other_row() -> None:
    one = synth("constant", 1.0, lengths="fixed:8000,256", num_requests=1)
    assert memory_of("sglang-gemma", "h200x2-diffusiongemma/sglang").largest(one).tokens == 16384  # the prefill budget
    assert memory_of("sglang-fdfo").largest(one) == Forward(32, 32)


def test_engines_whose_pages_leave_room_fit_and_pages_that_take_all_do_not() -> None:
    requests = synth("poisson", 4.0, num_requests=300)
    assert memory_of("lmdeploy-bd32").shortage(memory_of("lmdeploy-bd32").largest(requests)) is None
    # 256 rows of 32 positions, in the pages that the default batch of 128 left.
    tight = memory_of("lmdeploy-bd32,max_batch=256,max_prefill_tokens=8192,num_pages=6600")
    said = tight.shortage(tight.largest(requests))
    assert said is not None
    assert said.startswith("out of memory by ")
    assert "logits of a forward of 8192 tokens and 8192 rows of logits take 12.4 GB in addition to weights" in said


def test_a_full_sequence_of_long_prompts_runs_out_of_memory_on_all_rows_of_logits_and_not_on_the_blocks() -> None:
    requests = synth("constant", 1.0, lengths="fixed:8000,256", num_requests=1)
    profile = load("rtx4090-llada-8b")
    held = replace(profile, memory=replace(profile.memory, fixed_num_pages=20))
    sizes = {}
    for logits in ("all", "block"):
        policy = parse(f"vanilla,logits={logits},max_num_logits=100000")
        memory = StepMemory(Setting(policy, held))
        forward = memory.largest(requests)
        sizes[logits] = memory.sizes(forward).get("logits", 0), memory.shortage(forward)
    rows = 8000 + 256
    assert sizes["all"][0] == rows * profile.memory.vocab * 10
    assert sizes["all"][1] is not None
    assert "logits of a forward" in sizes["all"][1]
    assert sizes["block"][1] is None


@pytest.mark.parametrize("command", ["capacity", "tune", "plan"])
def test_no_search_has_a_setting_that_does_not_fit_and_says_by_how_much(command: str) -> None:
    spec = "lmdeploy-bd32,max_batch=256,max_prefill_tokens=8192,num_pages=6600"
    asked = ("azure-conv", "--policy", spec, "--slo", "ttft=2s", "--num-requests", 200)
    assert ": out of memory by 5.36 GB of 85.9 GB: logits of" in dsim(command, *asked).refusal
