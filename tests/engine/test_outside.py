"""Policies from outside: named, filled in, written down, and refused in one line where they cannot be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.cache_overhead import implementation_of, table_of
from dsim.engine.core import core_of
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.hooks import select
from dsim.engine.jit import JIT
from dsim.engine.journal import RequestTable
from dsim.engine.latency import CacheOverhead, LatencyModel
from dsim.engine.outside import fault_in_code, from_file
from dsim.engine.part import Policy, Rows
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP
from dsim.engine.request import Request
from dsim.engine.spec import files_of, name_of, named_files, preset_of, settings_of, to_toml
from dsim.engine.spec import parse as parse_given
from dsim.engine.state import CACHED, REUSE
from dsim.engine.view import View
from dsim.profiler.profile import load
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import synth
from dsim.traces.estimates import with_estimates

from ..checks import cases

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"
COMPILED = f"{EXAMPLES / 'compiled_rule.py'}:POLICY"
ALLOWED = allowed([EXAMPLES / "compiled_rule.py"])
HEAD = """
from dataclasses import dataclass, replace
from typing import Annotated, Any
import numpy as np
from dsim.engine.hooks import choose, decide, select, settle
from dsim.engine.jit import rule
from dsim.engine.part import Eviction, Granularity, Policy, Preset, Range
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import DelayedCache
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP

@rule
def constant(view):
    return view.fields.answer

@rule
def leftmost(status, reach, chunk, p, window):
    for k in range(reach):
        if p.computes:
            window[k] = status[k] != 2

@rule
def helper(fields):
    return fields.no_such_field

@rule
def misspelt(view):
    return helper(view.fields)

@rule
def untyped(view):
    return [str(view), {}]

@rule
def long(replica, policy):
    return 4

@dataclass(frozen=True)
class Mine(FixedChunk):
    answer: int = 8
    computes: bool = True

    def answers(self, policy):
        return {**super().answers(policy), choose: CHOOSE, select: leftmost}

CHOOSE = constant
"""
POLICY = 'POLICY = Policy("mine", EVERY_STEP, Mine(), DelayedCache())\n'
PARTS = """
@dataclass(frozen=True)
class Loops(type(EVERY_STEP)):
    answer: int = 1

    def answers(self, policy):
        return {**super().answers(policy), choose: constant}

POLICY = Policy("x", Loops(num_loops=1), Mine(), DelayedCache())
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parse(spec: str) -> Policy:
    """The policy of a SPEC that the user gave."""
    return parse_given(spec, allowed(named_files(spec)))


def write(text: str) -> str:
    Path("mine.py").write_text(HEAD + text)
    return "./mine.py:POLICY"


def engine(spec: str) -> Engine:
    engine = Engine(parse(spec), Limits(100, 4096, 4), RequestTable(1))
    engine.submit(Request(0, 0.0, 40, 40))
    return engine


def refused(spec: str) -> str:
    """The one line that a policy is refused with."""
    with pytest.raises(PolicyError) as caught:
        core_of(parse(spec))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_each_example_holds_a_policy_called_policy_in_fewer_than_60_lines(name: str) -> None:
    policy = parse(f"{EXAMPLES / name}.py:POLICY")
    assert core_of(policy) is core_of(policy)
    asked = policy.granularity.given, bool(policy.discipline.questions), policy.unmasking.varies
    assert asked == (name in ("numpy_rule", "age_capped"), name == "dws", name == "dilaserve")
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_a_policy_of_a_file_takes_its_fields_from_the_spec_as_a_preset_does() -> None:
    path = EXAMPLES / "compiled_rule.py"
    policy = parse(f"{path}:POLICY:4,max_chunk=16,max_batch=none,num_pages=50")
    held = settings_of(policy)
    assert (held["calm"], held["max_chunk"], held["max_batch"], held["num_pages"]) == (4, 16, None, 50)
    assert name_of(policy.name) == f"{path}:POLICY"
    assert files_of(policy.name) == [str(path)]
    assert files_of("optimus,num_blocks=2") == []
    assert settings_of(parse(f"{path}:POLICY:4,block_length=16"))["max_chunk"] == 16


def test_what_to_toml_writes_names_the_file_and_reads_back() -> None:
    spec = COMPILED
    text = to_toml(parse(f"{spec}:4,threshold=0.8"), spec, ALLOWED)
    assert text == f'policy = "{spec}"\ncalm = 4\nthreshold = 0.8\n'
    Path("policy.toml").write_text(text)
    assert settings_of(parse_given("policy.toml", ALLOWED)) == settings_of(parse(f"{spec}:4,threshold=0.8"))
    assert name_of("policy.toml") == spec
    assert files_of("policy.toml") == [str(EXAMPLES / "compiled_rule.py")]


def test_an_edited_file_is_read_again() -> None:
    spec = write(POLICY)
    assert settings_of(parse(spec))["answer"] == 8
    write(POLICY.replace("Mine()", "Mine(answer=4)"))
    assert settings_of(parse(spec))["answer"] == 4


def test_what_a_user_s_code_raises_has_its_file_and_line() -> None:
    write("def fails():\n    return {}['key']\nPOLICY = fails\n")
    fails = from_file("./mine.py:POLICY", object, "policies", "test", allowed(["./mine.py"]))
    line = next(n for n, text in enumerate(Path("mine.py").read_text().splitlines(), 1) if "['key']" in text)
    with pytest.raises(KeyError) as caught:
        fails()
    assert fault_in_code(caught.value) == f"{Path('mine.py').absolute()}:{line}: fails: KeyError: 'key'"
    assert fault_in_code(KeyError("ours")) is None
    write("raise SystemExit(0)  # an answer that never came must not end as one\n")
    with pytest.raises(PolicyError, match=r"mine.py cannot be run: SystemExit: 0"):
        from_file("./mine.py:POLICY", object, "policies", "test", allowed(["./mine.py"]))


def test_two_files_of_one_name_are_two_policies() -> None:
    one, other = Path("one/mine.py"), Path("other/mine.py")
    for path, chunk in ((one, 4), (other, 6)):
        path.parent.mkdir()
        path.write_text(
            "from __future__ import annotations\n" + HEAD + POLICY.replace("Mine()", f"Mine(chunk={chunk})")
        )
    assert [settings_of(parse(f"{path}:POLICY,answer=3"))["chunk"] for path in (one, other)] == [4, 6]


@cases(
    "text says",
    ("POLICY = 1 / 0\n", "./mine.py cannot be run: ZeroDivisionError: division by zero"),
    ("import no_such_module\n", "./mine.py cannot be run: ModuleNotFoundError: No module named 'no_such_module'"),
    ("OTHER = Preset(Policy('x'))\n", "./mine.py holds no POLICY; its policies are OTHER"),
    ("POLICY = 4\n", "./mine.py:POLICY is a int, expected a Preset or a Policy"),
    ("POLICY = Policy('x', granularity=DelayedCache())\n", "granularity is DelayedCache("),
    (
        "class Bare(FixedChunk):\n    pass\nPOLICY = Policy('x', EVERY_STEP, Bare(), DelayedCache())\n",
        "x: Bare is not a frozen dataclass, expected @dataclass(frozen=True)",
    ),
    (POLICY.replace("Mine()", "replace(Mine(), chunk=99)"), "PolicyError: chunk is 99, expected 2 to 64"),
    (PARTS, "x: Loops and Mine both have a field answer, expected another name in one"),
)
def test_a_file_that_holds_no_policy_is_one_line(text: str, says: str) -> None:
    assert says in refused(write(text))


@cases(
    "text says",
    ("CHOOSE = 4\n", "Mine answers choose with 4, expected a rule (dsim.policy.rule)"),
    ("CHOOSE = long\n", "Mine answers choose with long(replica, policy), expected 1: view"),
    ("choose = decide\n", "Mine answers decide, expected one of "),
    ("choose = 'chose'\n", "Mine answers chose, expected one of "),
    (
        "@dataclass(frozen=True)\nclass Plain(Eviction):\n    delayed = True\nDelayedCache = Plain\n",
        "no part answers settle, expected one that does",
    ),
    (
        "@dataclass(frozen=True)\nclass Mine(Granularity):\n    block_length: int = 32\n",
        "no part answers select, expected one that does",
    ),
)
def test_an_answer_that_is_missing_or_none_is_one_line(text: str, says: str) -> None:
    assert says in refused(write(text + POLICY))


@cases(
    "text says",
    ("late: bool = True", "Mine has a field late, which the engine uses: expected another name"),
    ("def choose(self, view):\n        return 2", "Mine has a method choose, which is never asked: expected a rule"),
    ("def order(self, view):\n        return []", "Mine has a method order, which is never asked: expected a rule"),
    ("group_steps: int = 3", "Mine has a field group_steps, which the engine uses: expected another name"),
    ("record: int = 3", "Mine has a field record, which the engine uses: expected another name"),
)
def test_a_name_that_the_engine_uses_or_never_asks_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        engine(write(f"@dataclass(frozen=True)\nclass Mine(Mine):\n    {text}\n{POLICY}"))
    assert says in str(caught.value)


FULL = (
    HEAD
    + """
from dsim.engine.hooks import held, pages_to_admit, work
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import ONE_A_STEP, PAGES, NoCache, Static, nothing_held
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.policies.whole_block import FixedBlock
from dsim.engine.state import REUSE

@rule
def a_block(prompt, length, start, step, block_step, block, p):
    return REUSE, block, length

@dataclass(frozen=True)
class Free(NoCache):
    rules = {work: a_block}

@dataclass(frozen=True)
class Unpriced(NoCache):
    rules = {work: a_block, held: nothing_held}

@dataclass(frozen=True)
class Declared(Unpriced):
    overhead = "FastCache"

@dataclass(frozen=True)
class Misspelt(Unpriced):
    overhead = "fast"

@dataclass(frozen=True)
class Huge(FixedBlock):
    answer: int = 10**9

    def answers(self, policy):
        return {**super().answers(policy), choose: constant}

@dataclass(frozen=True)
class Both(FixedBlock):
    def select(self, view, rows):
        return rows.status != 2

@dataclass(frozen=True)
class Unpaged(Continuous):
    def answers(self, policy):
        given = super().answers(policy)
        del given[pages_to_admit]
        return given

def full(cache=NoCache(), **parts):
    parts = {"batching": Static(), "unmasking": ONE_A_STEP, "memory": PAGES, **parts}
    return Policy("full", cache=cache, **parts)

def block(**parts):
    return Policy("block", **parts)
"""
)


@cases(
    "policy says",
    ("full(Free())", "full: Free answers work and not held, the memory of a request: expected an answer to both"),
    (
        "full(Unpriced())",
        "full: Unpriced answers work and does not declare overhead: expected a shipped cache such as "
        '"SparseCache", or "none"',
    ),
    ("full(granularity=Huge())", "Huge answers choose, and this policy asks only: block_entered, commit_rows, "),
    ("block(granularity=Both())", "select in Python is one answer too many"),
    ("block(batching=Unpaged())", "no part answers pages_to_admit, expected one that does"),
)
def test_what_would_be_free_or_never_asked_is_refused_before_anything_runs(policy: str, says: str) -> None:
    Path("mine.py").write_text(f"{FULL}POLICY = {policy}\n")
    with pytest.raises(PolicyError) as caught:
        parse("./mine.py:POLICY")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_from_outside_has_the_costs_of_the_shipped_one_that_it_names() -> None:
    Path("mine.py").write_text(f"{FULL}POLICY = full(Declared())\nFAST = full(FastCache())\nWRONG = full(Misspelt())\n")
    latency = LatencyModel(((0.0, 1.0),), 0.0, cache_overhead=(CacheOverhead("FastCache", "reuse", 0.5, 0.25),))
    mine, shipped = (table_of(latency, parse(f"./mine.py:{name}").cache) for name in ("POLICY", "FAST"))
    assert mine.tolist() == shipped.tolist()
    assert mine[REUSE].tolist() == [0.5, 0.25]
    assert implementation_of(parse("./mine.py:POLICY")) == "fast-dllm"
    with pytest.raises(PolicyError, match=r"Misspelt.overhead is 'fast', expected NoCache, FastCache, "):
        table_of(latency, parse("./mine.py:WRONG").cache)


@pytest.mark.skipif(not JIT, reason="rules run as plain Python: nothing is compiled")
@pytest.mark.usefixtures("compiled")
@cases(
    "rule says",
    pytest.param("misspelt", "cannot be compiled: there is no field 'no_such_field'", marks=pytest.mark.slow),
    ("untyped", "leftmost, untyped cannot be compiled: Cannot infer the type of variable "),
)
def test_a_rule_that_cannot_be_compiled_is_named_with_the_reason(rule: str, says: str) -> None:
    running = engine(write(f"CHOOSE = {rule}\n{POLICY}"))
    with pytest.raises(PolicyError, match=r"policy \./mine\.py:POLICY: ") as caught:
        running.schedule(0.0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preset_from_outside_is_its_policy_with_a_main_field() -> None:
    preset = preset_of(COMPILED, allow_code=ALLOWED)
    assert (preset.main, preset.summary) == ("calm", "a chunk sized by the queue's length")


def test_a_rule_in_numpy_sees_estimates_and_never_true_lengths() -> None:
    seen = []

    @dataclass(frozen=True)
    class Looks(FixedChunk):
        def select(self, view: View, rows: Rows) -> Any:
            seen.append(dict(zip(rows.requests.index.tolist(), rows.requests.estimate.tolist(), strict=True)))
            return (rows.status != CACHED) & (np.arange(rows.status.shape[1]) < rows.reach[:, None])

        def answers(self, policy: Policy) -> Any:
            return {k: v for k, v in super().answers(policy).items() if k is not select}

    trace = synth("poisson", 1000.0, lengths="fixed:32,200", num_requests=5)
    asked = with_estimates(trace, 0)
    simulate(asked, Setting(Policy("looks", EVERY_STEP, Looks(), DelayedCache()), load("a100-sdar-8b")))
    assert {request: tokens for rows in seen for request, tokens in rows.items()} == {
        i: int(asked.expected[i]) for i in range(5)
    }
    assert 200 not in asked.expected
