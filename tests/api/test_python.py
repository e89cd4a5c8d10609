"""`import dsim` for people who work with pandas: frames in, frames and figures out, and signatures that say it all."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import dsim
from dsim.cli.declared import words_of
from dsim.cli.objects import profile_name, spec_of, trace_name
from dsim.cli.replay_question import ReplayQuestion
from dsim.cli.tune_question import TuneQuestion
from dsim.engine.errors import DsimError
from dsim.planner.candidates import PlanCandidate
from dsim.report.chart import script_json
from dsim.report.page import Figure
from dsim.report.result import Result
from dsim.report.run_page import RunResult, run_page
from dsim.results.on_device import LiveSetting
from dsim.results.world import World
from dsim.traces import load

from ..checks import cases, refused

FUNCTIONS = {name: getattr(dsim, name) for name in dsim.__all__ if not name.startswith("_")}


@pytest.fixture(scope="module")
def requests() -> pd.DataFrame:
    return dsim.load_trace("azure-conv").to_frame().head(60)


@pytest.fixture(scope="module")
def run(requests: pd.DataFrame) -> RunResult:
    return dsim.replay(requests, ["ar", "chunk:8"], slos="ttft=2s")


def test_a_frame_a_trace_and_a_path_are_the_same_requests(requests: pd.DataFrame, run: RunResult) -> None:
    path = Path("mine.csv")
    requests.to_csv(path, index=False)
    for given in (path, str(path), load(requests)):
        assert dsim.replay(given, ["ar", "chunk:8"], slos="ttft=2s").policies == run.policies
    assert run.trace.name == "frame"


def test_replays_in_other_processes_find_a_frames_requests_and_a_profile_by_name(requests: pd.DataFrame) -> None:
    for trace in (load(requests), load("mooncake-conv").head(50)):
        name = trace_name(trace, {})
        assert name == trace_name(trace, {})
        back = load(name)
        assert (back.name, back.extras) == (trace.name, trace.extras)
        for column in ("arrival", "input_length", "output_length"):
            assert np.array_equal(getattr(back, column), getattr(trace, column)), column
    profile = replace(dsim.load_profile("a100-sdar-8b"), frontend=0.5)
    assert dsim.load_profile(profile_name(profile)) == profile
    policies = [dsim.parse_policy("ar"), "chunk:8"]
    swept = dsim.sweep({"base": {"trace": requests, "profile": profile}, "grid": {"policy": policies}})
    assert swept.to_frame()["policy"].tolist() == ["ar", "chunk:8"]
    least = swept.to_frame()["ttft_ms_p50"].min()
    assert least > 500  # the front end's half second, which the shipped profile lacks


def test_a_policy_that_was_changed_after_it_was_parsed_has_no_spec() -> None:
    policy = dsim.parse_policy("chunk:8")
    assert spec_of(policy) == "chunk:8"
    with refused(r"policy chunk:8 was changed after it was parsed, expected the SPEC"):
        spec_of(replace(policy, batching=dsim.parse_policy("chunk:8,max_batch=4").batching))


def test_options_that_read_a_trace_are_for_what_is_still_to_be_read(requests: pd.DataFrame) -> None:
    own = requests.rename(columns={"arrival": "t", "input_length": "p", "output_length": "o"})
    assert dsim.replay(own, "ar", columns="arrival=t,input=p,output=o").policies[0].completed == len(requests)
    with refused(r"columns is 'arrival=t' and the trace was read before: give it to load_trace"):
        dsim.replay(load(requests), "ar", columns="arrival=t")


def test_frames_of_a_run_hold_what_its_files_hold(requests: pd.DataFrame, run: RunResult) -> None:
    written = dsim.replay(requests, ["ar", "chunk:8"], slos="ttft=2s", out="run")
    held = pd.read_parquet(Path("run/requests.parquet"))
    for frame in (run.requests, written.requests):
        assert list(frame.columns) == list(held.columns)
        pd.testing.assert_frame_equal(frame, held, check_categorical=False, check_dtype=False)
    steps = pd.read_parquet(Path("run/steps.parquet"))
    for frame in (run.steps, written.steps):
        assert len(frame.columns) > 20
        pd.testing.assert_frame_equal(frame, steps[list(frame.columns)], check_categorical=False, check_dtype=False)
    table = run.to_frame().set_index("policy")
    for summary in run.policies:
        row = table.loc[summary.policy]
        assert row["ttft_ms_p90"] == summary.ttft_ms.p90
        assert row["ttft=2s attainment"] == summary.slos[0].attainment
    # And a run's requests are a trace again.
    again = dsim.load_trace(run.requests[run.requests["policy"] == "ar"])
    assert np.array_equal(again.arrival, requests["arrival"])


def test_plot_draws_the_very_figures_of_the_report(run: RunResult) -> None:
    page = run_page(run.run)
    assert [figure.name for figure in run.figures()] == [figure.name for figure in page.figures]
    assert ("Chart(" in str(run.figures()), " at 0x" in str(run.figures())) == (True, False)
    for figure in page.figures:
        drawn = run.plot(figure.name)
        assert isinstance(drawn, go.Figure)
        assert drawn.layout.title.text == figure.title
        assert drawn.layout.paper_bgcolor == "white"  # dark text is read in a notebook's dark theme, too
        assert same(drawn, figure), figure.name
    assert run.plot().layout.title.text == page.figures[0].title
    with refused(r"no figure 'cdf-tft' \(did you mean cdf-ttft\?\), expected one of: cdf-ttft, "):
        run.plot("cdf-tft")


def same(drawn: go.Figure, figure: Figure) -> bool:
    """Whether each trace has the report's values, to the digits that a page has."""
    for trace, wanted in zip(drawn.data, figure.chart.data, strict=True):
        for axis in ("x", "y"):
            if script_json(list(trace[axis])) != script_json(list(wanted[axis])):
                return False
    return True


def test_a_sweeps_figures_are_its_reports(requests: pd.DataFrame) -> None:
    swept = dsim.sweep({"base": {"trace": requests, "policy": "ar"}, "grid": {"rate": [1, 2]}})
    assert swept.plot("curve-output_throughput").data[0]["x"] == (1, 2)
    assert swept.to_frame()["rate"].tolist() == [1.0, 2.0]


@cases("name", *FUNCTIONS)
def test_every_argument_is_in_the_signature_and_an_unknown_one_names_the_nearest(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    assert function.__name__ == name
    assert inspect.getdoc(function)
    kinds = {parameter.kind for parameter in parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
    last = list(parameters)[-1]
    with pytest.raises(TypeError, match=rf"^dsim\.{name}\(\) has no argument '{last}x' \(did you mean {last}\?\)$"):
        function(**{f"{last}x": 1})


def test_a_questions_words_are_a_shells_also_of_numpys_numbers() -> None:
    question = TuneQuestion("azure-conv", rate=np.float64(4), num_requests=np.int64(3), slos="ttft=2s")  # type: ignore[arg-type]
    words = ["--slo", "ttft=2s", "--rate", "4.0", "--num-requests", "3"]
    assert words_of(question, ["rate", "num_requests", "slos"]) == words


def test_a_replay_takes_every_field_of_a_world() -> None:
    own = {f.name for f in fields(World)} - {"variation", "slower", "profile_object"}
    assert own <= {f.name for f in fields(ReplayQuestion)}


def test_a_written_run_is_read_back_as_it_was_returned(run: RunResult) -> None:
    back = dsim.load_run(run.run.folder)
    assert back.to_json() == RunResult.from_json(run.to_json()).to_json() == run.to_json()
    pd.testing.assert_frame_equal(back.requests, run.requests, check_categorical=False, check_dtype=False)
    pd.testing.assert_frame_equal(back.steps, run.steps)
    assert str(back).splitlines()[0] == str(run).splitlines()[0]


@pytest.mark.slow
def test_runs_are_compared_as_objects_and_as_folders(requests: pd.DataFrame, run: RunResult) -> None:
    other = dsim.replay(requests, ["ar", "chunk:8"], slos="ttft=2s", seed=1, out="other")
    found = dsim.compare(run, other, bounds="mean:ttft=0.001%")
    assert found.to_json()["cells"] == dsim.compare(run.run.folder, Path("other")).to_json()["cells"]
    table = found.to_frame().set_index(["policy", "metric"])
    cell = found.cells[0]
    assert table.loc[(cell.policy, "ttft"), "predicted_p90"] == cell.metrics["ttft"].predicted["p90"]
    assert table.loc[(cell.policy, "ttft"), "error_p90"] == cell.metrics["ttft"].error["p90"]
    assert [judged.met for judged in found.bounds] == [True, False]
    assert isinstance(found.plot(), go.Figure)
    with refused("1 predicted and 2 measured runs are given, expected pairs"):
        dsim.compare(run, [other, other])


def test_a_load_generators_file_becomes_a_run_next_to_the_prediction_of_its_trace() -> None:
    files = Path(__file__).parents[1] / "comparison" / "clients"
    asked = dsim.load_trace(files / "vllm_trace.jsonl").to_frame()
    measured = dsim.import_run(files / "vllm_bench.json", trace=asked, policy="ar", slos="ttft=110ms")
    assert measured.requests["lateness"].notna().all()
    assert measured.to_frame()["completed"].tolist() == [8]
    assert {"cdf-ttft", "cdf-e2el"} <= {figure.name for figure in measured.figures()}
    assert "queue" not in {figure.name for figure in measured.figures()}  # which nobody measured
    assert dsim.compare(dsim.replay(asked, "ar"), measured).pairs[0].measured.driver == "client"
    with pytest.warns(UserWarning, match="requests have prompt lengths other than the trace's") as warned:
        dsim.import_run(files / "vllm_bench.json", trace=asked.assign(input_length=asked["input_length"] + 1))
    assert warned[0].filename == __file__


def test_one_price_is_of_every_gpu_also_where_policies_name_their_own_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(world: World, candidates: list[PlanCandidate], *of: Any, **how: Any) -> None:
        asked[:] = candidates
        raise DsimError("enough")

    monkeypatch.setattr("dsim.planner.plan.plan", noted)
    placed = [f"vllm-diffusion@{name}" for name in ("h200x2-diffusiongemma/vllm", "h100-diffusiongemma-fp8")]
    for price, seen in ((3.5, [3.5, 3.5]), ({"h100-diffusiongemma-fp8": 2.0}, [None, 2.0])):
        with refused("enough"):
            dsim.plan("azure-conv", ["ttft=1s"], policies=placed, gpu_hour=price, as_given=True)
        assert [candidate.price for candidate in asked] == seen


def test_a_frame_is_served_live() -> None:
    few = pd.DataFrame({"arrival": [0.0, 0.01, 0.02], "input_length": [16, 16, 16], "output_length": [8, 8, 8]})
    measured = dsim.run_live(few, "lmdeploy-bd32", slos="ttft=10s")
    assert (measured.driver, measured.requests["status"].tolist()) == ("live", ["completed"] * 3)
    assert measured.requests["input_length"].tolist() == [16, 16, 16]


def test_no_function_is_called_as_a_folder_which_importing_it_would_put_in_its_place() -> None:
    root = Path(dsim.__file__).parent
    assert not [name for name in FUNCTIONS if (root / name).exists() or (root / f"{name}.py").exists()]


def test_a_profile_from_a_data_sheet_prices_a_replay(requests: pd.DataFrame) -> None:
    made = dsim.profile("SDAR-8B", roofline="h200", yields="a100-sdar-8b", out="mine.json")
    assert dsim.load_profile(Path("mine.json")) == made.profile
    assert "H200" in str(made).splitlines()[0]
    assert len(made.to_frame()) == 0
    with refused("there is no figure None, expected one of: none: there is nothing to draw"):
        made.plot()
    slow, fast = (dsim.replay(requests, "ar", profile=p) for p in ("a100-sdar-8b", made.profile))
    assert fast.policies[0].e2el_ms.p50 < slow.policies[0].e2el_ms.p50
    with refused(r"mine\.json exists: choose another name, or pass force"):
        dsim.profile("SDAR-8B", roofline="h200", out="mine.json")


def test_a_step_log_becomes_a_profile_with_its_points_and_figures() -> None:
    whole = Path(dsim.__file__).parent / "examples" / "steplog.jsonl"
    log = Path("steps.jsonl")
    log.write_text("".join(whole.read_text().splitlines(keepends=True)[:1500]))
    made = dsim.profile(from_log=log)
    table = made.to_frame()
    assert made.profile.name == "steps"
    assert len(table) == len(made.evidence)
    assert abs(table["fitted"] / table["latency"] - 1).median() < 0.05
    assert isinstance(made.plot(), go.Figure)
    with refused("nothing to profile: expected model M, from_log FILE, or roofline GPU"):
        dsim.profile()


def test_a_validation_takes_frames_and_objects_by_name(requests: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(r"loads is 1\.5, expected a share of capacity below 1, a number of "):
        dsim.validate(Path("out"), profile="a100-sdar-8b", loads=[1.5])
    asked: dict[str, Any] = {}

    def noted(out: Path, base: World, live: LiveSetting, **how: Any) -> None:
        asked.update(how, base=base, profile=live.profile)
        raise DsimError("enough")

    monkeypatch.setattr("dsim.planner.validation.validate", noted)
    profile = replace(dsim.load_profile("a100-sdar-8b"), name="mine")
    with refused("enough"):
        dsim.validate(Path("out"), trace=requests, profile=profile, policies=dsim.parse_policy("ar"), seconds=1.0)
    assert np.array_equal(load(asked["base"].trace).arrival, requests["arrival"])
    assert (asked["profile"], asked["policies"]) == (profile, ["ar"])


def test_no_policy_is_no_default() -> None:
    with refused("no policy is given, expected at least one"):
        dsim.replay("azure-conv", [])


MACHINERY = {"from_info", "open", "columns", "temporary", "failure"}  # of the command that made a run


def test_the_page_says_what_each_kind_of_result_has() -> None:
    text = (Path(dsim.__file__).parent / "docs" / "python.md").read_text()
    for cls in (Result, RunResult):
        for name in vars(cls):
            if not name.startswith("_") and name not in MACHINERY:
                assert f"`.{name}" in text, name
