"""A policy's file may say how many replicas serve it."""

from pathlib import Path

from dsim.engine.errors import PolicyError
from dsim.engine.spec import parse
from dsim.planner.candidate import policy_toml
from dsim.results.world import replicas_of

from ..checks import refused


def test_a_setting_s_file_is_its_policy_and_its_replicas() -> None:
    file = Path("policy.toml")
    file.write_text(policy_toml("optimus,max_batch=32", 3))
    assert file.read_text() == 'policy = "optimus"\nmax_batch = 32\nreplicas = 3\n'
    assert parse(str(file)).memory == parse("optimus,max_batch=32").memory
    assert replicas_of([str(file)], None) == 3
    assert replicas_of([str(file), "ar"], None) == 3
    assert replicas_of([str(file)], 1) == 1
    assert replicas_of(["ar"], None) == 1


def test_files_that_disagree_or_say_nonsense_are_one_line() -> None:
    for name, count in (("two", "2"), ("three", "3"), ("none", "0"), ("word", '"two"')):
        Path(f"{name}.toml").write_text(f'policy = "ar"\nreplicas = {count}\n')
    for names, says in (
        (["two", "three"], r"two.toml asks for 2, .*three.toml asks for 3 replicas, expected"),
        (["none"], r"none.toml: replicas is 0, expected a whole number of at least 1"),
        (["word"], r"word.toml: replicas is 'two', expected a whole number of at least 1"),
    ):
        with refused(says, PolicyError):
            replicas_of([f"{name}.toml" for name in names], None)
