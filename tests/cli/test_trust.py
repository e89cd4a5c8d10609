"""Data never loads code: every format that dsim reads names a file of code here, and the code never runs."""

import json
import re
import shutil
from pathlib import Path

import pytest

import dsim as package
from dsim.comparison.comparison import compare_runs
from dsim.engine.allowed_code import NO_CODE, allowed, check_allowed
from dsim.engine.errors import CodeError
from dsim.profiler.profile import SHIPPED
from dsim.results.run import read_run
from dsim.results.world import World, named_code

from ..checks import cases, refused
from ..logged import write_log
from ..worlds import toy_profile, toy_trace
from .command import dsim, rows, succeed

SPEC = "theirs.py:POLICY"
CODE = """
from pathlib import Path
from dsim.engine.spec import parse
Path(__file__).with_name("ran").touch()
POLICY = parse("chunk:8")
"""
SMALL = "small.jsonl --rate 2"


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("theirs.py").write_text(CODE)
    Path("small.jsonl").write_text(rows(6))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, made under the policy of a file of its owner's."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "small.jsonl").write_text(rows(6))
    (folder / "theirs.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed("replay small.jsonl --policy", SPEC, "-o", "run")
    return folder / "run"


def has_run() -> bool:
    """Whether the code has run, of whichever copy."""
    return any(Path().rglob("ran"))


def refusal(command: str) -> str:
    """The line that refuses the code, which has not run."""
    line = dsim(command).refusal
    assert not has_run()
    assert re.search(
        r"asks for code in \S*theirs\.py, expected .*: add --allow-code \S*theirs\.py if you trust it", line
    )
    return line


POLICY_TOML = f'policy = "{SPEC}"\n'
SLO = "--slo ttft=2s"
SWEEP = '[base]\ntrace = "small.jsonl"\n'
GRID = f'{SWEEP}[grid]\npolicy = ["ar", "{SPEC}"]\n'
SWEPT = "sweep {} -o swept"
SCORES, SCORED = f"policy,score,baseline\n{SPEC},0.9,1\n", f"{SLO} --min-quality 90% --quality-table"
# By name a command that reads a file ("{}"), the file's text, and what the refusal begins with.
BRINGS_CODE = {
    **{words.split()[0]: (f"{words} {{}}", POLICY_TOML, "policy '{}' asks for code in") for words in (
        f"replay {SMALL} --policy", f"capacity small.jsonl {SLO} --policy", f"plan {SMALL} {SLO} --policy",
        f"tune small.jsonl {SLO} --policy", "serve --twin a100-sdar-8b --policy", "live small.jsonl --policy",
        "validate -o validated --profile a100-sdar-8b --policy", "policies",
    )},
    "a sweep's base": (SWEPT, f'{SWEEP}policy = "{SPEC}"\n[grid]\nseed = [0, 1]\n', "{}: cell "),
    "a sweep's grid": (SWEPT, GRID, "{}: cell "),
    "a sweep's policy file": (SWEPT, f'{SWEEP}[grid]\npolicy = ["mine.toml"]\n', "{}: cell "),
    "a space": (f"tune small.jsonl {SLO} --space {{}}", f'policy = ["optimus", "{SPEC}"]\n', "{}: "),
    "tune's quality table": (f"tune small.jsonl {SCORED} {{}}", SCORES, "{}: "),
    "plan's quality table": (f"plan {SMALL} {SCORED} {{}}", SCORES, "{}: "),
}  # fmt: skip


@cases("name", *BRINGS_CODE)
def test_a_file_does_not_bring_its_code_with_it(name: str) -> None:
    words, text, begins = BRINGS_CODE[name]
    file = "given.csv" if text is SCORES else "given.toml"
    Path("mine.toml").write_text(POLICY_TOML)
    Path(file).write_text(text)
    assert refusal(words.format(file)).startswith(begins.format(file))
    assert not Path("swept").exists()


def test_a_sweep_cannot_allow_its_own_code() -> None:
    Path("sweep.toml").write_text(GRID.replace("[base]", '[base]\nallow_code = ["theirs.py"]'))
    assert "there is no field 'allow_code'" in dsim("sweep sweep.toml -o swept").refusal


def test_a_run_does_not_bring_its_code_with_it(recorded: Path) -> None:
    for side in ("a", "b"):
        shutil.copytree(recorded, side)
    assert refusal("compare a b").startswith("a: ")
    assert not has_run()


def test_a_step_log_names_shipped_presets_only() -> None:
    profile = toy_profile()
    write_log(Path("log.jsonl"), "chunk:2,block_length=4", profile, toy_trace([0.0, 0.1], [8, 8], [8, 8]), preset=SPEC)
    for command in ("replay log.jsonl --as-logged", "profile --from-log log.jsonl -o p.json"):
        dsim(command)
        assert not has_run()


def test_a_profile_a_trace_and_a_models_folder_name_no_code() -> None:
    found = json.loads((SHIPPED / "a100-sdar-8b.json").read_text())
    Path("profile.json").write_text(json.dumps(found | {"name": SPEC}))
    Path("trace.jsonl").write_text(rows(2).replace("{", f'{{"policy": "{SPEC}", "model": "{SPEC}", ', 1))
    Path("model").mkdir()
    auto = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    Path("model/config.json").write_text(json.dumps({"architectures": ["Theirs"], "auto_map": auto}))
    shutil.copy("theirs.py", "model")
    dsim("replay trace.jsonl --profile profile.json")
    dsim("model model")
    assert not has_run()


def test_the_flag_allows_what_was_refused(recorded: Path) -> None:
    Path("given.toml").write_text(POLICY_TOML)
    Path("sweep.toml").write_text(GRID)
    shutil.copytree(recorded, "a")
    for command in (
        f"replay {SMALL} --policy given.toml", "compare a a", "policies given.toml",
        "sweep sweep.toml -o swept --jobs 1",
    ):  # fmt: skip
        ran = dsim(command, "--allow-code ./theirs.py")
        assert (ran.code, "asks for code" in ran.err) == (0, False), ran
    # A folder goes on where it was once the command names the file again.
    Path("ran").unlink()
    refusal("sweep sweep.toml -o swept")


def test_a_policy_on_the_command_line_is_named_by_it() -> None:
    succeed(f"replay {SMALL} --policy {SPEC} --policy {SPEC}@a100-sdar-8b")
    assert has_run()


def test_another_processs_cells_load_what_this_one_allowed() -> None:
    done = package.sweep(
        {"base": {"trace": "small.jsonl"}, "grid": {"policy": ["ar", SPEC]}}, jobs=2, allow_code=["theirs.py"]
    )
    assert done.num_failed == 0


def test_what_a_caller_hands_over_is_named_and_what_is_in_a_dictionary_or_a_file_is_not() -> None:
    assert package.parse_policy(SPEC).block_length == 32
    Path("given.toml").write_text(POLICY_TOML)
    for call in (
        lambda: package.replay("small.jsonl", "given.toml"),
        lambda: package.sweep({"base": {"trace": "small.jsonl"}, "grid": {"policy": [SPEC]}}),
        lambda: package.tune("small.jsonl", slos=["ttft=2s"], space={"policy": [SPEC]}),
        lambda: package.parse_policy("given.toml"),
        lambda: World("small.jsonl", SPEC).parsed_policy(),
    ):
        with refused(r"theirs\.py", CodeError):
            call()
    assert package.parse_policy("given.toml", ["theirs.py"]).name == "given.toml"
    assert package.replay("small.jsonl", SPEC, rate=2).policies
    assert package.replay("small.jsonl", package.parse_policy(SPEC), rate=2).policies


def test_a_run_is_compared_in_python_by_what_it_was_read_with(recorded: Path) -> None:
    run = read_run(recorded)
    with refused(r"theirs\.py", CodeError):
        compare_runs([(run, run)], lambda _: toy_profile())
    run = read_run(recorded, allowed(["theirs.py"]))
    assert compare_runs([(run, run)], lambda _: toy_profile()).cells


def test_code_is_allowed_by_where_a_path_leads_not_by_how_it_is_written() -> None:
    Path("mine").mkdir()
    Path("mine/theirs.py").write_text(CODE)
    Path("link.py").symlink_to(Path("mine/theirs.py"))
    allow = named_code(["link.py:POLICY:4@a100-sdar-8b,calm=2", "given.toml", "ar"])
    assert allow == {str(Path("mine/theirs.py").resolve())}
    check_allowed("./mine/../mine/theirs.py", allow, "it")
    for path in ("theirs.py", "mine/other.py"):
        with refused(kind=CodeError, says=path):
            check_allowed(path, allow, "it")
    assert named_code(["given.toml"]) == NO_CODE


def test_no_name_of_a_file_controls_the_terminal() -> None:
    bad = "\x1b]0;owned\x07\x1b[31m\u202e"
    trace = Path(f"{bad}.jsonl")
    trace.write_text(json.dumps({"arrival": 0, "input_length": 4, "output_length": 4, "slo_class": bad}) + "\n")
    replay = ["replay", trace, "--policy", "ar"]
    for words in (replay, ["trace", "info", trace], [*replay, "--slo", f"{bad}/ttft=1"], ["replay", bad]):
        ran = dsim(words)
        assert "\\x1b]0;owned\\x07" in ran.out + ran.err
        assert not set(ran.out + ran.err) & set(bad[0] + bad[-1])
