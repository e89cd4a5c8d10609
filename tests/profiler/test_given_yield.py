"""A yield that the user gives: every form says the same thing of the same steps, and a wrong one is one line."""

from pathlib import Path

import pytest

from dsim.engine.errors import DsimError, ProfileError
from dsim.engine.spec import parse
from dsim.planner.contents import asked_of
from dsim.profiler.calibrate import mean_yield
from dsim.profiler.canvas_law import mean_forwards
from dsim.profiler.given_yield import COUNTERS, given_yield, with_yield
from dsim.profiler.known import calibrated_under
from dsim.profiler.profile import load
from dsim.research.calibration.calibrated import published_mean
from dsim.results.world import World

from ..checks import cases
from ..cli.command import dsim

SDAR = load("a100-sdar-8b")
LOG = Path(__file__).parents[2] / "examples" / "steplog.jsonl"


@cases("text mean", ("3.2", 3.2), ("per-forward:2.2", 8 / (8 / 2.2 - 1)))
def test_each_form_gives_steps_of_the_policys_block_and_threshold_that_commit_as_much(text: str, mean: float) -> None:
    [model] = with_yield(SDAR, text, parse("lmdeploy-bd32:8,threshold=0.7")).commits
    assert (model.workload, model.block_length, model.threshold) == ("given", 8, 0.7)
    assert mean_yield(model) == pytest.approx(mean, rel=0.02)
    assert text in model.source
    assert with_yield(SDAR, text, parse("ar")) == SDAR


def test_a_table_gives_a_model_for_each_threshold(tmp_path: Path) -> None:
    table = tmp_path / "yields.csv"
    table.write_text("threshold,yield,block_length\n0.9,2.2,\n0.8,3.2,16\n")
    models = given_yield(str(table), 8, 0.9)
    assert [(m.threshold, m.block_length) for m in models] == [(0.9, 8), (0.8, 16)]
    assert [mean_yield(m) for m in models] == pytest.approx([2.2, 3.2], rel=0.02)
    world = World("azure-conv", policy="optimus:4,block_length=8,threshold=0.7", yields=str(table))
    with pytest.raises(ProfileError, match=r"models of threshold 0\.9, 0\.8; this run asks for 0\.7"):
        world.simulate(world.requests().head(1))


@pytest.mark.slow
def test_a_log_gives_the_model_that_fits_it() -> None:
    [model] = given_yield(str(LOG), 32, 0.9)
    assert model.source.startswith("--yield steplog.jsonl, a step log of ")
    assert 1.0 < mean_yield(model) < 32.0


@cases(
    "text said",
    ("0.5", "0.5 tokens a denoise step, expected at least 1 and fewer than the 32 of a block"),
    ("nan", "yield is nan, expected a number above 0"),
    ("per-forward:40", "inf tokens a denoise step"),
    ("per-token:3", "yield is per-token:3, expected tokens a denoise step (3.2), per-forward:X"),
    ("nothing.csv", "nothing.csv: cannot be read: No such file"),
)
def test_a_wrong_yield_is_one_line_with_what_was_given(text: str, said: str) -> None:
    assert said in dsim("replay", "azure-conv", "--num-requests", 2, "--yield", text).refusal


@cases(
    "text said",
    ("threshold,tokens\n0.9,2\n", "has columns threshold, tokens, expected threshold, yield"),
    ("threshold,yield\n", "holds no rows"),
    ("threshold,yield\n1.5,2\n", "yields.csv:2: threshold is 1.5, expected at most 1"),
    ("threshold,yield\n0.9,2\n0.9,4\n", "yields.csv:3: threshold 0.9 is given a second time, expected each once"),
)
def test_a_wrong_table_names_its_line(tmp_path: Path, text: str, said: str) -> None:
    table = tmp_path / "yields.csv"
    table.write_text(text)
    with pytest.raises(ProfileError, match=said.replace(".", r"\.")):
        given_yield(str(table), 32, 0.9)


@cases(
    "name spec text forwards",
    ("h20-llada2.1-mini-sglang", "sglang-joint,threshold=0.5", "per-forward:12.32", 32 / 12.32),
    ("h20-llada2.1-mini-sglang", "sglang-joint,threshold=0.5", "1.83", 32 / 1.83),
    ("h200x2-diffusiongemma/vllm", "vllm-diffusion", "per-forward:16", 256 / 16 - 1),
    ("h200x2-diffusiongemma/vllm", "vllm-diffusion", "16", 256 / 16),
)
def test_a_policy_that_commits_by_a_law_takes_the_forwards_of_the_yield(
    name: str, spec: str, text: str, forwards: float
) -> None:
    held = load(name)
    [law] = with_yield(held, text, parse(spec)).canvas_laws
    assert mean_forwards(law) == pytest.approx(forwards, rel=0.01)
    assert (law.workload, law.request_spread) == ("given", held.canvas_laws[0].request_spread)
    with pytest.raises(ProfileError, match="takes its number of forwards from a law: expected tokens a forward"):
        with_yield(held, "per-token:15", parse(spec))
    with pytest.raises(ProfileError, match=r"yield is 300, .* forwards for \d+ tokens, expected 2 to"):
        with_yield(held, "300", parse(spec))


def test_a_servers_counters_are_a_yield_of_canvases(tmp_path: Path) -> None:
    def page(name: str, steps: int, tokens: int) -> str:
        path = tmp_path / name
        lines = [f'{n}{{engine="{k}"}} {v / 2}' for n, v in zip(COUNTERS, (steps, tokens), strict=True) for k in (0, 1)]
        path.write_text("\n".join([*lines, ""]))
        return str(path)

    # 250 canvases of 256 in 3,900 forwards: 15.6 each, of which one writes its KV. Before: 100 other forwards.
    before, after = page("before", 100, 256), page("after", 4000, 256 * 251)
    gemma, policy = load("h100-diffusiongemma-fp8"), parse("vllm-diffusion")
    [law] = with_yield(gemma, f"{before},{after}", policy).canvas_laws
    assert mean_forwards(law) == pytest.approx(14.6, rel=0.01)
    assert f"{before},{after}" in law.source
    [one] = with_yield(gemma, page("one", 4000, 64000), policy).canvas_laws
    assert mean_forwards(one) == pytest.approx(15.0, rel=0.01)
    world = World("azure-conv", policy="vllm-diffusion", profile=gemma.name, yields=f"{before},{after}")
    before_edit = asked_of(world)
    assert world.with_files(lambda path: Path(path).name).yields == "before,after"
    page("before", 101, 256)
    assert asked_of(world) != before_edit
    with pytest.raises(ProfileError, match=f"{COUNTERS[0]} counts 0 and .* 0, expected both above 0"):
        with_yield(gemma, f"{after},{after}", policy)
    (tmp_path / "odd").write_text("{{")
    with pytest.raises(DsimError, match="odd: cannot be read as Prometheus metrics"):
        with_yield(gemma, str(tmp_path / "odd"), policy)


def test_a_workload_beside_a_yield_is_refused() -> None:
    with pytest.raises(DsimError, match=r"workload is lmsys and a yield of 3\.2 is given, expected one of them"):
        World("azure-conv", workload="lmsys", yields="3.2")


def test_a_calibrated_profile_says_its_yield() -> None:
    under = calibrated_under(SDAR)
    assert under is not None
    assert (under.tokens, under.workload) == (2.28, "sharegpt-focus")
    assert under.tokens == published_mean("SDAR-8B", "sharegpt-focus", 0.9)
    assert calibrated_under(load("h100-sdar-8b")) is None


def test_capacity_tune_and_plan_take_a_yield() -> None:
    slo = ("--slo", "p90:ttft=1s")
    for command in (("capacity", *slo), ("tune", *slo), ("plan", *slo, "--policy", "chunk")):
        assert "fewer than the 32 of a block" in dsim(command[0], "azure-conv", *command[1:], "--yield", "33").refusal
