"""benchmarks/gpu.py runs a stage's parts, and benchmarks/merge_gpu.py writes what came back; neither needs a GPU."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsim.benchmarks import gpu
from dsim.benchmarks.step_floors import Watch, floors
from dsim.benchmarks.step_shapes import Shape
from dsim.live.config import Settings
from dsim.live.weights import config_of
from dsim.profiler.clocks import Clocks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = ("kernels", "live", "validation")


def place(folder: Path, seconds: float) -> gpu.Place:
    at = gpu.Place(folder, "tried", seconds, "name")
    at.folder.mkdir()
    return at


def part(name: str, code: str, seconds: float = 60.0, **more: object) -> gpu.Part:
    return gpu.Part(name, [sys.executable, "-c", code], seconds, **more)  # type: ignore[arg-type]


def test_parts_run_at_the_same_time_wait_for_others_and_are_ended_when_their_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CORES", 2)
    said = Path("tried/slow.txt")
    # The clock stands still until the slow part has begun.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 100.0 * (said.exists() and said.stat().st_size > 0))
    monkeypatch.setattr(gpu, "time", clock)
    meets = """
import pathlib, time
pathlib.Path("{0}/{1}").touch()
while not pathlib.Path("{0}/{2}").exists():
    time.sleep(0.01)
"""
    ended = gpu.run(
        [
            part("one", meets.format(tmp_path, "a", "b"), cores=1),
            part("other", meets.format(tmp_path, "b", "a"), cores=1),
            part("wrong", "raise SystemExit(3)", after=("one",)),
            part("never", "", after=("wrong",)),
            part("doubts", "raise SystemExit(1)", fine=(0, 1), after=("one", "other")),
            part("slow", "import time; print('so far', flush=True); time.sleep(600)", after=("doubts",)),
        ],
        place(tmp_path, 300.0),
    )
    found = {how.part.name: how.how for how in ended}
    assert found == {
        "one": "ok", "other": "ok", "wrong": "FAILED", "never": "not run", "doubts": "ok", "slow": "out of time",
    }  # fmt: skip
    assert Path("tried/slow.txt").read_text().startswith("so far")


def test_a_part_for_which_no_time_is_left_does_not_start(tmp_path: Path) -> None:
    [how] = gpu.run([part("late", "import time; time.sleep(60)")], place(tmp_path, gpu.GRACE + gpu.LEAST - 1))
    assert how.how == "no time left"
    assert not Path("tried/late.txt").exists()


def test_a_stage_s_file_has_the_driver_and_the_device_s_state_and_its_clock_starts_when_its_rules_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, ruled, smi = (tmp_path / name for name in ("sampled", "ruled", "nvidia-smi"))
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.1, 700.00 W, 1980 MHz'\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    state = {"clock_mhz": 1700.0, "power_w": 690.0, "temperature_c": 60.0, "reasons": 4, "processes": 1}
    monkeypatch.setattr(gpu, "clocks_by", lambda _: Clocks(lambda: (sampled.touch(), state)[1]))
    monkeypatch.setattr(gpu, "time", SimpleNamespace(sleep=time.sleep, monotonic=lambda: 100.0 * ruled.exists()))
    rule = f"import pathlib; pathlib.Path({str(ruled)!r}).touch()"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(sampled)!r}).exists(): time.sleep(0.01)\n"
    monkeypatch.setattr(gpu, "RULES", {"tried": lambda at: [part("rule", rule, 500.0)]})
    monkeypatch.setattr(
        gpu, "STAGES", {"tried": lambda at: [part("one", waits + "print('--seconds 9 left out 256 x 32')")]}
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "tried", "out", "500"])
    Path("out").mkdir()
    assert gpu.main() == 0
    assert [path.name for path in Path("out").iterdir()] == ["tried.tar.gz"]
    with tarfile.open("out/tried.tar.gz") as packed:
        found = json.loads(packed.extractfile("tried/stage.json").read())  # type: ignore[union-attr]
        assert packed.getnames()[1:] == ["tried/one.txt", "tried/rule.txt", "tried/stage.json"]
    assert [found[name] for name in ("device", "driver", "power_limit", "clock_limit", "seconds")] == [
        "NVIDIA H100 80GB HBM3", "580.1", "700.00 W", "1980 MHz", 0.0,
    ]  # fmt: skip
    assert (found["state"]["clock_mhz"], found["state"]["slowed"]) == ([1700.0] * 3, {"power cap": 1.0})
    assert [(how["ended"], how["left"]) for how in (*found["rules"], *found["parts"])] == [
        ("ok", []), ("ok", ["--seconds 9 left out 256 x 32"]),
    ]  # fmt: skip


def test_every_stage_has_parts_whose_scripts_are_there(tmp_path: Path) -> None:
    for name, stage in [*gpu.STAGES.items(), *gpu.RULES.items()]:
        parts = stage(gpu.Place(tmp_path, name, 240.0, "h100"))
        named = {part.name for part in parts}
        assert len(named) == len(parts) > 0
        assert stage not in gpu.RULES.values() or all(part.environment == gpu.ONE_THREAD for part in parts)
        assert {other for part in parts for other in part.after} <= named
        for word in (word for part in parts for word in part.command if word.startswith(str(ROOT))):
            assert Path(word.partition("::")[0]).exists(), word
    assert gpu.short_name("NVIDIA H100 80GB HBM3") == "h100"


def test_ci_pretends_the_three_calls_of_a_loan_whose_parts_fit_nine_minutes_each(tmp_path: Path) -> None:
    found = re.search(r"for stages in (.*); do\n.*gpu\.sh", (ROOT / ".ci" / "run").read_text())
    assert found
    calls = found[1].split()
    assert {stage for call in calls for stage in call.split("+")} | {"caches"} == {*gpu.STAGES}
    page = (ROOT / "docs" / "validation.md").read_text()
    assert re.findall(r"^benchmarks/gpu\.sh (\S+) out$", page, re.MULTILINE) == calls[:3]
    for call in calls[:3]:  # the profile and validations take the time that others leave
        stages = [gpu.STAGES[stage](gpu.Place(tmp_path, stage, 0.0, "h100")) for stage in call.split("+")]
        assert sum(one.seconds for parts in stages for one in parts) <= 540 - gpu.GRACE


def test_a_floor_is_the_sum_of_what_its_parts_take_at_least() -> None:
    # An H200's rates, and what it took: 17.0 ms at 64 x 32.
    config = config_of("llada2-mini", Settings(random_weights=True))
    parts = floors(config, Shape(64, 32, 512), 2.0, 4.16e12, 782e12)
    assert [round(1e3 * least, 1) for least in parts.values()] == [0.3, 7.4, 1.6, 1.7]
    assert 17.0e-3 / sum(parts.values()) == pytest.approx(1.54, abs=0.01)


def test_a_script_names_the_cases_that_it_cannot_begin_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(1000.0)
    assert not watch.late("1 x 32")
    watch.begin -= 2000.0
    assert watch.late("16 x 32")
    watch.print()
    assert capsys.readouterr().out == "--seconds 1000 left out 16 x 32\n"


@pytest.fixture
def tree() -> Path:
    for folder in ("docs", "benchmarks", "profiler/profiles"):
        Path(f"root/{folder}").mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / "docs" / f"{page}.md", "root/docs")
    return Path("root").absolute()


def came_back(folder: Path, pretended: bool = False, valid: bool = True) -> None:
    """Four stages, one of them packed, and the profile of another."""
    text = (
        (ROOT / "tests" / "gpu_results.json")
        .read_text()
        .replace('"pretended": false', f'"pretended": {pretended}'.lower())
    )
    for name, held in json.loads(text).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(held))
    (folder / "smoke" / "executor.txt").write_text("====== 3 passed in 1.2s ======\n")
    with tarfile.open(folder / "breakdown.tar.gz", "w:gz") as packed:
        packed.add(folder / "breakdown", "breakdown")
    shutil.rmtree(folder / "breakdown")
    measured = json.loads((ROOT / "profiler/profiles/h100-sdar-8b.json").read_text()) | {"origin": "measured"}
    measured["fit"]["doubts"] = [] if valid else ["noise"]
    (folder / "h100-here.json").write_text(json.dumps(measured))


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "merge_gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_came_back_is_written_between_the_pages_marks_and_again_in_its_place(tree: Path) -> None:
    came_back(Path("back"))
    for _ in range(2):
        done = merge("back", "--root", tree)
        assert done.returncode == 0, done.stderr
    every = (tree / "benchmarks/gpu.md").read_text()
    assert "|kernels|NVIDIA H100 80GB HBM3|580.1|61 s|1980 (1755 to 1980)|600 (300 to 700)||power cap 25%|" in every
    assert "|steps out of time; steps: --seconds 9 left out 256 x 32|\n" in every
    assert "|smoke|NVIDIA H100 80GB HBM3|580.1|10 s|" in every
    assert "- executor: 3 passed in 1.2s\n" in every
    assert "|1 x 32|5.25 ms|7.09 ms, 1.35|19.9 ms, 3.79|" in every
    assert "|`compact`|1|WRONG||||" in every
    assert "|1 x 32|`nvjet<128, 64>`|products|180|27.8 us|71.4%|" in every
    assert "|8 canvases|captured|head|4 ms|3 ms|" in every
    page = {name: (tree / "docs" / f"{name}.md").read_text() for name in PAGES}
    assert "1 of 2 targets of kernels are met." in page["kernels"]
    assert page["kernels"].count("|1 x 32|7 ms|1.40|400|20%|71%|9%|") == 1
    assert page["live"].count("|1 x 32|5.25 ms|7.09 ms, 1.35|19.9 ms, 3.79|") == 1
    assert page["live"].count("|8 canvases|20 ms|30 ms, 1.50||") == 1
    assert page["validation"] == (ROOT / "docs" / "validation.md").read_text()  # nothing of it came back
    assert all(len(text.split()) < 1200 for text in page.values())
    assert (tree / "profiler" / "profiles" / "h100-here.json").is_file()


def test_a_profile_that_doubts_itself_is_not_shipped(tree: Path) -> None:
    came_back(Path("back"), valid=False)
    done = merge("back", "--root", tree)
    assert (done.returncode, "h100-here.json: its fit doubts itself" in done.stderr) == (0, True)
    assert not list((tree / "profiler" / "profiles").iterdir())


def test_figures_that_were_pretended_are_refused_and_so_is_the_name_of_a_profile_that_was_not_measured(
    tree: Path,
) -> None:
    came_back(Path("back"), pretended=True)
    done = merge("back", "--root", tree)
    said = "back: smoke, kernels pretended on a CPU, expected a GPU's figures\n"
    assert (done.returncode, done.stderr) == (2, said)
    shutil.copy(ROOT / "profiler" / "profiles" / "h100-sdar-8b.json", tree / "profiler" / "profiles" / "h100-here.json")
    done = merge("back", "--root", tree, "--pretended")
    assert done.returncode == 2
    assert "h100-here.json: " in done.stderr


def test_a_budget_is_what_is_left_when_its_part_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1])", gpu.BUDGET]
    [how] = gpu.run([gpu.Part("told", command, 60.0)], place(tmp_path, 50.0))
    assert how.well
    assert 20 <= float(Path("tried/told.txt").read_text().strip().removesuffix("s")) <= 50 - 2 * gpu.GRACE
