"""A plan's page and text: the recommendation in money, why the runner-up lost, and what could change it."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from dsim.planner.deploy import Deployment
from dsim.planner.plan_result import Due, Fleet, Growth, Planned, Risk
from dsim.planner.quality import Quality
from dsim.planner.replicate import Interval
from dsim.report.plan_page import answer, plan_page, runner_up
from dsim.report.text import render
from dsim.results.spread import Spread

from ..checks import cases
from .fabricate import setup

MET = "99% meet ttft=2s and norm_latency=50ms"
RISK = Risk(
    change="30% more traffic", values={MET: Spread(0.982, None, None)}, judged=850, verdict="misses",
    stable=True, needs=5, per_hour=10.0,
)  # fmt: skip
SETUP = setup(slos=("ttft=2s", "norm_latency=50ms"))


def fleet(policy: str, replicas: int, share: float, **more: Any) -> Fleet:
    values: dict[str, Any] = {
        "policy": policy, "place": "", "profile": "p", "device": "A100-80GB", "gpus_per_replica": 1, "model": "m",
        "replicas": replicas, "gpus": replicas, "per_hour": 2.0 * replicas, "per_million_tokens": 50.0,
        "values": {MET: Spread(share, share - 0.001, share + 0.001)}, "estimated": True,
        "attained": {"ttft=2s": 0.999, "norm_latency=50ms": 0.993}, "judged": 2550,
        "headroom": Interval(0.163, 0.118, 0.214), "breaks_first": MET,
        "limited_by": "compute", "quality": Quality(1.0, ""), "price": 2.0, "implementation": "i",
    }  # fmt: skip
    return Fleet(**{**values, **more})


def lost(policy: str, **more: Any) -> Fleet:
    return replace(fleet(policy, 0, 0.0, **more), replicas=None, gpus=None, per_hour=None, values={})


def info(*ranking: Fleet, **more: Any) -> Planned:
    rows = ranking or (fleet("optimus", 4, 0.994), fleet("lmdeploy-bd32", 6, 0.991))
    values: dict[str, Any] = {
        "rate": 12.0, "ranking": rows, "left_out": (), "tied": (), "risks": (RISK,), "criteria": (MET,),
        "bounds": {MET: 0.99}, "share_criteria": (MET,), "plan_toml": 'policy = "optimus"\nreplicas = 4\n',
        "priced": True, "num_replays": 9, "num_requests": 100, "block": 25, "setup": SETUP,
    }  # fmt: skip
    return Planned(**{**values, **more})


def text(planned: Planned) -> list[str]:
    out = io.StringIO()
    render(plan_page(planned), Console(file=out))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_answer_is_a_fleet_its_price_what_it_attains_and_who_came_second() -> None:
    assert text(info())[:3] == [
        "4 × A100-80GB, 8.00 USD an hour, 5,844 USD a month, meet the target for 99.4 % (99.3 to 99.5), with "
        "room for 11 to 22 % more traffic; no released engine is known to run this policy.",
        "12 req/s within ttft=2s and norm_latency=50ms: optimus on 4 A100-80GB.",
        "Runner-up: lmdeploy-bd32 needs 6 A100-80GB, 12.00 USD an hour against 8.00 USD an hour.",
    ]


def test_a_runner_up_of_the_same_price_lost_by_its_slos_or_is_a_tie() -> None:
    best, second = fleet("optimus", 4, 0.994), fleet("chunk:8", 4, 0.991)
    assert runner_up(info(best, second), second) == (
        "chunk:8, at the same cost: 99.1 % (99.0 to 99.2), quality 100.0 % against "
        "99.4 % (99.3 to 99.5), quality 100.0 %"
    )
    said = runner_up(info(best, second, tied=("chunk:8",)), second)
    assert said == "chunk:8, at the same cost; these replays cannot tell it from the best"
    assert "as good as the recommendation" in text(info(best, second, tied=("chunk:8",)))[-1]


def test_without_a_second_fleet_or_a_price_the_answer_says_no_more_than_is_known() -> None:
    alone = text(info(fleet("optimus", 4, 0.994, per_hour=None), priced=False, left_out=(fleet("x", 0, 0.0),)))
    assert alone[1].endswith("optimus on 4 A100-80GB.")
    assert not any("USD" in line or "Runner-up" in line for line in alone[:3])


def test_every_column_of_the_ranking_has_something_and_a_place_where_there_are_several() -> None:
    [section] = [s for s in plan_page(info()).sections if s.title == "The ranking"]
    [ranking] = section.blocks
    assert ranking.kind == "table"
    assert all(all(row.cells) for row in ranking.rows)
    assert "on" not in ranking.head
    two = info(fleet("optimus", 4, 0.994, place="H100"), fleet("optimus", 6, 0.991, place="A100-80GB"))
    [section] = [s for s in plan_page(two).sections if s.title == "The ranking"]
    assert [row.cells[1:3] for row in section.blocks[0].rows] == [("H100", "4"), ("A100-80GB", "6")]


def test_the_slo_that_most_requests_miss_binds_first() -> None:
    assert any("norm_latency=50ms compute" in line for line in text(info()))


@cases(
    "risk says",
    ({"verdict": "misses", "needs": 5, "per_hour": 10.0}, "98.2 %, misses them 5 GPUs, 10.00 USD an hour"),
    ({"verdict": "meets", "needs": 1, "per_hour": 2.0}, "98.2 %, meets them 1 GPU, 2.00 USD an hour"),
    ({"verdict": "misses", "needs": None, "per_hour": None}, "98.2 %, misses them more than were allowed"),
)
def test_a_risk_says_what_becomes_of_the_fleet_and_what_it_then_needs(risk: dict[str, Any], says: str) -> None:
    assert f"30% more traffic {says}" in text(info(risks=(replace(RISK, **risk),)))


def test_what_was_left_out_and_what_is_unknown_is_said() -> None:
    unknown = Quality(None, "", ("no score is published for optimus on SDAR-8B",))
    why = "about 18 replicas by the pilot: costs far more than the two cheapest"
    dropped = fleet("sglang-bd32", 0, 0.0, dropped=why)
    lines = text(info(fleet("optimus", 4, 0.994, quality=unknown), left_out=(dropped,)))
    assert any(line.startswith("sglang-bd32 about 18 replicas by the pilot") for line in lines)
    assert "Profile: p: estimated, not measured" in lines
    assert any("quality of the recommended policy is unknown: no score is published" in line for line in lines)


def test_the_launch_is_said_with_what_it_cannot_say() -> None:
    launch = Deployment(
        engine="vLLM 0.32.0", image="vllm:v0", model="M", weights="fp8", gpus=2, replicas=4, spare=0,
        command=("serve", "M", "--x", "1"), port_flag="--port", everywhere="", config={"threshold": 0.9},
        unset=("num_loops=4",), differs={"--x 1": "GPUs of a replica"}, product="", untested=(), code={},
    )  # fmt: skip
    lines = text(info(deployment=launch, plan_toml='policy = "vllm"\nreplicas = 4\n'))
    at = lines.index("vLLM 0.32.0 (vllm:v0), fp8 weights, 2 GPUs a replica; 4 replicas, 0 of them spare:")
    assert lines[at - 2 : at] == ['policy = "vllm"', "replicas = 4"]
    assert lines[at + 1 : at + 4] == ["serve M --x 1 --port 8000", "with a file dllm.yaml of", "threshold: 0.9"]
    assert {"--x 1 GPUs of a replica", "No flag sets: num_loops=4."} <= set(lines[at:])
    assert "no released engine" not in lines[0]
    assert "No released engine is known to run this policy: the file is for dsim's own engine." in text(info())


def test_each_gpu_has_its_best_row_also_where_it_lost_and_why() -> None:
    ranked = (
        fleet("optimus", 4, 0.994, place="H100", device="H100", per_hour=14.0),
        fleet("lmdeploy-bd32", 5, 0.992, place="H100", device="H100", per_hour=17.5),
        fleet("optimus", 10, 0.991, place="A100-80GB", per_hour=20.0),
    )
    left = [
        lost("chunk", device="B200", price=6.0, about=5, dropped="by the pilot"),
        lost("optimus", device="B200", price=6.0, least=4, dropped="costs more than two others"),
        lost("optimus", device="L4", dropped="misses even on 64 replicas"),
    ]
    lines = text(info(*ranked, left_out=tuple(left)))
    at = lines.index("The best of each GPU")
    assert lines[at + 4 : at + 8] == [
        "H100 optimus 4 14.00 USD 99.4 % (99.3 to 99.5)",
        "A100-80GB optimus 10 20.00 USD 99.1 % (99.0 to 99.2)",
        "B200 optimus at least 4 at least 24.00 USD – costs more than two others",
        "L4 optimus – – – misses even on 64 replicas",
    ]
    assert "The best of each GPU" not in text(info(ranked[0], ranked[1]))
    spare = fleet("optimus", 4, 0.994, spare=1, gpus=5, per_hour=10.0)
    one = lost("optimus", device="B200", price=6.0, about=1, dropped="by the pilot")
    assert "B200 optimus about 2 about 12.00 USD – by the pilot" in text(info(spare, left_out=(one,)))


def test_replications_that_agree_show_no_interval_of_no_width() -> None:
    slo = "p90:ttft=2s"
    equal = fleet("optimus", 2, 0.0, values={slo: Spread(1.5, 1.5, 1.5)}, breaks_first=slo)
    lines = text(info(equal, criteria=(slo,), bounds={slo: 2.0}, share_criteria=(), risks=()))
    assert any("p90:ttft 1,500 ms in every replication" in line for line in lines)
    every = {MET: Spread(1.0, None, None)}
    assert any("100 % of 2,550 " in line for line in text(info(fleet("optimus", 4, 1.0, values=every))))


def test_a_spare_is_in_the_fleet_and_its_cost_and_the_slos_are_met_without_it() -> None:
    best = fleet("optimus", 4, 0.994, spare=1, gpus=5, per_hour=10.0)
    said = text(info(best))
    assert said[0].startswith("5 × A100-80GB, 10.00 USD an hour")
    assert said[1].endswith("on 5 A100-80GB, 1 replica spare. The target is met without the spare.")
    pairs = fleet("vllm", 1, 0.994, spare=2, gpus=6, gpus_per_replica=2)
    assert "6 A100-80GB, 2 a replica, 2 replicas spare" in text(info(pairs))[1]
    assert any("6 GPUs, 10.00 USD an hour" in line for line in text(info(best)))


@cases(
    "low high says",
    (0.42, 0.71, "it runs out after 5 to 9 months."),
    (0.3, 5.2, "it runs out after 3 to 63 months."),
    (0.02, 0.05, "it runs out after 7 to 19 days."),
    (0.0, 0.2, "it runs out after 0 to 11 weeks."),
    (0.0, 0.0, "there is no room to grow."),
)
def test_growth_says_how_long_the_fleet_lasts_and_what_the_horizon_costs(low: float, high: float, says: str) -> None:
    growth = Growth(text="30%/year", share=0.3, per="year", low=low, high=high, horizon=1.0)
    counts = enumerate((4, 4, 4, 5, 5))
    due = tuple(Due(years=k / 4, rate=12.0 + k, replicas=n, gpus=n, per_hour=2.0 * n) for k, n in counts)
    data = info(fleet("optimus", 4, 0.994, due=due, mean_cost=8.75), growth=growth)
    cost = "; over 1 year it costs 76,702.50 USD."  # 8.75 an hour, 24 x 365.25 hours
    rows = text(data)
    assert f"If traffic grows by 30 % a year, {says[:-1]}{cost}" in rows
    assert "optimus 4: 8.00 USD 4: 8.00 USD 4: 8.00 USD 5: 10.00 USD 5: 10.00 USD 76,702.50 USD" in rows


def test_clients_percentiles_are_those_of_a_replay() -> None:
    times = {"p50": 100.0, "p90": 0.0, "p95": 200.0, "p99": 300.0}
    assert "ttft 100 200 300" in text(info(fleet("vllm-diffusion", 4, 0.994, latency_ms={"ttft": times})))


def test_today_s_fleet_stands_beside_the_recommendation() -> None:
    def times(first: float) -> dict[str, Any]:
        return {m: {"p50": first, "p90": 0.0, "p95": 2 * first, "p99": 3 * first} for m in ("ttft", "e2el")}

    best = fleet("vllm-diffusion", 4, 0.994, latency_ms=times(100.0))
    data = info(best, today=fleet("vllm-diffusion:4", 5, 0.981, latency_ms=times(200.0)))
    rows = text(data)
    assert "ttft p95, ms 200 400" in rows
    assert "an hour 8.00 USD 10.00 USD" in rows
    assert "meet the SLOs 99.4 % (99.3 to 99.5) 98.1 % (98.0 to 98.2)" in rows
    assert data.missed_today == [MET]
    assert replace(data, today=best).missed_today == info(best).missed_today == []
    assert "What runs today" not in text(info(best))


def test_the_answer_says_where_it_rests_on_an_assumed_price_or_leaves_what_was_tested() -> None:
    said = answer(info(fleet("vllm-diffusion:12", 4, 0.994, assumed=0.93, untested=("max_num_seqs=12 is beyond 8",))))
    assert "; 93 % of its time is in large steps, whose cost is assumed, not published; max_num" in said
    assert said.endswith("; max_num_seqs=12 is beyond 8.")
    other = fleet("lmdeploy-bd32", 6, 0.991, implementation="j")
    said = answer(info(fleet("optimus", 4, 0.994), other))
    assert "; steps are priced by different implementations (i and j)" in said
    assert "of its time" not in answer(info())


def test_the_chart_has_a_bar_for_each_gpu_and_of_one_gpu_for_each_policy() -> None:
    def bars(data: Planned) -> dict[str, str]:
        [bar] = plan_page(data).chart.chart.data
        return dict(zip(bar["y"], bar["text"], strict=True))

    assert bars(info()) == {"optimus<br>4 × A100-80GB": "8.00", "lmdeploy-bd32<br>6 × A100-80GB": "12.00"}
    left = [
        lost("chunk", device="B200", price=6.0, about=5, dropped="by the pilot"),
        lost("optimus", device="L4", dropped="misses even on 64 replicas"),
    ]
    assert bars(info(left_out=tuple(left))) == {"4 × A100-80GB": "8.00", "about 5 × B200": "30.00"}
