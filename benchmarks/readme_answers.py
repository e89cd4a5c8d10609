"""Run the README's two plans, keep their output, draw the first one's picture: `python benchmarks/readme_answers.py`.

The first is the README's first command, the second is in docs/start.md. Writes benchmarks/answer.json and
docs/images/answer.svg; tests/cli/test_said.py compares the README with them and fails if a command, its trace, profiles
or policies' rules changed since.
"""

import datetime
import hashlib
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from dsim.results.world import World

ROOT = Path(__file__).parents[1]
README, START = ROOT / "README.md", ROOT / "docs" / "start.md"
KEPT, PICTURE = ROOT / "benchmarks" / "answer.json", ROOT / "docs" / "images" / "answer.svg"
ASKED = ("rate", "gpu_hour", "currency", "trace", "arrival", "seed", "profile", "workload", "router", "emit", "slos")
FOUND = ("policy", "profile", "device", "replicas", "gpus", "per_hour", "values", "headroom")
PROBED = 150  # requests that show whether a policy's rules changed
INK, BEST, OTHER = "#7d8694", "#2f7ed8", "#d9822b"
WIDTH, TOP, ROW = 720, 60, 62  # pixels


def first_command() -> list[str]:
    """Of the README, without `dsim`."""
    text = README.read_text(encoding="utf-8")
    found = re.search(r"```sh\n(.*?)```", text, re.S)
    assert found is not None, f"{README} has no command"
    line = re.sub(r"\\\n\s*", "", found[1]).splitlines()[0].rpartition(" && ")[2]
    program, *words = shlex.split(line)
    assert program.endswith("dsim"), line
    return words


def second_command() -> list[str]:
    """docs/start.md's plan for a scheduler that no released engine has."""
    text = re.sub(r"\\\n\s*", "", START.read_text(encoding="utf-8"))
    [line] = re.findall(r"^dsim (plan .*--policy optimus .*)$", text, re.M)
    return shlex.split(line)


COMMANDS = {"first": first_command, "second": second_command}


def digest(words: list[str], plan: dict[str, Any]) -> str:
    """The inputs: command, trace, profiles, and what each policy does with a few requests.

    Not the search: another answer of the planner keeps the digest.
    """
    parts: list[Any] = [words]
    for fleet in plan["ranking"]:
        world = World(
            plan["trace"], fleet["policy"], fleet["profile"], rate=plan["rate"] / fleet["replicas"],
            workload=plan["workload"] if fleet["profile"] == plan["profile"] else None,
            **{name: plan[name] for name in ("arrival", "seed", "router", "emit")},
        )  # fmt: skip
        requests = world.source()
        arrays = (requests.arrival, requests.input_length, requests.output_length)
        parts += [[hashlib.sha256(array.tobytes()).hexdigest() for array in arrays], repr(world.loaded_profile())]
        few = replace(world, num_requests=PROBED)
        parts.append(rounded(asdict(few.run())))
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def rounded(value: Any) -> Any:
    """To nine digits: processors sum in different orders."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def kept() -> dict[str, dict[str, Any]]:
    """The last run's results by command."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def title(plan: dict[str, Any]) -> str:
    """The picture's alternative text."""
    fleets = " and ".join(f"{f['policy']} needs {f['gpus']} for {f['per_hour']:g} dollars" for f in plan["ranking"])
    return f"What meets the target at {plan['rate']:g} requests a second costs an hour, in {device(plan)}: {fleets}"


def device(plan: dict[str, Any]) -> str:
    """In the plural."""
    names = {fleet["device"].partition("-")[0] for fleet in plan["ranking"]}
    return f"{names.pop()}s" if len(names) == 1 else "GPUs"


def svg(plan: dict[str, Any]) -> str:
    """By policy, the smallest fleet that meets the SLOs: one square per GPU, its cost, the share of requests within
    them."""
    fleets = plan["ranking"]
    left = max(150, 24 + 9 * max(len(fleet["policy"]) for fleet in fleets))
    step = (WIDTH - left - 240) / max(fleet["gpus"] for fleet in fleets)  # the most expensive fleet fills the row
    said = escape(title(plan))
    height = TOP + ROW * len(fleets)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" '
        f'aria-label={quoteattr(title(plan))} font-family="system-ui, sans-serif">',
        f"<title>{said}</title>",
        text(20, 24, f"{device(plan)} that meet the target at {plan['rate']:g} requests a second", INK, 15, bold=True),
    ]
    for row, fleet in enumerate(fleets):
        y, colour = TOP + ROW * row, OTHER if row else BEST
        [attained] = fleet["values"].values()
        out.append(text(left - 14, y + 20, fleet["policy"], colour, 14, "end", bold=True))
        out += [
            f'<rect x="{left + step * k:.0f}" y="{y}" width="{step - 6:.0f}" height="30" rx="3" fill="{colour}"/>'
            for k in range(fleet["gpus"])
        ]
        x = round(left + step * fleet["gpus"] + 6)
        out.append(text(x, y + 13, f"{fleet['gpus']} GPUs, ${fleet['per_hour']:g} an hour", colour, 14, bold=True))
        out.append(text(x, y + 31, f"{100 * attained['value']:.1f} % of requests meet it", INK, 13))
    return "\n".join([*out, "</svg>"]) + "\n"


def text(x: int, y: int, words: str, colour: str, size: int, anchor: str = "start", *, bold: bool = False) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"' + (' font-weight="600"' if bold else "")
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def answer_to(words: list[str]) -> dict[str, Any]:
    """Result, output and processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        here = list(words)
        if "-o" in here:
            here[here.index("-o") + 1] = folder
        else:
            here += ["-o", folder]
        ran = subprocess.run(
            [sys.executable, "-m", "dsim", *here, "--force"],
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            check=True,
        )
        whole = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ranking = [{name: fleet[name] for name in FOUND} for fleet in whole["ranking"]]
    inputs = {**whole["setup"], "rate": whole["rate"], "gpu_hour": f"{whole['ranking'][0]['price']:g}"}
    plan = {**{name: inputs[name] for name in ASKED}, "ranking": ranking}
    return {
        "command": shlex.join(["dsim", *words]), "date": datetime.date.today().isoformat(),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "digest": digest(words, plan), "plan": plan, "printed": ran.stdout.splitlines(),
    }  # fmt: skip


def main() -> None:
    found = {name: answer_to(command()) for name, command in COMMANDS.items()}
    plan = found["first"]["plan"]
    KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(svg(plan), encoding="utf-8")
    print(title(plan))


if __name__ == "__main__":
    main()
