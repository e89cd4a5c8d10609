"""The table of `benchmarks/vllm_cpu.sh`, printed and put between benchmarks/validation.md's two marks.

python benchmarks/vllm_cpu_table.py OUT DOCS COUNT RATE ...        DOCS: the page, or - for none
"""

import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- vllm-cpu: benchmarks/vllm_cpu.sh writes this -->", "<!-- /vllm-cpu -->"
FEW = 1.2  # times the noise floor: limit of an engine-side MAPE
OWN = 0.01  # of the mean e2el: limit of the rule's error at measured prices


def cell(out: Path, name: str) -> dict[str, Any]:
    (found,) = json.loads((out / name / "compare.json").read_text())["cells"]
    assert isinstance(found, dict)
    return found


def e2el(found: dict[str, Any]) -> tuple[float, float]:
    """Error of the mean, MAPE."""
    metric = found["metrics"]["e2el"]
    return metric["error"]["mean"], metric["requests"]["mape"]


def rule(found: dict[str, Any]) -> float:
    """The rule's error at the engine's own prices, of its mean e2el."""
    part = found["parts"]["metrics"]["e2el"]
    share: float = part["scheduling"] / part["measured"]
    return share


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def lines(out: Path, rates: list[str]) -> list[str]:
    """The table, and its meaning."""
    rows, kept, worst = [], [], 0.0
    for rate in rates:
        noise, inside = e2el(cell(out, f"noise-{rate}")), e2el(cell(out, f"noise-{rate}-engine"))
        told = e2el(cell(out, f"compared-{rate}"))
        engine = [cell(out, f"compared-{run}-{rate}-engine") for run in ("measured", "again")]
        mapes, own = [e2el(found)[1] for found in engine], [rule(found) for found in engine]
        mean = cell(out, f"compared-{rate}")["metrics"]["e2el"]["measured"]["mean"]
        cells = [
            rate, f"{mean:.0f} ms", f"{signed(noise[0])}, {percent(noise[1])}",
            f"{signed(told[0])}, {percent(told[1])}", percent(inside[1]), ", ".join(map(percent, mapes)),
            ", ".join(f"{100 * abs(share):.2f} %" for share in own),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
        kept.append((abs(told[0]) <= abs(noise[0]), max(mapes) <= FEW * inside[1]))
        worst = max(worst, *map(abs, own))
    means, few = (sum(each) for each in zip(*kept, strict=True))
    return [
        "| req/s | mean e2el | noise floor: mean, MAPE | prediction: mean, MAPE | noise floor in the engine: MAPE | "
        "prediction in the engine: MAPE, of both runs | the rule alone, of both runs |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Asked was a mean e2el within the noise floor: so it is in {means} of {len(rates)} loads; in the engine a "
        f"MAPE of at most {FEW} times it: in {few} of {len(rates)}; and a rule that is less than {percent(OWN)} off at "
        f"each run's own prices of steps: it is {100 * worst:.2f} % at worst.",
    ]


def main() -> None:
    out, docs, count, *rates = sys.argv[1:]
    profile = json.loads((Path(out) / "vllm-cpu.json").read_text())
    fit = profile["fit"]
    valid = "not valid" if fit["doubts"] else "valid"
    about = (
        f"{date.today().isoformat()}, two cores of {processor()}, {count} requests a load. The profile calls itself "
        f"{valid}: fitted steps are {percent(fit['residual'])} off (root mean square). "
        f"{1e3 * profile['frontend']:.1f} ms lie between a client and the engine."
    )
    text = "\n".join([about, "", *lines(Path(out), rates)])
    print(text)
    put(docs, BEGIN, END, text)


def put(docs: str, begin: str, end: str, text: str) -> None:
    """Between two marks of a page; `-`: no page."""
    if docs == "-":
        return
    page = Path(docs).read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    Path(docs).write_text(f"{before}{begin}\n{text}\n{end}{after}")
    print(f"Wrote {docs}")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
