"""A gateway's log with start, first token and end is a measured run."""

import pytest

import dsim
from dsim.cli.python import import_run
from dsim.comparison.clients.client_file import read_client
from dsim.engine.spec import parse
from dsim.planner.candidates import candidates_of
from dsim.profiler.profile import load
from dsim.results.world import World
from dsim.sim.setting import Setting
from dsim.sim.unknown import warnings_of
from dsim.traces import load as load_trace

from ..checks import cases, refused
from ..traces.files import save, spend

OWN = "arrival=at,first=first,end=end,input=in,output=out"
CSV = "at,first,end,in,out\n10,10.25,11.25,20,11\n12,12.5,13,30,6\n"


SPEND = [
    spend("00.000", "00.300", "01.300", 11),
    spend("00.500", None, "00.600", 0, status="failure"),
    spend("00.700", None, "00.800", 0, call_type="aembedding", model="embed"),
    spend("02.000", "03.900", "03.900", 40, model="other"),
    spend("03.000", "03.500", "04.500", 11),
]
GEMMA = [spend("00.000", "00.300", "01.300", 11, model="hosted_vllm/google/diffusiongemma-26B-A4B-it")] * 3


def test_a_log_with_failures_is_compared_with_its_own_replay() -> None:
    rows = [spend("00.000", None, "00.100", 0, status="failure"), *SPEND, spend("03.600", "03.900", "04.500", 7)]
    path, one = save([rows], "spend.json"), "model=sdar-8b"
    twin = dsim.replay(path, policy="chunk:4", only=one, slos=["ttft=0.4s"])
    assert load_trace(path, only=one).notes.num_rows == 5
    # Of five arrivals two answers began within 0.4 s: failures miss.
    measured = import_run(path, only=one, policy="chunk:4", slos=["ttft=0.4s"])
    assert measured.policies[0].slo_attainment == pytest.approx(0.4)
    (cell,) = dsim.compare(twin, measured).cells
    assert cell.left_out == {"not completed in both": 0, "not arrived in both": 2}
    assert (cell.num_both, cell.metrics["ttft"].measured["p50"]) == (3, pytest.approx(300.0))


def test_a_plan_takes_the_profile_of_the_log_s_model() -> None:
    world = World(str(save([GEMMA], "spend.json")), slos=("ttft=2s",))
    candidates, _ = candidates_of(world, [], None, lambda profile: None, as_given=True)
    assert {candidate.profile.name for candidate in candidates} == {"h100-diffusiongemma-fp8"}


def test_a_log_of_another_model_than_the_profile_s_is_warned_of() -> None:
    path = save([GEMMA], "spend.json")
    named = load_trace(path).extras["model"]
    (line,) = warnings_of(Setting(parse("chunk:4"), load("a100-sdar-8b")), named)
    assert line.startswith(
        f"the requests are of {GEMMA[0]['model']} in the log, and a100-sdar-8b is of SDAR-8B: expected a "
        "profile of their model (shipped: h100-diffusiongemma-fp8, "
    )
    assert warnings_of(Setting(parse("vllm-diffusion:8"), load("h100-diffusiongemma-fp8")), named) == []
    with pytest.warns(UserWarning, match="a100-sdar-8b is of SDAR-8B: expected a profile of their model"):
        dsim.replay(path, policy="chunk:4", profile="a100-sdar-8b")


def test_any_log_is_read_by_its_own_columns() -> None:
    path = save(CSV, "access.csv")
    log = read_client(path, OWN)
    assert [(s.first - s.sent, s.last - s.sent, s.input_length, s.output_length) for s in log.requests] == [
        (0.25, 1.25, 20, 11), (0.5, 1.0, 30, 6),
    ]  # fmt: skip
    assert read_client(path, OWN, time_unit="ms").requests[0].first == 0.01025


@cases(
    "text columns only says",
    (CSV, None, None, "keys at, first, end, in, out are of no known trace, expected one of: "),
    (CSV, "arrival=at,first=first,input=in,output=out", None, "lacks the times at which answers began and ended"),
    (CSV.replace("12.5", "9"), OWN, None, "csv:3: first is -3 s and end 1 s after at, expected the first"),
    (CSV, OWN, "model=a", "no column model (--only), expected one of: at, first, end, in, out"),
    (CSV, OWN, "in=21", "no row is of in 21, expected one of 20: 1, 30: 1"),
)
def test_a_wrong_log_is_told_what_was_expected(text: str, columns: str | None, only: str | None, says: str) -> None:
    path = save(text, "access.csv")
    with refused(says=says):
        read_client(path, columns, only)


@cases("name", "startTime", "prompt_tokens")
def test_a_number_of_hundreds_of_digits_is_refused_by_name(name: str) -> None:
    path = save([[SPEND[0] | {name: 10**400}]], "spend.json")
    with refused(f"{name} is 1000"):
        read_client(path, None, None)
