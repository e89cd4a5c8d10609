"""What a profile does not know, drawn: intervals that hold the truth at their level, and causes that stand alone."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.latency import Features
from dsim.planner.backend import Pool
from dsim.planner.ensemble import EOS, drawn, ensemble, interval, known_causes, level, moved, paired
from dsim.profiler import uncertainty as errors
from dsim.profiler.calibrate import mean_yield
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.known import unknown_host
from dsim.profiler.profile import Fit, Profile, load, shipped
from dsim.profiler.uncertainty import causes, varied
from dsim.report.ensemble_page import sentences, times
from dsim.results.spread import Effect, Spread, Uncertain
from dsim.results.world import World

from ..checks import cases, refused
from ..cli.command import dsim, succeed

SDAR = load("a100-sdar-8b")
MODEL = SDAR.commit_model("sharegpt-focus", 32, 0.9)
ASKED = World("azure-conv", "chunk:8", lengths="fixed:64,64", arrival="poisson", rate=4.0, num_requests=12, seed=3)
ERRORS = {"slope": 4e-6, "launch": 2e-3, "knots[1][1]": 1e-3}


@dataclass(frozen=True)
class Measured(World):
    """A world whose profile was measured: a coefficient and its error, as a draw of the truth gave them."""

    launch: float = 0.041
    slope: float = 50e-6

    def base_profile(self) -> Profile:
        return measured(self.launch, self.slope)


@lru_cache
def measured(launch: float, slope: float) -> Profile:
    fit = Fit((1.0, 8192.0), 0.01, {"launch": 4e-3, "slope": 6e-6}, None)
    latency = replace(SDAR.latency, launch=launch, slope=slope)
    return replace(SDAR, origin="measured", latency=latency, fit=fit, commits=())


def a_prompt_and_its_answer(world: World) -> float:
    """Seconds of a long prefill, which the slope decides, and of a step at the launch floor."""
    latency = world.loaded_profile().latency
    return latency.step(Features(12000, 0, 12000, 1, 1, 1, 12000)) + latency.step(Features(1, 0, 100, 1, 1, 1, 0))


@cases("num", pytest.param(19, marks=pytest.mark.slow), 6)
def test_intervals_hold_the_truth_at_their_level(num: int) -> None:
    # The truth is what the device does; each measurement of it is off by its own standard errors.
    rng = np.random.default_rng(7)
    base = Measured("azure-conv", policy="ar", frontend=0.0, eos=True)  # both are stated
    truth, held = a_prompt_and_its_answer(base), 0
    for i in range(400):
        own = replace(base, launch=0.041 + 4e-3 * rng.normal(), slope=50e-6 + 6e-6 * rng.normal())
        known = known_causes(own)
        assert {c.name for c in known} == {errors.FIT + "launch", errors.FIT + "slope"}
        draws = [replace(own, variation=drawn(known, k, i)) for k in range(1, num + 1)]
        found = interval([math.nan, *map(a_prompt_and_its_answer, draws)])
        held += found.low <= truth <= found.high
    # Within three standard deviations, on both sides: 0.855 to 0.945, and 0.646 to 0.782 of six draws.
    assert held / 400 == pytest.approx(level(num), abs=3 * math.sqrt(level(num) * (1 - level(num)) / 400))


def test_an_interval_of_few_draws_says_its_own_level() -> None:
    assert level(19) == pytest.approx(0.9)
    assert level(100) == 0.9
    assert level(9) == pytest.approx(0.8)
    assert interval([5.0, *range(1, 20)]) == Spread(5.0, 1.0, 19.0)
    assert interval([5.0, 1.0]) == Spread(5.0, None, None)


def test_two_settings_share_the_errors_of_their_card_code_model_and_traffic_alone() -> None:
    def draw(policy: str, profile: str) -> dict[str, float]:
        return dict(drawn(known_causes(replace(ASKED, policy=policy, profile=profile)), 1, 0))

    def shared(*places: tuple[str, str]) -> set[str]:
        one, other = (draw(*place) for place in places)
        return {name for name in one.keys() & other.keys() if one[name] == other[name]}

    blocks, yields, card = (
        "lmdeploy-bd32",
        {errors.WORKLOAD, errors.YIELD, errors.SPREAD},
        {errors.MEMORY, errors.COMPUTE},
    )
    all_shared = {*card, errors.LAUNCH, errors.IMPLEMENTATION, errors.FRONT_END, EOS, *yields}
    assert shared((blocks, "h100-sdar-8b"), (blocks, "h100-sdar-8b")) == all_shared
    gpus = shared((blocks, "h100-sdar-8b/sglang"), (blocks, "h200-sdar-8b"))
    assert gpus == {EOS, *yields}  # neither card nor code
    assert shared(("optimus", "h100-sdar-8b"), ("optimus", "h200-sdar-8b")) == all_shared - card
    assert shared((blocks, "h100-sdar-8b/sglang"), (blocks, "h100-sdar-8b/lmdeploy")) == {*card, EOS, *yields}
    # FOCUS evicts, so that its yield is a reading of its own; so is that of another threshold.
    assert shared(("optimus", "h100-sdar-8b"), ("focus", "h100-sdar-8b")) == all_shared - {errors.YIELD}
    assert shared((blocks, "a100-sdar-8b"), (f"{blocks},threshold=0.8", "a100-sdar-8b")) == {
        *card, errors.LAUNCH, errors.FRONT_END, EOS, errors.WORKLOAD
    }  # fmt: skip


def test_a_ratio_is_of_paired_draws_and_has_no_upper_end_where_the_other_is_nothing() -> None:
    values = [{"goodput": value} for value in (6.0, *range(1, 20))]
    assert paired(values, [{"goodput": 2 * own["goodput"]} for own in values]) == {"goodput": Spread(0.5, 0.5, 0.5)}
    found = paired(values, [{"goodput": 2.0 * (own["goodput"] != 3)} for own in values])["goodput"]
    assert found == Spread(3.0, 0.5, None)
    assert times(Spread(3.0, 0.5, None)) == "3.00 times (at least 0.50)"
    assert times(Spread(1.9049, 1.7199, 2.0801)) == "1.90 times (1.71 to 2.09)"  # rounded outward


def test_a_cause_alone_moves_what_it_is_of_and_nothing_else() -> None:
    own = SDAR.latency
    moved = varied(SDAR, ((errors.LAUNCH, -1.0),), MODEL)
    assert moved.latency == replace(own, launch=own.launch * math.exp(-0.1))
    moved = varied(replace(SDAR, origin="roofline"), ((errors.HOST_STEP, 0.0), (errors.HOST_REQUEST, 50.0)), MODEL)
    assert moved.latency.host_step == pytest.approx(5.5e-3 / 2)
    assert moved.latency.host_request == pytest.approx(5.5e-3 / 72)
    assert varied(SDAR, (), MODEL) == SDAR


def test_reading_and_multiplying_move_apart_on_one_card() -> None:
    sheet = load("h100-sdar-8b")
    for cause, widths in (errors.MEMORY, [0.3, 0.0]), (errors.COMPUTE, [0.0, 0.3]):
        moved = varied(sheet, ((cause, 1.0),), None).latency
        # Bound by the bandwidth, and by products.
        times = [moved.base(tokens) / sheet.latency.base(tokens) for tokens in (64, 1024)]
        assert times == pytest.approx(np.exp(widths))
    # Of affine steps what does not grow with tokens is read.
    tokens, height = SDAR.latency.knots[-1]
    products = SDAR.latency.slope * tokens
    moved = varied(SDAR, ((errors.MEMORY, 1.0),), MODEL).latency
    assert moved.knots[-1][1] == pytest.approx(products + math.exp(0.1) * (height - products))


def test_kernels_of_experts_and_of_fewer_bits_have_errors_of_their_own() -> None:
    dense, as_dense, experts, fp8 = (
        {c.owner for c in causes(load(f"h100-{name}"), None) if c.name in (errors.MEMORY, errors.COMPUTE)}
        for name in ("sdar-8b", "qwen3-8b-ar", "llada2.1-mini", "diffusiongemma-fp8")
    )
    assert dense == as_dense
    assert len(dense | experts | fp8) == 3


def test_yield_moves_by_its_width_and_a_spread_leaves_it() -> None:
    for score in (-1.0, 1.0):
        [model] = varied(SDAR, ((errors.YIELD, score),), MODEL).commits
        assert mean_yield(model) / mean_yield(MODEL) == pytest.approx(1 + 0.1 * score, abs=0.03)
        assert model.request_spread == MODEL.request_spread
    for score, spread in ((-8.0, 0.0), (8.0, 2 * MODEL.request_spread)):
        [model] = varied(SDAR, ((errors.SPREAD, score),), MODEL).commits
        assert model.request_spread == pytest.approx(spread, abs=1e-6)
        assert mean_yield(model) == pytest.approx(mean_yield(MODEL), rel=0.03)


def test_a_law_of_forwards_moves_like_a_commit_model_and_a_given_number_does_not() -> None:
    gemma = load("h200x2-diffusiongemma/vllm")
    fixed = gemma.canvas_law("fixed-48", 256)
    assert not {errors.YIELD, errors.SPREAD} & {c.name for c in causes(gemma, fixed)}
    for law in (gemma.canvas_law(workload, 256) for workload in ("evaluation", "mixed")):  # a histogram, a log-normal
        assert {errors.YIELD, errors.SPREAD} <= {c.name for c in causes(gemma, law)}
        [more] = varied(gemma, ((errors.YIELD, 1.0),), law).canvas_laws
        assert mean_forwards(law) / mean_forwards(more) == pytest.approx(math.exp(0.1), rel=3e-3)
        for score, spread in ((-8.0, 0.0), (8.0, 2 * law.request_spread)):
            [moved] = varied(gemma, ((errors.SPREAD, score),), law).canvas_laws
            assert moved.request_spread == pytest.approx(spread, abs=1e-6)
            assert mean_forwards(moved) == pytest.approx(mean_forwards(law), rel=3e-3)
    asked = replace(ASKED, policy="vllm-diffusion", profile=gemma.name, workload="mixed")
    assert {errors.YIELD, errors.SPREAD} <= {c.name for c in known_causes(asked)}
    assert replace(asked, variation=((errors.YIELD, 1.0),)).loaded_profile().canvas_laws == (more,)


def test_standard_errors_move_their_coefficient_and_none_below_what_can_be() -> None:
    profile = replace(SDAR, fit=replace(SDAR.fit, standard_errors=ERRORS, relative_uncertainty=None))
    assert [c.name for c in causes(profile, None)][:3] == [errors.FIT + name for name in ERRORS]
    moved = varied(profile, ((errors.FIT + "launch", 2.0), (errors.FIT + "slope", -1e9)), None)
    assert (moved.latency.launch, moved.latency.slope) == (pytest.approx(SDAR.latency.launch + 4e-3), 0.0)


def test_host_terms_that_nobody_measured_are_unknown() -> None:
    assert unknown_host(load("l40s-llada-8b")) == ("host_step",)
    # Whole runs and whole forwards, which calibrated profiles were read off, hold what the host took.
    assert [name for name in shipped() if load(name).origin == "calibrated" and unknown_host(load(name))] == []
    assert unknown_host(load("h100-sdar-8b")) == ()
    assert unknown_host(replace(SDAR, origin="measured")) == ()
    # A log of steps has its host's time in every latency; a row's share of it is what it may not tell.
    lacking = replace(SDAR, origin="measured", fit=replace(SDAR.fit, unidentified=("host_request", "host_step")))
    assert unknown_host(lacking) == ("host_request",)


def test_another_implementation_moves_launches_and_host_alone_where_nobody_timed_them() -> None:
    roofline = load("h100-sdar-8b")
    model = roofline.commits[0] if roofline.commits else None
    assert errors.IMPLEMENTATION in {c.name for c in causes(roofline, model)}
    changed = varied(roofline, ((errors.IMPLEMENTATION, math.sqrt(2)),), model).latency
    own = roofline.latency
    for name in ("launch", "host_step", "host_request"):
        assert getattr(changed, name) == pytest.approx(getattr(own, name) * 6.55 / 1.6)
    assert (changed.slope, changed.knots) == (own.slope, own.knots)
    assert errors.IMPLEMENTATION not in {c.name for c in causes(SDAR, MODEL)}  # calibrated to its own runs
    dream = [load(f"rtx4090-dream/{name}") for name in ("fast-dllm", "dllm-cache")]
    assert [errors.IMPLEMENTATION in {c.name for c in causes(profile, None)} for profile in dream] == [False, True]


def test_a_published_yield_is_of_another_workload_and_a_logged_one_is_not() -> None:
    means = [mean_yield(varied(SDAR, ((errors.WORKLOAD, score),), MODEL).commits[0]) for score in (-1.0, 1.0)]
    assert means[1] / means[0] == pytest.approx(math.exp(2 * 0.45), rel=0.15)
    assert errors.WORKLOAD not in {c.name for c in causes(replace(SDAR, origin="measured"), MODEL)}
    gemma = load("h200x2-diffusiongemma/vllm")
    laws = [gemma.canvas_law(workload, 256) for workload in ("mixed", "fixed-48")]
    assert [errors.WORKLOAD in {c.name for c in causes(gemma, law)} for law in laws] == [True, False]
    [less] = varied(gemma, ((errors.WORKLOAD, -1.0),), laws[0]).canvas_laws
    assert less.median > laws[0].median
    editing = load("h100-llada2.1-mini")  # its published workloads lie further apart
    [law, *_] = editing.canvas_laws
    for of_run, width in (law, 1.07), (replace(law, workload="given"), 0.45):
        [more] = varied(editing, ((errors.WORKLOAD, 0.5),), of_run).canvas_laws
        assert mean_forwards(law) / mean_forwards(more) == pytest.approx(math.exp(width / 2), rel=0.02)


def test_what_a_world_states_is_not_drawn() -> None:
    assert {errors.FRONT_END, EOS} <= {c.name for c in known_causes(ASKED)}
    assert moved(ASKED, ((errors.FRONT_END, 8.0),)).loaded_profile().frontend == pytest.approx(0.053)
    assert [moved(ASKED, ((EOS, score),)).eos for score in (-1.0, 1.0)] == [False, True]
    assert not {errors.FRONT_END, EOS} & {c.name for c in known_causes(replace(ASKED, frontend=0.01, eos=True))}


def test_the_page_names_what_to_measure_next() -> None:
    effects = [
        Effect(cause, "", False, 10.0 - half, 10.0 + half)
        for cause, half in ((errors.FRONT_END, 4.0), (errors.YIELD, 3.0))
    ]
    told = Uncertain(9, 0.9, "e2el_ms.p90", False, {}, {"ar": tuple(effects)})
    assert sentences(told)[1] == (
        "Measure this next: front end (dsim profile --from-log steps.jsonl --client bench.json). Known, it would leave "
        "about 60 % of the 90 % interval's width."
    )


@pytest.mark.slow
def test_draws_are_of_the_seed_and_the_cause_whatever_else_is_drawn() -> None:
    known = causes(SDAR, MODEL)
    assert drawn(known, 1, 5) == drawn(known, 1, 5)
    assert drawn(known[2:], 1, 5) == drawn(known, 1, 5)[2:]
    assert drawn(known, 2, 5) != drawn(known, 1, 5)
    scores = np.array([[score for _, score in drawn(known, i, 0)] for i in range(2000)])
    assert np.abs(scores.mean(axis=0)).max() < 0.1
    assert np.abs(scores.std(axis=0) - 1).max() < 0.06
    assert np.abs(np.corrcoef(scores.T) - np.eye(len(known))).max() < 0.1


def test_an_answer_that_hangs_on_nothing_survives_and_one_on_a_coin_does_not() -> None:
    base = replace(ASKED, policy="ar", concurrency=4, arrival="trace", rate=None)
    found = ensemble([base, replace(base, policy="chunk:32")], base.requests(), 4, pool=Pool(jobs=1))
    assert found.answer == "chunk:32 is the best by output_throughput"
    assert found.survives == 0.75  # one draw has too low a yield
    ratio, first, second = found.ratios["ar"]["output_throughput"], *(
        found.intervals[policy]["output_throughput"] for policy in (found.best, "ar")
    )  # fmt: skip
    assert ratio.value == first.value / second.value > 1
    assert ratio.low < ratio.value < ratio.high
    largest = found.effects["ar"][0]
    assert largest.cause == errors.LAUNCH
    assert largest.low > largest.high  # a lower floor, more throughput
    assert errors.YIELD not in {e.cause for e in found.effects["ar"]}  # autoregressive: it draws from no commit model
    assert second.low <= second.value <= second.high


def test_a_cause_that_a_profile_does_not_have_is_refused() -> None:
    with refused("is not uncertain of luck", ProfileError):
        varied(SDAR, (("luck", 1.0),), MODEL)


@cases("wrong", "1", "1001")
def test_the_command_line_refuses_it_before_any_work(wrong: str) -> None:
    for command in ("replay azure-conv", "plan azure-conv --slo p90:ttft=1s"):
        assert dsim(command, "--ensemble", wrong).refusal == f"ensemble is {wrong}, expected 2 to 1000 draws"


def test_a_replay_tells_what_its_answer_hangs_on() -> None:
    args = "replay azure-conv --num-requests 8 --lengths fixed:64,32 --ensemble 3 --jobs 1 --policy chunk:8"
    found = succeed(args, "--policy ar -o run --json").json["ensemble"]
    assert (found["num"], set(found["effects"])) == (3, {"chunk:8", "ar"})
    page = Path("run/report.html").read_text()
    assert "What the answer depends on" in page
    assert "cause, chunk:8" in page
    assert dsim(args, "--policy ar --json").json["ensemble"] == found
    [other] = found["ratios"]
    first = f"The norm_latency_ms.p90 of {found['best']} is "
    places = [page.index(text) for text in (first, f"that of {other}, in 50 % of 3 drawn profiles.", "cause, chunk:8")]
    assert places == sorted(places)
    spoken = dsim(args).out
    assert "depends most on" in spoken
    assert "that of" not in spoken
    assert "does not know" not in spoken
