"""Write the results of `benchmarks/gpu.sh` into the documents: `python benchmarks/merge_gpu.py FOLDER`

FOLDER holds files STAGE.tar.gz of one run or several, or what was in them; the newer of duplicates counts. Tables
go to benchmarks/gpu.md, short ones between marks in docs/kernels.md, docs/live.md and docs/validation.md, a measured
profile to profiler/profiles/. --page NAME, for a second device, writes only that page of benchmarks/.
"""

import argparse
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from dsim.benchmarks.gpu import STAGES
from dsim.benchmarks.vllm_cpu_table import put
from dsim.engine.errors import DsimError
from dsim.profiler.profile import Profile, load, save
from dsim.report.profile_page import Profiled

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("e2el", "tpot", "ttft")
COMPARED = "validation/comparison/compare.json"
KINDS = ("ours", "products", "attention", "PyTorch", "copies", "gaps")


class Results:
    def __init__(self, folder: Path, unpacked: Path) -> None:
        for i, path in enumerate(sorted(folder.rglob("*.t*gz"))):
            with tarfile.open(path) as held:
                held.extractall(unpacked / str(i), filter="data")
        found = [path for place in (folder, unpacked) for path in place.rglob("*") if path.is_file()]
        # A smoke stage's results are toys, but for its tests and how it ran.
        real = ("executor.txt", "stage.json")
        found = [path for path in found if "smoke" not in path.parts[:-1] or path.name in real]
        self._files = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def paths(self, name: str) -> Iterator[Path]:
        """By the end of their path, newest first."""
        return (path for path in self._files if path.as_posix().endswith(f"/{name}"))

    def json(self, name: str, *keys: str) -> dict[str, Any] | None:
        """The newest with this end of its path and these keys."""
        for path in self.paths(name):
            held = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(held, dict) and set(keys) <= set(held):
                return held
        return None

    def stage(self, name: str) -> dict[str, Any] | None:
        """How it ran."""
        return self.json(f"{name}/stage.json", "parts")

    def text(self, name: str) -> str:
        """The newest with this end of its path, or empty."""
        return next((path.read_text(encoding="utf-8", errors="replace") for path in self.paths(name)), "")

    def profiles(self) -> Iterator[Path]:
        """Measured, newest first, without the smoke stage's."""
        for path in self._files:
            if path.suffix == ".json" and '"origin": "measured"' in path.read_text(encoding="utf-8", errors="replace"):
                yield path


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *rows)]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


# ---- each part ------------------------------------------------------------------------------------------------


def conditions(results: Results) -> list[str]:
    """How stages ended, and the device's state."""
    rows = []
    for stage in STAGES:
        found = results.stage(stage)
        if found is None:
            continue
        state, parts = found["state"], [*found["rules"], *found["parts"]]
        ended = [f"{part['name']} {part['ended']}" for part in parts if part["ended"] != "ok"]
        ended += [f"{part['name']}: {line}" for part in parts for line in part["left"]]
        rows.append([
            stage, found["device"], found.get("driver", ""), f"{found['seconds']:.0f} s",
            *(f"{state[name][1]:.0f} ({state[name][0]:.0f} to {state[name][2]:.0f})" if name in state else ""
              for name in ("clock_mhz", "power_w", "temperature_c")),
            ", ".join(f"{name} {share:.0%}" for name, share in state.get("slowed", {}).items()) or "none",
            "; ".join(ended) or "all parts ok",
        ])  # fmt: skip
    head = ["stage", "device", "driver", "took", "clock, MHz", "power, W", "temperature, C", "slowed by", "parts"]
    return table(head, rows) if rows else []


def steps_of(results: Results, name: str) -> list[dict[str, Any]]:
    found = results.json(f"{name}.json", "steps", "bandwidth")
    return [step for step in (found or {"steps": []})["steps"] if "ratio" in step]


def of_steps(steps: list[dict[str, Any]]) -> list[str]:
    rows = []
    for shape in dict.fromkeys(map(step_of, sorted(steps, key=_order))):
        held = {step["mode"]: step for step in steps if step_of(step) == shape}
        floor = next(iter(held.values()))["floor"]
        cells = [f"{ms(s['device'])} ms, {s['ratio']:.2f}" if (s := held.get(m)) else "" for m in ("graphs", "eager")]
        rows.append([shape, f"{ms(floor)} ms", *cells])
    return table(["step", "floor", "captured: device, times floor", "eager: device, times floor"], rows)


def _order(row: dict[str, Any]) -> tuple[int, ...]:
    """Decode steps by window and batch, prefills, canvases."""
    if "canvases" in row:
        return 1, 0, row["canvases"]
    return 0, -row["window"], row["batch"], row.get("context", 0)


def of_canvas_steps(results: Results) -> list[dict[str, Any]]:
    """As those of blocks."""
    found = results.json("canvas.json", "steps", "parts") or {"steps": []}
    modes = {"captured": "graphs", "eager": "eager"}
    return [step | {"mode": modes[step["mode"]], "device": step["latency"]} for step in found["steps"]]


def of_canvas_parts(results: Results) -> list[str]:
    found = results.json("canvas.json", "steps", "parts") or {"parts": []}
    rows = []
    for row in found["parts"]:
        for part, took in sorted(row["seconds"].items(), key=lambda item: -item[1]):
            floor = row["floors"].get(part)
            rows.append([step_of(row), row["mode"], part, f"{ms(took)} ms", "" if floor is None else f"{ms(floor)} ms"])
    return table(["step", "mode", "part", "device", "floor"], rows) if rows else []


def gains(results: Results, name: str) -> list[str]:
    held = results.json(f"{name}.json", "steps", "bandwidth")
    rows = [
        [s["mode"], str(s["batch"]), f"{ms(s['whole'])} ms", f"{ms(s['evicting'])} ms", f"{s['gain']:.2f}",
         "" if s["share"] is None else f"{s['share']:.1%}"]
        for s in (held or {"steps": []})["steps"] if "gain" in s
    ]  # fmt: skip
    head = ["FOCUS leaves a quarter", "sequences", "whole step", "evicting step", "times the steps", "choosing"]
    return table(head, rows) if rows else []


def step_of(row: dict[str, Any]) -> str:
    """A step's shape."""
    if "canvases" in row:
        return f"{row['canvases']} canvas{'es' * (row['canvases'] > 1)}"
    return f"{row['batch']} x {row['window']}" if row["window"] else f"prefill of {row['context']}"


def of_breakdown(found: dict[str, Any]) -> list[str]:
    kinds = [kind for kind in KINDS if any(step["kinds"].get(kind) for step in found["steps"])]
    rows = [
        [step_of(s), f"{ms(s['span'])} ms", f"{s['span'] / s['floor']:.2f}", f"{s['launches']:.0f}",
         *(f"{s['kinds'].get(kind, 0.0) / s['span']:.0%}" for kind in kinds)]
        for s in sorted(found["steps"], key=lambda s: s["batch"])
    ]  # fmt: skip
    return table(["step", "device", "times floor", "launches", *kinds], rows)


def of_kernels_of_steps(found: dict[str, Any]) -> list[str]:
    rows = [
        [step_of(s), f"`{k['name'][:60]}`", k["kind"], f"{k['launches']:.0f}",
         f"{1e6 * k['seconds'] / k['launches']:.1f} us", f"{k['seconds'] / s['span']:.1%}"]
        for s in sorted(found["steps"], key=lambda s: s["batch"]) for k in s["kernels"][:10]
    ]  # fmt: skip
    return table(["step", "kernel", "whose", "launches", "each", "of the step"], rows)


def by_kernel(found: dict[str, Any] | None) -> list[list[str]]:
    return [] if found is None else [of_breakdown(found), of_kernels_of_steps(found)]


def of_kernels(found: dict[str, Any]) -> list[str]:
    rows = []
    for case in found["cases"]:
        if "of_floor" not in case:
            rows.append([f"`{case['name']}`", case["shape"], "WRONG" if not case.get("right") else "", "", "", ""])
            continue
        target = case.get("target")
        met = "" if target is None else f"{target:.2f}: {'met' if case['of_floor'] >= target else 'missed'}"
        rows.append([
            f"`{case['name']}`", case["shape"], f"{1e6 * case['seconds']:.1f} us", f"{case['of_floor']:.2f}",
            case["floor"], met,
        ])  # fmt: skip
    return table(["kernel", "shape", "median", "of the fastest possible", "which is", "asked"], rows)


def kernels_in_short(found: dict[str, Any]) -> str:
    """Whether kernels meet their targets."""
    asked = [case for case in found["cases"] if case.get("target") is not None]
    met = sum(case.get("of_floor", 0.0) >= case["target"] for case in asked)
    return f"{met} of {len(asked)} targets of kernels are met."


def of_validation(found: dict[str, Any]) -> list[str]:
    rows = []
    for cell in found["cells"]:
        measured = Path(found["pairs"][cell["pair"]]["measured"]["folder"])
        row = [f"`{measured.parent.name}`", str(cell["num_both"])]
        for name in METRICS:
            metric = cell["metrics"].get(name)
            error = None if metric is None else metric["error"].get("mean")
            row.append("" if error is None else f"{100 * error:+.1f} %")
        requests = (cell["metrics"].get("e2el") or {}).get("requests")
        row.append(f"{100 * requests['mape']:.1f} %" if requests and requests.get("mape") is not None else "")
        rows.append(row)
    return table(["cell", "requests", *(f"mean {name}" for name in METRICS), "e2el of single requests"], rows)


def validation_in_short(found: dict[str, Any], device: str) -> str:
    parts = []
    for name in METRICS:
        errors = [abs(c["metrics"][name]["error"]["mean"]) for c in found["cells"] if name in c["metrics"]
                  and c["metrics"][name]["error"].get("mean") is not None]  # fmt: skip
        if errors:
            parts.append(f"{name} {100 * min(errors):.1f} to {100 * max(errors):.1f} %")
    bounds = found.get("bounds", [])
    met = sum(bool(judged.get("met")) for judged in bounds)
    asked = f" {met} of {len(bounds)} bounds are met." if bounds else ""
    return f"{device}, {len(found['cells'])} cells, errors of the means: {', '.join(parts)}.{asked}"


def of_profile(profile: Profile) -> list[str]:
    """As `dsim profile` prints it, and the device's state by round."""
    settings = profile.provenance.settings
    lines = [f"{name}: {text}" for name, text in Profiled(profile).page().facts if name != "pieces"]
    lines += [f"clocks    {profile.provenance.clocks}"] if profile.provenance.clocks else []
    lines += [f"block     {block}" for block in str(settings.get("blocks", "")).split("; ") if block]
    lines += [f"Not valid: {doubt}" for doubt in profile.fit.doubts]
    return [f"- {line}" for line in lines]


def last_line(text: str) -> str:
    """pytest's summary."""
    lines = [line.strip("= ") for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1] if lines else ""


# ---- the pages ------------------------------------------------------------------------------------------------


def section(title: str, *parts: list[str]) -> list[str]:
    """Nothing if all parts are empty."""
    held = [line for part in parts if part for line in ("", *part)]
    return ["", f"## {title}", *held] if held else []


def page_of(results: Results) -> list[str]:
    """benchmarks/gpu.md, or a second device's page."""
    kernels, broken = results.json("kernels.json", "cases"), results.json("breakdown.json", "steps", "bandwidth")
    compared = results.json(COMPARED, "cells", "bounds")
    steps, mini = steps_of(results, "steps"), steps_of(results, "llada2-mini")
    mini_broken = results.json("mini-breakdown.json", "steps", "bandwidth")
    canvases = of_canvas_steps(results)
    tests = [f"{name}: {found}" for name in ("tests", "executor", "memcheck", "racecheck")
             if (found := last_line(results.text(f"{name}.txt")))]  # fmt: skip
    profile = next(results.profiles(), None)
    noise = re.findall(r"^Noise floor.*$", results.text("validate.txt"), re.MULTILINE)
    return [
        "# Measured on a GPU", "",
        f"`python benchmarks/merge_gpu.py` wrote this page on {date.today().isoformat()} from what `benchmarks/gpu.sh` "
        "measured. Weights are random, of the models' real dimensions. A step's floor is the sum of its parts': "
        "attention, experts, other layers and head, each the longer of reading its weights and keys once and of "
        "multiplying them, at the copy bandwidth and the matrix rate of the same run.",
        *section("Conditions", conditions(results)),
        *section("Tests", [f"- {line}" for line in tests]),
        *section("Whole steps of SDAR-8B", of_steps(steps) if steps else [], gains(results, "steps")),
        *section("Whole steps of LLaDA2 mini", of_steps(mini) if mini else []),
        *section("... by kernel", *by_kernel(mini_broken)),
        *section("A step by kernel", *by_kernel(broken)),
        *section("Kernels", of_kernels(kernels) if kernels else []),
        *section("Canvases of DiffusionGemma", of_steps(canvases) if canvases else [], of_canvas_parts(results)),
        *section("The profile", of_profile(load(profile)) if profile else []),
        *section("Validation", of_validation(compared) if compared else [], [f"- {line}" for line in noise]),
    ]  # fmt: skip


def blocks_of(results: Results) -> dict[str, list[str]]:
    """Texts between marks, by page of docs/ with results."""
    found: dict[str, list[str]] = {}
    where = next(filter(None, map(results.stage, STAGES)))
    on = f"{date.today().isoformat()}, {where['device']}" + (f", PyTorch {where['torch']}" if "torch" in where else "")
    kernels, broken = results.json("kernels.json", "cases"), results.json("breakdown.json", "steps", "bandwidth")
    if kernels or broken:
        words = [f"{on} ([all](../benchmarks/gpu.md)).", *([kernels_in_short(kernels)] if kernels else [])]
        found["kernels"] = [" ".join(words), *(["", *of_breakdown(broken)] if broken else [])]
    steps = [step for step in steps_of(results, "steps") if step["window"] in (0, 32) and step["batch"] != 128]
    if steps := [*steps, *of_canvas_steps(results)]:
        found["live"] = [f"{on}, SDAR-8B and DiffusionGemma ([all](../benchmarks/gpu.md)):", "", *of_steps(steps)]
    if compared := results.json(COMPARED, "cells", "bounds"):
        found["validation"] = [validation_in_short(compared, on)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what came back from a GPU into the documents")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose pages are written")
    parser.add_argument("--name", help="of the profile; by default its file's")
    parser.add_argument("--page", metavar="NAME", help="write this page of benchmarks/ and nothing else")
    parser.add_argument("--pretended", action="store_true", help="take figures that were pretended on a CPU, too")
    given = parser.parse_args()
    if not given.folder.is_dir():
        print(f"{given.folder}: not a folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as unpacked:
        results = Results(given.folder, Path(unpacked))
        pretended = [stage for stage in STAGES if (results.stage(stage) or {}).get("pretended")]
        if pretended and not given.pretended:
            print(
                f"{given.folder}: {', '.join(pretended)} pretended on a CPU, expected a GPU's figures", file=sys.stderr
            )
            return 2
        page = given.root / "benchmarks" / (given.page or "gpu.md")
        page.write_text("\n".join(page_of(results)) + "\n", encoding="utf-8")
        print(f"Wrote {page}")
        if given.page:
            return 0
        for name, lines in blocks_of(results).items():
            marks = "<!-- gpu: benchmarks/merge_gpu.py writes this -->", "<!-- /gpu -->"
            put(str(given.root / "docs" / f"{name}.md"), *marks, "\n".join(lines))
        for path in results.profiles():
            name = given.name or path.stem
            target = given.root / "profiler" / "profiles" / f"{name}.json"
            if target.exists() and load(target).origin != "measured":
                print(f"{target}: {load(target).origin}, expected none of that name (NAME)", file=sys.stderr)
                return 2
            if load(path).fit.doubts:
                print(f"{path}: its fit doubts itself, so that it is not shipped", file=sys.stderr)
                break
            try:
                save(replace(load(path), name=name), target, force=True)
            except DsimError as error:
                print(error, file=sys.stderr)
                return 2
            print(f"Wrote {target}")
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
