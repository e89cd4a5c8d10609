"""Policies by name: presets, fields, files, and what is refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from dsim.engine.engine import record_of
from dsim.engine.errors import PolicyError
from dsim.engine.part import Choice, Part, Range, numbers_of
from dsim.engine.policies.ar import Autoregressive
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.spec import PRESETS, Policy, describe, parse, settings_of, to_toml

from ..checks import cases
from ..worlds import refusal


@cases(
    "spec changed",
    ("ar:7", {"max_batch": 7}),
    ("lmdeploy-bd32:16", {"block_length": 16}),
    ("chunk:4", {"chunk": 4}),
    ("optimus:16", {"max_chunk": 16}),
    ("delayed-cache:8", {"block_length": 8}),
    ("delayed-cache-plus:64", {"block_length": 64}),
    ("chunk,num_blocks=2,chunk=4", {"num_blocks": 2, "chunk": 4}),
    ("optimus:16,num_blocks=2", {"max_chunk": 16, "num_blocks": 2}),
    ("ar,num_pages=12,page_size=16", {"num_pages": 12, "page_size": 16}),
    ("lmdeploy-bd32,decide_ahead=false,num_loops=3", {"decide_ahead": False, "num_loops": 3}),
    ("chunk,num_loops=none", {"num_loops": None}),
    ("delayed-cache,temperature=1,threshold=0.8", {"temperature": 1.0, "threshold": 0.8}),
    ("chunk,block_length=4", {"block_length": 4, "chunk": 4}),  # the chunk shrinks with its block
    ("optimus,block_length=16", {"block_length": 16, "max_chunk": 16}),
    ("optimus:8,block_length=16", {"block_length": 16, "max_chunk": 8}),
)
def test_a_value_after_the_name_sets_the_main_field_and_others_follow(spec: str, changed: dict[str, object]) -> None:
    base = settings_of(parse(spec.partition(",")[0].partition(":")[0]))
    assert settings_of(parse(spec)) == base | changed
    assert parse(spec).name == spec


ROUND_TRIPS = [
    *PRESETS, "ar:4", "chunk,num_loops=none", "chunk:4,num_blocks=2", "sglang-sync,max_running_requests=3",
    "optimus:8,num_blocks=2", "chunk,block_length=4", "optimus,block_length=16",
    "lmdeploy-bd32:4,page_size=8,num_pages=7,decide_ahead=false",
    "delayed-cache-plus:16,threshold=0.8,temperature=0.5",
]  # fmt: skip


@pytest.mark.parametrize("spec", ROUND_TRIPS)
def test_a_policy_survives_its_file(spec: str, tmp_path: Path) -> None:
    policy = parse(spec)
    path = tmp_path / "policy.toml"
    path.write_text(to_toml(policy, spec.partition(",")[0].partition(":")[0]))
    again = parse(str(path))
    assert dataclasses.replace(again, name=spec) == policy
    assert again.name == str(path)


def test_a_file_holds_only_what_differs_from_its_preset() -> None:
    assert to_toml(parse("optimus"), "optimus") == 'policy = "optimus"\n'
    text = to_toml(parse("chunk:4,num_blocks=2"), "chunk")
    assert text == 'policy = "chunk"\nchunk = 4\nnum_blocks = 2\n'


def test_a_policy_describes_itself_in_plain_values() -> None:
    d = describe(parse("optimus:4"))
    assert d["name"] == "optimus:4"
    assert (d["granularity"]["kind"], d["granularity"]["max_chunk"]) == ("ElasticChunk", 4)
    assert d["eviction"] == {"kind": "DelayedCache"}


@cases(
    "spec says",
    ("optimu", "no preset is named 'optimu' (did you mean optimus?); there are " + ", ".join(PRESETS)),
    ("./b.py", "'./b.py' names no policy in the file, expected one: ./b.py:POLICY"),
    ("ar,discipline=./b.py:P:5", "'./b.py:P:5' has a value behind the discipline's name"),
    ("none.toml", "no such policy file"),
    ("ar,max_bath=4", "there is no field 'max_bath' (did you mean max_batch?); its fields are max_batch, "),
    ("ar,chunk=4", "there is no field 'chunk'; its fields are max_batch, "),
    ("ar,max_batch", "'max_batch' is not a field=value"),
    ("ar:4,max_batch=8", "max_batch is given twice, as 4 and 8"),
    ("chunk:", "chunk is '', expected a whole number"),
    ("ar,page_size=1.5", "page_size is '1.5', expected a whole number"),
    ("focus:much", "alpha is 'much', expected a number"),
    ("multi-block,strategy=law", "strategy is law, expected low_confidence_dynamic for several blocks in flight"),
    ("chunk,num_blocks=3", "num_blocks is 3, expected 1 to 2"),
    ("optimus,max_chunk=64", "max_chunk is 64, expected at most the block length 32"),
    ("lmdeploy-bd32:48", "page_size is 64, expected a multiple of the block length 48"),
    ("ar,threshold=0", "threshold is 0.0, expected more than 0 and at most 1"),
    ("focus,num_loops=2", "FOCUS decides every step anew: expected continuous batching with num_loops=1"),
    ("sparse-dllm,denoising_steps=33", "denoising_steps is 33, expected at most the block length 32"),
    ("sparse-dllm,pool_width=2", "pool_width is 2, expected an odd number"),
    ("sglang-fdfo,ignore_eos=true", "ignore_eos is true, expected false but for canvas models"),
    ("sglang-gemma,max_prefill_tokens=255", "max_prefill_tokens is 255 and canvas_length 256: expected at least a"),
    ("sglang-gemma,swa_full_tokens_ratio=0", "swa_full_tokens_ratio is 0.0, expected more than 0 and at most 1"),
    ("vllm-diffusion,max_num_batched_tokens=255", "is 255, expected at least the canvas length 256"),
    ("vllm-diffusion,long_prefill_token_threshold=100", "is 100, expected 0 or at least the canvas length 256"),
    ("vllm-ar,enable_chunked_prefill=false,long_prefill_token_threshold=5", "enable_chunked_prefill is false: exp"),
    ("vllm-ar,acceptance=0.5/0.6", "acceptance is 0.5/0.6, expected shares of 0 to 1 that never rise"),
    ("vllm-ar,acceptance=high", "acceptance is 'high', expected numbers such as 0.6/0.4"),
    ("vllm-ar,drafter=dflash,num_speculative_tokens=3,acceptance=0.5/0.4", "acceptance has 2 values, expected one"),
    ("vllm-ar,drafter=dflash,max_num_batched_tokens=16", "is 16, expected more than a row's 16 positions"),
    ("vllm-ar,max_num_seqs=9000", "max_num_seqs is 9000, expected at most max_num_batched_tokens, 8192"),
    ("vllm-diffusion,strategy=low_confidence_dynamic", "expected law for a canvas"),
)
def test_a_mistake_is_one_line_with_what_was_found_and_what_is_expected(spec: str, says: str) -> None:
    said = refusal(PolicyError, parse, spec)
    assert (spec in said, says in said) == (True, True), said


PARTS = {type(part): part for preset in PRESETS.values() for part in preset.policy.parts()}


@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: type(part).__name__)
def test_a_field_outside_its_declared_bounds_is_refused(part: Part) -> None:
    for name, hint in get_type_hints(type(part), include_extras=True).items():
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Choice):
                outside: list[Any] = ["no such word"]
            elif isinstance(bounds, Range):
                beyond = (bounds.low, -1), (bounds.high, 1)
                outside = [math.nan, *(limit + step for limit, step in beyond if limit is not None)]
            else:
                continue
            for value in outside:
                with pytest.raises(PolicyError, match=f"{name} is .*, expected "):
                    dataclasses.replace(part, **{name: value})  # type: ignore[type-var]


@cases(
    "text says",
    ("max_batch = 4", '`policy` is None, expected a preset\'s name such as "optimus"'),
    ("policy = ", "cannot be read as TOML: "),
    ('policy = "chunk"\nchunk = true', "chunk is True, expected a whole number"),
    ('policy = "chunk"\nstrategy = 4', "strategy is 4, expected a word"),
    ('policy = "ar"\n[nested]\nmax_batch = 4', "there is no field 'nested'"),
)
def test_a_mistake_in_a_file_names_the_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    said = refusal(PolicyError, parse, str(path))
    assert (str(path) in said, says in said) == (True, True), said


@cases(
    "axes says",
    ({"granularity": FixedChunk()}, "eviction is none, expected a delayed cache, over which a chunk streams"),
    ({"granularity": Autoregressive(), "eviction": DelayedCache()}, "has no block to evict from"),
)
def test_axes_that_do_not_go_together_are_refused(axes: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=f"^mine: .*{says}"):
        Policy("mine", **axes)  # type: ignore[arg-type]


@cases(
    "spec other",
        ("optimus", "optimus:8,num_blocks=2,block_length=16"), ("focus", "focus,block_length=8"),
        ("dllm-serve", "dllm-serve,denoising_steps=8"),
)  # fmt: skip
def test_one_compilation_serves_a_policy_of_any_fields(spec: str, other: str) -> None:
    assert record_of(parse(spec)).dtype == record_of(parse(other)).dtype
    assert numbers_of(parse(spec)).dtype == numbers_of(parse(other)).dtype
