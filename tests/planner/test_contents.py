"""A stored replay answers only for the question that it was made for: another content is another key."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dsim.planner.contents import asked_of, digest
from dsim.profiler.profile import load, save
from dsim.results.world import World

from ..checks import cases

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = '{"timestamp": 0, "input_length": 9, "output_length": 8}\n'


def trace(folder: Path) -> Path:
    (folder / "trace.jsonl").write_text(ROW)
    return folder / "trace.jsonl"


def profile(folder: Path) -> Path:
    save(replace(load("a100-sdar-8b"), name="mine"), folder / "mine.json")
    return folder / "mine.json"


def code(folder: Path) -> Path:
    return Path(shutil.copy(EXAMPLES / "policies" / "compiled_rule.py", folder / "mine.py"))


def of_fleet(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copy(EXAMPLES / "fleet" / f"{name}.py", folder / f"{name}.py"))


def page(folder: Path) -> Path:
    (folder / "yields").write_text("vllm:num_drafts 9\n")
    return folder / "yields"


def settings(folder: Path) -> Path:
    (folder / "mine.toml").write_text(f'policy = "{code(folder)}:POLICY"\ncalm = 4\n')
    return folder / "mine.toml"


POOL = "1@h100-sdar-8b,lmdeploy-bd32"
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], World], str, str]] = {
    "trace": (trace, lambda file: World(str(file)), "9", "10"),
    "lengths": (trace, lambda file: World("azure-conv", lengths=f"{file},max_tokens=9"), "9", "10"),
    "profile": (profile, lambda file: World("azure-conv", profile=str(file)), '"mine"', '"yours"'),
    "policy@profile": (profile, lambda file: World("azure-conv", policy=f"ar@{file}"), '"mine"', '"yours"'),
    "policy's code": (code, lambda file: World("azure-conv", policy=f"{file}:POLICY,calm=4"), "= 32\n", "= 16\n"),
    "policy's TOML": (settings, lambda file: World("azure-conv", policy=str(file)), "= 4", "= 8"),
    "code of a policy's TOML": (
        lambda folder: settings(folder).with_name("mine.py"),
        lambda file: World("azure-conv", policy=str(file.with_name("mine.toml"))), "= 32\n", "= 16\n",
    ),
    "router": (of_fleet("free_pages"), lambda file: World("azure-conv", router=f"{file}:ROUTER"), "def ", "def  "),
    "scaler": (of_fleet("per_tokens"), lambda file: World("azure-conv", scaler=f"{file}:SCALER"), "def ", "def  "),
    "yields": (page, lambda file: World("azure-conv", yields=str(file)), "9", "10"),
    "pool's profile": (
        profile,
        lambda file: World("azure-conv", pools=(POOL, f"1@{file},lmdeploy-bd32")), '"mine"', '"yours"',
    ),
    "pool's code": (
        code,
        lambda file: World("azure-conv", pools=(POOL, f"1@a100-sdar-8b,{file}:POLICY")), "= 32\n", "= 16\n",
    ),
}  # fmt: skip


@cases("kind", *KINDS)
def test_an_edited_file_is_another_question_and_the_same_content_elsewhere_the_same(kind: str) -> None:
    write, world_of, before, after = KINDS[kind]
    here, there = Path("here").absolute(), Path("there").absolute()
    here.mkdir()
    file = write(here)
    key = digest(asked_of(world_of(file)))
    shutil.copytree(here, there)
    for copy in there.iterdir():
        copy.write_text(copy.read_text().replace(str(here), str(there)))
    if kind not in ("policy's TOML", "code of a policy's TOML"):  # such a file holds its code's path
        assert digest(asked_of(world_of(there / file.name))) == key
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert digest(asked_of(world_of(file))) != key


def test_every_field_of_a_question_counts() -> None:
    plain = World("azure-conv", lengths="sharegpt")
    others = [
        replace(plain, seed=1), replace(plain, policy="ar"), replace(plain, slos=("ttft=2s",)),
        replace(plain, replicas=2), replace(plain, lengths="sharegpt,max_tokens=8"),
        replace(plain, profile="h100-sdar-8b"), replace(plain, profile="h100-sdar-8b/vllm"),
        replace(plain, variation=(("x", 1.0),)), replace(plain, trace="mooncake-conv"),
    ]  # fmt: skip
    assert len({digest(asked_of(world)) for world in (plain, *others)}) == 1 + len(others)
    assert digest(asked_of(plain)) != digest(asked_of(plain, of="summary"))
