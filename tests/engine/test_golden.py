"""Runs are, bit for bit, what they were when the hashes were taken."""

from pathlib import Path

import numpy as np
import pytest

from dsim.engine.engine import Engine
from dsim.engine.journal import RequestTable
from dsim.engine.policy import PRESETS, parse
from dsim.engine.replay import replay
from dsim.profiler.profile import load
from dsim.sim.setting import Setting

from . import golden


@pytest.mark.parametrize("spec", [*PRESETS, *golden.VARIANTS])
def test_a_run_has_the_hash_that_it_had(spec: str, request: pytest.FixtureRequest) -> None:
    if spec in PRESETS:
        request.getfixturevalue("compiled")
    recorded = golden.recorded()
    found = dict(golden.cells((spec,)))
    assert found
    assert {name: value for name, value in found.items() if recorded[name] != value} == {}


def test_every_recorded_hash_is_of_a_cell_that_there_is() -> None:
    named = {name for spec in (*PRESETS, *golden.VARIANTS) for name, _, _ in golden.worlds(spec)}
    assert set(golden.recorded()) == named | set(golden.PROFILES)


@pytest.mark.parametrize("path", sorted(golden.JOURNALS.glob("*.npz")), ids=lambda path: path.stem)
def test_a_recorded_journal_replays_plan_for_plan(path: Path, request: pytest.FixtureRequest) -> None:
    if path.stem.startswith("optimus"):  # compiled, what steps one by one, too
        request.getfixturevalue("compiled")
    held = np.load(path)
    spec = str(held["spec"])
    requests = {name[2:]: held[name] for name in held.files if name.startswith("r.")}
    steps = {name[2:]: held[name] for name in held.files if name.startswith("s.")}
    lists = {name[2:]: (held[name], held["o." + name[2:]]) for name in held.files if name.startswith("l.")}
    policy = parse(spec)
    profile = load(golden.profile_name(policy))
    for replica in range(2):
        engine = Engine(
            policy, Setting(policy, profile).limits, RequestTable(len(requests["request"])), replica=replica,
            latency=profile.latency,
        )  # fmt: skip
        assert list(replay(engine, replica, requests, steps, lists)) == []
