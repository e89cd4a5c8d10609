"""How P90 moves with the spread between requests: the spread that is asked for, at the same yield, on the first few."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

from dsim.planner import spread
from dsim.planner.plan import best_fleets, candidates_of
from dsim.planner.planned import Planned
from dsim.planner.record import in_twin, record
from dsim.planner.spread import beside_live, moved_by_spread
from dsim.planner.sweep import sweep
from dsim.profiler.profile import Profile, load
from dsim.profiler.request_effects import mean_yield
from dsim.profiler.uncertainty import SPREAD, score_of_spread, varied
from dsim.report.run_page import run_page
from dsim.results.run import read_run
from dsim.results.scenario import Scenario

# Alone, so that a request's time hangs on its own yield.
ASKED = Scenario(
    "azure-conv", policy="lmdeploy-bd32", lengths="fixed:64,256", arrival="constant", rate=0.05, num_requests=90,
    slos=("e2el=30s",),
)  # fmt: skip
PROFILE = load("a100-sdar-8b")
MODEL = PROFILE.commit_model("sharegpt-focus", 32, 0.9)


class Ranked(NamedTuple):
    """Of a fleet in a ranking, its name and size."""

    policy: str
    place: str
    profile: str
    replicas: int


@pytest.mark.parametrize("factor", spread.FACTORS)
def test_the_spread_is_moved_by_the_factor_and_the_yield_stays(factor: float) -> None:
    score = score_of_spread(PROFILE, MODEL, factor)
    assert score is not None
    [moved] = varied(PROFILE, ((SPREAD, score),), MODEL).commits[:1] if score else (MODEL,)
    assert moved.request_spread == pytest.approx(factor * MODEL.request_spread)
    assert mean_yield(moved) == pytest.approx(mean_yield(MODEL), rel=0.02)


def test_requests_that_differ_more_have_a_later_p90(tmp_path: Path) -> None:
    told = moved_by_spread([ASKED, replace(ASKED, policy="ar")], ASKED.requests())
    assert told is not None
    assert told["factors"] == [0.5, 1.0, 1.5]
    [own] = told["policies"]  # an autoregressive model commits one token a step, whoever asks
    assert (own["num_requests"], own["of"]) == (90, 90)
    assert own["spread"] == MODEL.request_spread
    low, as_it_is, high = own["p90_ms"]["e2el"]
    assert low < as_it_is < high
    assert as_it_is == pytest.approx(ASKED.run().e2el_ms.p90, rel=1e-3)
    record([ASKED], ASKED.requests(), in_twin, out=tmp_path / "run", about=lambda _: {"spread": told})
    page = run_page(read_run(tmp_path / "run"))
    [section] = [s for s in page.sections if s.title.startswith("How P90 moves")]
    [table] = section.blocks
    assert table.rows[0].cells[:2] == ("lmdeploy-bd32", "e2el p90, ms")
    assert table.caption.startswith("Replays of all 90 requests at 0.5, 1 and 1.5 times")


def test_a_long_trace_is_replayed_from_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "MOST", 4)
    told = moved_by_spread([ASKED], ASKED.requests())
    assert told is not None
    [own] = told["policies"]
    assert (own["num_requests"], own["of"]) == (4, 90)


def test_a_plan_s_best_fleets_are_moved_on_their_own_profiles() -> None:
    graphs = load("a100-sdar-8b-graphs")
    candidates, _ = candidates_of(ASKED, ["lmdeploy-bd32", "optimus"], [PROFILE, graphs], lambda profile: None)
    asked = [c for c in candidates if (c.policy, c.profile) in (("lmdeploy-bd32", PROFILE), ("optimus", graphs))]
    ahead = [Ranked(c.policy, c.place, c.profile.name, i) for i, c in enumerate(asked, 1)]
    fleets = best_fleets(ASKED, asked, cast(Planned, SimpleNamespace(rate=0.05, ranking=tuple(ahead))))
    assert [(f.policy, f.replicas, f.base_profile(), f.rate) for f in fleets.values()] == [
        ("lmdeploy-bd32", 1, PROFILE, 0.05), ("optimus", 2, graphs, 0.05),
    ]  # fmt: skip
    assert list(fleets) == ["lmdeploy-bd32 on a100-sdar-8b", "optimus on a100-sdar-8b-graphs"]
    told = moved_by_spread(list(fleets.values()), names=list(fleets))
    assert told is not None
    as_planned, other = told["policies"]
    assert as_planned["p90_ms"] == moved_by_spread([ASKED])["policies"][0]["p90_ms"]  # type: ignore[index]
    assert other["policy"] == "optimus on a100-sdar-8b-graphs"
    low, as_it_is, high = other["p90_ms"]["e2el"]
    assert low < as_it_is < high


def test_a_sweep_tells_it_of_the_first_cell_of_each_policy(tmp_path: Path) -> None:
    base = {"trace": "azure-conv", "lengths": "fixed:64,64", "num_requests": 8}
    grid = {"policy": ["ar", "lmdeploy-bd32", "optimus"], "rate": [0.5, 1.0]}
    sweep({"base": base, "grid": grid}, tmp_path / "out", jobs=1)
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "How P90 moves with the spread between requests" in page
    assert "Replays of all 8 requests of the first cell of each policy at 0.5, 1 and 1.5 times" in page
    assert "1.96 (lmdeploy-bd32), 1.96 (optimus)" in page


def test_without_a_policy_that_draws_nothing_is_told() -> None:
    assert moved_by_spread([replace(ASKED, policy="ar")], ASKED.requests()) is None


def test_where_requests_do_not_differ_it_is_said() -> None:
    fixed = Scenario("azure-conv", policy="vllm-diffusion", profile="h200x2-diffusiongemma-vllm", workload="fixed-48")
    why = "in h200x2-diffusiongemma-vllm requests of fixed-48 do not differ"
    assert moved_by_spread([fixed]) == {"none": f"Nothing was replayed at other spreads between requests: {why}."}


@pytest.mark.parametrize(
    ("scenario", "profile", "why"),
    [
        (ASKED, None, "no profile of this device was given (--profile)"),
        (replace(ASKED, eos=True), PROFILE, "answers ended where the weights said, which the twin does not know"),
        (replace(ASKED, policy="sparse-dllm"), PROFILE, "profile a100-sdar-8b is of family block-diffusion"),
    ],
)
def test_a_measured_run_says_why_its_twin_was_not_asked(scenario: Scenario, profile: Profile | None, why: str) -> None:
    told = beside_live([scenario], ASKED.requests(), profile)
    assert told is not None
    assert told["none"].startswith(f"Nothing was replayed at other spreads between requests: {why}")
    assert beside_live([replace(scenario, policy="ar")], ASKED.requests(), profile) is None
