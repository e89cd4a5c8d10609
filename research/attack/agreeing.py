"""Paths that must agree: one question about a random world, asked in two ways, has one answer to the byte."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

from dsim.engine.errors import DsimError
from dsim.engine.spec import PRESETS, parse, settings_of
from dsim.planner.space import searchable
from dsim.profiler.profile import load

from ...tests.stored import change, rows
from .commands import run_command

Attack = Callable[[Random, Path], None]
PROFILES = ("a100-sdar-8b", "rtx4090-48gb-llada-8b")
PLAIN, COMPILED = 10**9, 0  # decisions before rules are compiled


def of_paths() -> dict[str, Attack]:
    """By name: two ways to one answer."""
    return {
        "paths: compiled and plain": compiled, "paths: without numba": without_numba, "paths: -o and not": written,
        "paths: resumed and whole": resumed, "paths: one process and many": in_processes,
    }  # fmt: skip


@cache
def _able() -> tuple[tuple[str, str], ...]:
    """Profiles, and the presets that each runs."""
    found = []
    for profile in PROFILES:
        check = searchable(load(profile), None)
        for name, preset in PRESETS.items():
            try:
                check(preset.policy)
            except DsimError:
                continue
            found.append((profile, name))
    return tuple(found)


def _trace(chance: Random, folder: Path) -> str:
    """A trace of a few requests, some of them at one time."""
    at, rows = 0, []
    for _ in range(chance.randint(2, 9)):
        at += chance.choice((0, 0, 1, 40, 300, 2000))
        output = chance.choice((1, 7, 32, 33, 80))
        rows.append({"timestamp": at, "input_length": chance.randint(1, 300), "output_length": output})
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "trace.jsonl"


def _policy(chance: Random, name: str) -> str:
    """A preset, now and then under pressure of rows or pages."""
    fields = settings_of(parse(name))
    spec = name
    if "max_batch" in fields and chance.random() < 0.5:
        spec += f",max_batch={chance.randint(1, 4)}"
    if "num_pages" in fields and chance.random() < 0.3:
        spec += f",num_pages={chance.randint(12, 40)}"
    return spec


def _world(chance: Random, folder: Path) -> list[str]:
    """The words of a replay."""
    profile, name = chance.choice(_able())
    words = ["replay", _trace(chance, folder), "--profile", profile, "--policy", _policy(chance, name), "--json"]
    for more in (
        ["--replicas", "2", "--router", chance.choice(("round-robin", "least-tokens", "jsq"))], ["--emit", "step"],
        ["--concurrency", "2"], ["--slo", "ttft=2s", "--slo", "p90:e2el=9s"], ["--seed", "7"], ["--eos"],
    ):  # fmt: skip
        if chance.random() < 0.3:
            words += more
    return words


def _same(ways: Mapping[str, object]) -> None:
    (one, first), *others = ways.items()
    for other, second in others:
        assert first == second, f"{one} and {other} differ: {str(first)[-600:]} | {str(second)[-600:]}"


def _files(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def compiled(chance: Random, folder: Path) -> None:
    """A replay whose rules are compiled from the first step, and one whose rules are plain Python."""
    words, ways = _world(chance, folder), {}
    for way, patience in (("compiled", COMPILED), ("plain", PLAIN)):
        with mock.patch("dsim.engine.core.PATIENCE", patience), mock.patch("dsim.engine.core.STEPS_PATIENCE", patience):
            ended = run_command([*words, "-o", way], folder)[:2]
        ways[way] = ended, _files(folder / way, "requests.parquet", "steps.parquet")
    _same(ways)


def without_numba(chance: Random, folder: Path) -> None:
    """A replay here, and one in a process with NUMBA_DISABLE_JIT=1."""
    words = _world(chance, folder)
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "dsim", *words, "-o", "theirs"], cwd=folder, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    names = ("requests.parquet", "steps.parquet")
    ours = run_command([*words, "-o", "ours"], folder)[:2], _files(folder / "ours", *names)
    _same({"numba": ours, "no numba": ((done.returncode, done.stdout), _files(folder / "theirs", *names))})


def written(chance: Random, folder: Path) -> None:
    """A replay that prints, and two that write as well."""
    words = _world(chance, folder)
    ways = {
        out or "nothing": run_command([*words, *(["-o", out] if out else [])], folder)[:2] for out in ("", "a", "b")
    }
    _same(ways)
    _same({out: _files(folder / out, "requests.parquet", "steps.parquet") for out in ("a", "b")})


def _sweep(chance: Random, folder: Path) -> list[str]:
    """The words of a sweep of a few cells, without its folder."""
    profile = chance.choice(PROFILES)
    names = [name for own, name in _able() if own == profile]
    policies = list(dict.fromkeys(_policy(chance, chance.choice(names)) for _ in range(2)))
    base = f'[base]\ntrace = "{_trace(chance, folder)}"\nprofile = "{profile}"\nslos = ["ttft=2s"]\n'
    (folder / "sweep.toml").write_text(f"{base}[grid]\npolicy = {json.dumps(policies)}\nseed = [0, 1]\n")
    return ["sweep", "sweep.toml"]


TABLES = ("results.csv",)


def resumed(chance: Random, folder: Path) -> None:
    """A sweep to its end, and one that was cut off anywhere and goes on."""
    words = [*_sweep(chance, folder), "--jobs", "1"]
    ended = run_command([*words, "-o", "whole"], folder)
    if ended[0]:
        return
    shutil.copytree(folder / "whole", folder / "cut")
    [*kept] = rows(folder / "cut" / "replays.db")
    change(folder / "cut" / "replays.db", f"DELETE FROM replays WHERE key >= '{chance.choice(kept)[0]}'")
    for name in TABLES:
        if chance.random() < 0.5:
            (folder / "cut" / name).unlink()
    code, _, said = run_command([*words, "-o", "cut"], folder)
    assert code == 0, said
    _same({out: _files(folder / out, *TABLES) for out in ("whole", "cut")})
    _same({out: rows(folder / out / "replays.db", "*") for out in ("whole", "cut")})


def in_processes(chance: Random, folder: Path) -> None:
    """A sweep in this process, and one in two."""
    words = _sweep(chance, folder)
    ends = {jobs: run_command([*words, "--jobs", jobs, "-o", jobs], folder)[:2] for jobs in ("1", "2")}
    _same(ends)
    _same({jobs: _files(folder / jobs, *TABLES) for jobs in ends})
