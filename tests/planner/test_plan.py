"""A plan against a queue whose answer is known: the ranking, the price, the risks, and what a store spares."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dsim
from dsim.engine.latency import CacheOverhead
from dsim.engine.spec import PRESETS, name_of, parse
from dsim.planner.candidates import candidates_of
from dsim.planner.capacity import search_of
from dsim.planner.memo import Memo
from dsim.planner.plan import _missed, inputs_of, plan
from dsim.planner.plan_result import Horizon, Planned
from dsim.planner.quality import Quality
from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.profile import Profile, as_run_by, load
from dsim.profiler.roofline import roofline
from dsim.profiler.uncertainty import common_error
from dsim.results.world import World, replicas_of
from dsim.traces import load as load_trace

from ..checks import cases, refused
from ..stored import change, rows
from ..worlds import SECOND, doubting

PROFILE = load("a100-sdar-8b")
SERVER = replace(PROFILE, name="second", latency=SECOND, family="autoregressive")
# One step of a second a request: a replica of one row serves 1 req/s, one of four rows up to four at once.
QUEUE = World("azure-conv", arrival="poisson", lengths="fixed:1,1", slos=("mean:e2el=3s",))
ONE, FOUR = "ar,max_batch=1", "ar,max_batch=4"


def planned(world: World = QUEUE, specs: tuple[str, ...] = (ONE, FOUR), **options: Any) -> Planned:
    profiles = options.pop("profiles", [SERVER])
    candidates, out = candidates_of(world, specs, profiles, options.pop("prices", lambda profile: 2.0))
    return plan(world, candidates, out, **{"rate": 3.2, "num_requests": 400, "jobs": 1, **options})


@pytest.fixture(scope="module")
def found() -> Planned:
    return planned()


def test_the_cheapest_fleet_that_meets_the_slos_is_recommended(found: Planned) -> None:
    # An M/D/1 queue at a load of 0.8 has a mean stay of 1 + 0.8 / 0.4 = 3 s: at least 4 servers for 3.2 req/s, and
    # fewer requests queue where arrivals take turns. With four rows a server, one step serves all that wait.
    best, second = found.ranking
    assert (best.policy, best.replicas, best.per_hour) == (FOUR, 1, 2.0)
    assert (second.policy, second.replicas, second.per_hour) == (ONE, 4, 8.0)
    assert best.per_million_tokens == pytest.approx(2.0 / (3600 * 3.2) * 1e6)  # one token a request
    assert second.limited_by == "compute"
    assert second.breaks_first in ("mean:e2el=3s", "stability")
    value = best.values["mean:e2el=3s"]
    assert value.low <= value.value <= value.high <= 3.0


def test_a_plan_says_which_steps_of_its_fleet_the_profile_doubts() -> None:
    best = planned(specs=(ONE,), profiles=[doubting(SERVER, "prefills (1 sequence)")], rate=0.6, num_requests=100)
    said = "second doubts parts of ar,max_batch=1's busy time, 100 % in prefills (1 sequence): 6 to 13 % too fast"
    assert best.recommended.doubted == (said,)
    assert f"; {said}." in best.page().answer


def test_a_plan_draws_replicas_at_random_and_says_what_a_router_would_save(found: Planned) -> None:
    assert inspect.signature(dsim.plan).parameters["router"].default == "random"
    drawn = planned(replace(QUEUE, router="random"), (ONE,))
    routed = drawn.routed
    assert 4 <= routed.replicas < (drawn.recommended.replicas or 0)  # four servers of 0.8 requests a second each
    assert routed.per_hour == 2.0 * routed.replicas
    assert found.routed is None  # its router is named
    assert f"behind jsq {routed.gpus} GPUs, {routed.per_hour:.2f} USD an hour, would do" in str(drawn.page().details)


def test_what_runs_today_is_replayed_on_the_recommended_gpus_without_the_spare() -> None:
    found = planned(specs=(FOUR,), today="ar,max_batch=1,replicas=3", spare=1)
    today = found.today
    assert (today.policy, today.replicas, today.gpus, today.per_hour, today.spare) == (ONE, 3, 3, 6.0, 0)
    assert today.per_million_tokens == pytest.approx(6.0 / (3600 * 3.2) * 1e6)
    assert today.values["mean:e2el=3s"].value > 3  # 3 req/s of 3.2
    assert found.missed_today == ["mean:e2el=3s"]
    for wrong in ("ar", "ar,replicas=0", ",replicas=2"):
        with refused("expected SPEC,replicas=N"):
            planned(today=wrong)


def test_growth_decides_which_gpu_is_bought() -> None:
    # A slow server takes 0.8 req/s within 3 s, one four times as fast all of it: at 0.6 req/s one is enough of each, at
    # 1.2 it takes two slow ones.
    fast = replace(SERVER, name="fast", latency=SECOND.scaled(0.25))
    how = {"prices": lambda p: 1.3 if p.name == "fast" else 1.0, "rate": 0.6, "profiles": [SERVER, fast]}
    today, years = (planned(specs=(ONE,), horizon=given, **how) for given in (None, Horizon("100%/year")))
    assert [row.place for row in today.ranking] == ["second", "fast"]
    assert [row.place for row in years.ranking] == ["fast", "second"]
    slow = years.ranking[1]
    assert [due.replicas for due in slow.due] == [1, 1, 2, 2, 2]
    assert slow.mean_cost == pytest.approx((1 + 1.5 + 2 + 2) / 4)


@pytest.mark.slow
def test_a_plan_of_canvases_says_what_each_counted_law_needs_and_recommends_the_larger() -> None:
    gemma = load("h200x2-diffusiongemma/vllm")
    world = World("azure-conv", arrival="poisson", lengths="fixed:500,200", slos=("99%:e2el=3s",))
    how: dict[str, Any] = {"specs": ("vllm-diffusion:8",), "profiles": [gemma], "rate": 16.0}
    found = planned(world, **how)
    assert [law.name for law in found.laws] == ["evaluation", "chat"]
    examined, chat = found.laws
    assert (examined.replicas, round(examined.forwards or 0, 1)) == (found.recommended.replicas, 27.0)
    assert (chat.replicas < examined.replicas, round(chat.forwards or 0, 1)) == (True, 14.6)
    said = "with 14.6 ('chat': vLLM's counters on an L40S, chat with thinking, 253 canvases)"
    assert any(said in line for line in found.page().details)
    assert found.recommended.per_million_tokens == pytest.approx(2.0 * examined.gpus / (3600 * 16 * 200) * 1e6)
    assert planned(replace(world, workload="chat"), **how).laws == ()


@pytest.mark.slow
def test_settings_that_save_nothing_stay_as_given() -> None:
    gemma = load("h200x2-diffusiongemma/vllm")
    world = World("azure-conv", arrival="poisson", lengths="fixed:500,60", slos=("ttft=4s",))
    found = planned(world, ("vllm-diffusion",), profiles=[gemma], rate=0.5).recommended
    assert (found.policy, found.replicas) == ("vllm-diffusion", 1)
    assert found.tried.num > 1


def test_headroom_is_the_traffic_until_an_slo_breaks(found: Planned) -> None:
    room = found.recommended.headroom
    assert room.low < room.value < room.high
    assert room.value >= 0.0
    assert found.ranking[1].headroom is None  # of the recommendation alone: its search takes the most replays


def test_risks_are_of_more_traffic_a_replica_lost_and_a_slower_profile(found: Planned) -> None:
    more, lost, _ = found.risks
    assert [risk.change for risk in found.risks] == ["30% more traffic", "a replica lost", "a profile 20% slower"]
    # 4.16 req/s and steps of 1.2 s are more than one server of four rows takes within 3 s.
    assert (more.verdict, more.needs, more.per_hour) == ("misses", 2, 4.0)
    assert (lost.verdict, lost.values, lost.needs) == ("misses", {}, 2)


def test_the_answer_is_a_policy_file_with_its_replicas(found: Planned) -> None:
    path = Path("plan.toml")
    path.write_text(found.plan_toml)
    assert parse(str(path)).batching.max_batch == 4
    assert replicas_of([str(path)], None) == 1


def test_fleets_of_one_price_are_told_apart_by_how_near_their_slos_are() -> None:
    found = planned(specs=("ar,max_batch=8", "ar,max_batch=64"), rate=3.2)
    best, second = found.ranking
    assert best.replicas == second.replicas == 1
    value = [fleet.values["mean:e2el=3s"].value for fleet in found.ranking]
    assert value[0] <= value[1]


def test_at_one_cost_the_better_answers_are_recommended() -> None:
    candidates, _ = candidates_of(QUEUE, ["ar,max_batch=64", ONE], [SERVER], lambda profile: 2.0, as_given=True)
    scored = [replace(candidates[i], quality=Quality(0.9 + 0.1 * i, "")) for i in range(2)]
    found = plan(QUEUE, scored, rate=0.5, num_requests=400, jobs=1)
    assert [(fleet.policy, fleet.per_hour) for fleet in found.ranking] == [(ONE, 2.0), ("ar,max_batch=64", 2.0)]
    assert found.ranking[1].values["mean:e2el=3s"].value < found.ranking[0].values["mean:e2el=3s"].value
    text = str(found.page())
    assert "ar,max_batch=64, at the same cost: " in text
    assert "quality 90.0 % against" in text


def test_what_nothing_tells_apart_is_called_a_tie() -> None:
    found = planned(specs=("ar,max_batch=64", "ar,max_batch=65"), rate=0.5)
    assert found.tied == (found.ranking[1].policy,)
    candidates, _ = candidates_of(
        QUEUE, [fleet.policy for fleet in found.ranking], [SERVER], lambda _: 2.0, as_given=True
    )
    candidates = [replace(c, quality=Quality((None, 1.0)[i], "", ("no score",))) for i, c in enumerate(candidates)]
    scored = plan(QUEUE, candidates, rate=0.5, num_requests=400, jobs=1)
    assert scored.recommended.policy == found.ranking[1].policy  # whose answers are known


def test_another_gpu_has_another_price_and_place() -> None:
    fast = replace(SERVER, name="fast", latency=SECOND.scaled(0.5))
    dear = planned(specs=(ONE,), profiles=[SERVER, fast], prices=lambda p: 9.0 if p.name == "fast" else 2.0)
    assert [(f.place, f.replicas) for f in dear.ranking] == [("second", 4), ("fast", 2)]
    cheap = planned(specs=(ONE,), profiles=[SERVER, fast], prices=lambda p: 2.0)
    assert [(f.place, f.replicas) for f in cheap.ranking] == [("fast", 2), ("second", 4)]


def test_without_a_price_fleets_are_ranked_by_gpus() -> None:
    found = planned(prices=lambda profile: None)
    assert not found.priced
    assert [fleet.gpus for fleet in found.ranking] == [1, 4]
    assert found.recommended.per_hour is None


def test_hopeless_candidates_are_dropped_after_the_pilot(found: Planned) -> None:
    left = planned(specs=(FOUR, "ar,max_batch=8", "ar,max_batch=1"), rate=3.2)
    assert [fleet.policy for fleet in left.left_out] == [ONE]
    assert left.left_out[0].about in (3, 4, 5)
    assert "by the pilot" in left.left_out[0].dropped
    assert left.num_replays < found.num_replays + 20


def test_a_target_that_no_fleet_meets_is_an_error_with_both_numbers() -> None:
    idle = replace(QUEUE, slos=("mean:e2el=10ms",))
    with refused(r"no fleet of up to 3 replicas .* at 3.2 req/s; ar,max_batch=1 misses"):
        planned(idle, (ONE,), max_replicas=3)


def test_the_same_seed_gives_the_same_answer_whatever_the_jobs_and_the_store(found: Planned) -> None:
    def again(**options: Any) -> Memo:
        memo = Memo()
        memo.open("replays.db")
        assert planned(memo=memo, **options).to_json() == found.to_json()
        memo.close()
        return memo

    assert again(jobs=2).num_stored == 0
    whole = rows(Path("replays.db"))
    # A run that was killed after half of its answers.
    change(Path("replays.db"), f"DELETE FROM replays WHERE key > '{whole[len(whole) // 2][0]}'")
    half = again()
    assert (half.num_stored, half.num_answers) == (len(whole) // 2 + 1, len(whole))
    assert rows(Path("replays.db")) == whole
    assert again().num_stored == len(whole)


def test_a_question_is_known_by_its_inputs_and_what_its_files_hold() -> None:
    lengths = Path("lengths.jsonl")
    lengths.write_text('{"arrival": 0.0, "input_length": 40, "output_length": 32}\n')

    def asked(world: World = QUEUE, rate: float = 3.2, price: float = 2.0) -> object:
        candidates, _ = candidates_of(world, [ONE], [SERVER], lambda profile: price)
        return inputs_of(world, candidates, rate=rate, attainment=0.99, max_replicas=64, num_requests=None)

    others = (asked(replace(QUEUE, seed=1)), asked(rate=3.3), asked(price=3.0))
    assert asked() == asked()
    assert asked() not in others
    drawn = replace(QUEUE, lengths=str(lengths))
    before = asked(drawn)
    lengths.write_text(lengths.read_text().replace("40", "400"))
    assert asked(drawn) != before


def test_a_slower_profile_is_slower_in_every_step() -> None:
    whole = replace(
        PROFILE.latency, cache_overhead=(CacheOverhead("FastCache", "full", 1.0, 0.5),), eviction=0.25,
        sequence=0.125,
    )  # fmt: skip
    slower = whole.scaled(1.2)
    others = "early graph_tokens overlap knots cache_overhead layers dense"
    for name in {f.name for f in fields(whole)} - set(others.split()):
        assert getattr(slower, name) == pytest.approx(1.2 * getattr(whole, name)), name
    assert slower.base(1000) == pytest.approx(1.2 * whole.base(1000))
    assert (slower.cache_overhead[0].row, slower.cache_overhead[0].token) == pytest.approx((1.2, 0.6))
    assert (slower.early, slower.graph_tokens, slower.overlap) == (whole.early, whole.graph_tokens, whole.overlap)


def test_without_policies_the_engines_own_are_candidates_and_with_research_all_of_the_family() -> None:
    for research in (False, True):
        found, out = candidates_of(QUEUE, [], [PROFILE], lambda profile: None, research=research)
        family = {n for n, p in PRESETS.items() if p.policy.family == PROFILE.family}
        asked = {name_of(row.policy) for row in (*found, *out)}
        assert asked == {n for n in family if research or PRESETS[n].engine}  # another family's are not even left out
        assert {name_of(c.policy) for c in found if c.is_research} == {n for n in asked if not PRESETS[n].engine}
    for research in (False, True):
        alone, _ = candidates_of(QUEUE, [], [load("h100-llada-8b")], lambda p: None, research=research)
        assert len(alone) > 3  # no engine serves it
        assert not any(candidate.is_research for candidate in alone)


@pytest.mark.slow
def test_a_scheduler_of_no_engine_is_shown_apart_with_what_it_would_save() -> None:
    asked = World("azure-conv", arrival="poisson", lengths="fixed:200,200", slos=("90%:norm_latency=60ms",))
    every, _ = candidates_of(asked, [], [PROFILE], lambda profile: 2.0, as_given=True, research=True)
    few = [c for c in every if name_of(c.policy) in ("lmdeploy-bd32", "chunk")]
    found = plan(asked, few, rate=8.0, num_requests=400, jobs=1)
    assert [row.policy for row in found.ranking] == ["lmdeploy-bd32"]
    [apart] = found.research
    assert apart.policy == "chunk"
    assert f"chunk {apart.gpus} {apart.per_hour:.2f} " in " ".join(str(found).split())


def test_a_policy_by_a_law_is_left_out_on_a_data_sheet_s_profile() -> None:
    found, out = candidates_of(QUEUE, [], [roofline(gpu("H100"), model("SDAR-8B"))], lambda profile: None)
    assert "sglang-joint" not in {name_of(row.policy) for row in found}
    [joint] = [row for row in out if row.policy == "sglang-joint"]
    assert "holds no law of steps a canvas" in joint.dropped


def test_prefix_caching_is_searched_on_a_trace_that_names_prefixes() -> None:
    profile = load("h100-qwen3-8b-ar")
    for trace, searched in (("mooncake-conv", True), ("azure-conv", False)):
        asked = World(trace, profile=profile.name, slos=("ttft=2s",))
        found, _ = candidates_of(asked, ["vllm-ar"], [profile], lambda profile: None)
        assert any("prefix_caching=true" in one for one in found[0].settings) == searched


def test_what_falls_below_the_quality_is_left_out_with_its_reason() -> None:
    found, out = candidates_of(QUEUE, ["lmdeploy-bd32", "optimus"], [PROFILE], lambda profile: None, min_quality=0.99)
    assert [c.policy for c in found] == ["lmdeploy-bd32"]
    assert out[0].dropped.startswith("quality unknown: ")
    with refused("quality unknown"):
        candidates_of(QUEUE, ["optimus"], [PROFILE], lambda profile: None, min_quality=0.99)


def test_a_plan_across_data_sheets_says_which_errors_cancel_between_the_gpus() -> None:
    sheets: list[Profile] = [roofline(gpu(name), model("SDAR-8B")) for name in ("h100", "b200")]
    found, _ = candidates_of(QUEUE, ["optimus"], sheets, lambda profile: None, as_given=True)
    assert [c.place for c in found] == ["H100", "B200"]
    assert all(c.profile.is_estimate for c in found)
    assert plan(QUEUE, found, rate=4.0, num_requests=100, jobs=1).notes[-1:] == (
        "B200 and H100 share these unknowns, which largely cancel between them if one build runs on all: another "
        "implementation, front end, launch floor, spread between requests, yield, yield of another workload. Each has "
        "its own device time: device time alone leaves B200 over H100 uncertain by ±42 %",
    )


def test_engine_s_costs_of_different_profiles_do_not_cancel() -> None:
    b200 = as_run_by(roofline(gpu("B200"), model("LLaDA2.1-mini")), parse("sglang-joint"))
    said = common_error([b200, load("h100-llada2.1-mini/sglang")], None)
    builds = "h20-llada2.1-mini-sglang and h200x2-diffusiongemma/sglang (geometric mean)"
    assert f"its engine's host time (B200 as in {builds}, H100 as in h100-" in said
    sheets = [roofline(gpu(name), model("SDAR-8B")) for name in ("h100", "a100")]
    both = [as_run_by(sheet, parse("lmdeploy-bd32")) for sheet in sheets]
    assert "engine's host time" not in common_error(both, None)  # the second takes the first one's


@cases("num says", (100, "each replay judges 85 of the trace's 600"), (706, None))
def test_replays_that_are_shorter_than_the_trace_say_what_they_may_have_missed(num: int, says: str | None) -> None:
    world = replace(QUEUE, trace="x", arrival="trace")
    trace = load_trace("azure-conv").head(600)
    with mock.patch.object(World, "source", return_value=trace):
        said = _missed(search_of(world, 0.02, 0.99, num))
    assert [line.startswith(says or "") for line in said] == [True] * (says is not None)
