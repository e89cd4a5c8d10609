"""The search over an engine's settings: what it may try, and that halving keeps the best."""

from collections.abc import Sequence

from dsim.engine.spec import PRESETS, parse
from dsim.planner.candidate import beyond_tested
from dsim.planner.candidates import candidates_of
from dsim.planner.settings import GAIN, halve, settings_to_try
from dsim.planner.space import searchable
from dsim.profiler.profile import load
from dsim.results.world import World

from ..checks import cases, refused

VLLM, FP8 = load("h200x2-diffusiongemma/vllm"), load("h100-diffusiongemma-fp8")


def tried(spec: str, profile: str = "h200x2-diffusiongemma/vllm") -> list[str]:
    loaded = load(profile)
    return settings_to_try(spec, loaded, searchable(loaded, None))


def test_what_is_tried_has_a_flag_is_no_matter_of_answers_and_leaves_what_was_given() -> None:
    found = tried("vllm-diffusion,max_num_batched_tokens=4096")
    assert found[0] == "vllm-diffusion,max_num_batched_tokens=4096"
    assert len(found) == len(set(found)) == 8  # the rows alone
    assert all(parse(one).batching.max_num_batched_tokens == 4096 for one in found)  # type: ignore[attr-defined]
    assert tried("vllm-diffusion:8")[0] == "vllm-diffusion"
    assert {parse(one).batching.max_num_seqs for one in tried("vllm-diffusion:8")} == {8}  # type: ignore[attr-defined]


def test_prefix_caching_is_tried_where_the_trace_names_prefixes_and_the_engine_has_the_flag() -> None:
    assert not any("prefix_caching" in one for one in tried("vllm-diffusion"))
    with_prefixes = settings_to_try("vllm-diffusion", VLLM, searchable(VLLM, None), shared_prefixes=True)
    assert "vllm-diffusion,prefix_caching=true" in with_prefixes
    fixed = settings_to_try("vllm-ar,prefix_caching=false", VLLM, lambda policy: None, shared_prefixes=True)
    assert not any("prefix_caching=true" in one for one in fixed)
    gemma = settings_to_try("sglang-gemma", VLLM, searchable(VLLM, None), shared_prefixes=True)
    assert not any("prefix_caching" in one for one in gemma)  # SGLang serves it without its radix cache


def test_a_setting_that_the_memory_cannot_hold_is_not_tried() -> None:
    rows = [parse(one).batching.max_num_seqs for one in tried("vllm-diffusion", FP8.name)]  # type: ignore[attr-defined]
    assert max(rows) == 32  # of 48 and 64 rows an H100 has no room for the logits
    check = searchable(FP8, None)
    with refused("at most 37 rows"):
        check(parse("vllm-diffusion,max_num_seqs=64"))
    sglang = load("h200x2-diffusiongemma/sglang")
    [one], _ = candidates_of(World("azure-conv", slos=("ttft=4s",)), ["sglang-gemma"], [sglang], lambda p: None)
    assert (one.original, one.policy) == ("sglang-gemma", "sglang-gemma,max_running_requests=2")
    assert one.refused.startswith("out of memory by 2.78 GB")
    assert "sglang-gemma,max_running_requests=8" in one.settings
    assert "max_running_requests=64" not in " ".join(one.settings)


def test_hidden_host_time_is_not_chosen_where_the_steps_hold_it_already() -> None:
    assert VLLM.latency.host_step == 0
    assert not any("async_scheduling" in one for one in tried("vllm-diffusion"))
    told = load("h100-qwen3-8b-ar")
    changes = any("async_scheduling" in one for one in settings_to_try("vllm-ar", told, searchable(told, None)))
    assert changes == (told.latency.host_step > 0)


def test_a_policy_of_no_engine_is_tried_as_it_is() -> None:
    assert tried("optimus", "a100-sdar-8b") == ["optimus"]
    assert not PRESETS["optimus"].engine


@cases(
    "scores untested best",
    ([1.0, 0.5, 1.2, 1.1, 1.3, 0.0, 1.25, 0.9, 1.0], (), 4),
    ([0.0, 0.0, 0.1], (), 2),  # the policy as given serves nothing
    # A gain within the noise changes nothing, and of equals the first is preferred.
    ([1.0, 0.99 * GAIN], (), 0), ([0.0, 0.0], (), 0), ([1.0, 0.5, 1.2, 1.205, 1.19, *[0.1] * 8], (), 2),
    # Beyond the tested range a setting must gain a tenth.
    ([1.0, 1.05, 1.09], [2], 1), ([1.0, 1.05, 1.17], [2], 2),
    ([1.0, *[1.03] * 4, *[1.2] * 12], range(1, 17), 5),  # none within the range is as good
)  # fmt: skip
def test_halving_ends_in_the_best_and_tries_few_of_them_for_long(
    scores: Sequence[float], untested: Sequence[int], best: int
) -> None:
    asked: list[tuple[int, int]] = []

    def rates_of(settings: Sequence[int], rung: int, start: float | None) -> list[float]:
        asked.append((rung, len(settings)))
        return [scores[i] for i in settings]

    assert halve(range(len(scores)), rates_of, untested)[0] == best
    assert sum(n for rung, n in asked if rung == 0) == len(scores)
    assert sum(n for rung, n in asked if rung == 1) <= 1 + max(1, round(0.25 * (len(scores) - 1)))


def test_a_setting_beyond_the_tested_range_is_named() -> None:
    assert beyond_tested("vllm-diffusion:8") == beyond_tested("optimus") == ()
    assert beyond_tested("vllm-diffusion:12")[0].startswith("max_num_seqs=12 is beyond 8")
    assert beyond_tested("vllm-diffusion,max_num_seqs=none")[0].startswith("max_num_seqs=None is beyond 8")
