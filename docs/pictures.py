"""Make the pictures of docs/concepts.md and docs/report.md: `python docs/pictures.py`

Needs Chromium for the second page's, a photograph of the report that its command writes. What it shows stands in
docs/images/report.json; tests/test_pictures.py runs the command again and compares.
"""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from dsim.report.run_page import run_page
from dsim.results.run import read_run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
REPORT, FIGURES = ROOT / "docs" / "report.md", ROOT / "benchmarks" / "ranking.md"
PHOTO, KEPT = FOLDER / "report.png", FOLDER / "report.json"
WINDOW = (1200, 700)  # pixels

INK, PALE, SEEN = "#7d8694", "#c9ced6", "#d9822b"  # on light and on dark; SEEN: computed in this step
# Decided before, now, masked, not begun; a blank is any that is computed.
FILLS = {"d": "#7fb2ea", "n": "#2f7ed8", "m": PALE, ".": "none", " ": "none"}
SIDE, PITCH = 18, 22  # pixels of a cell

# A row is a step.
AUTOREGRESSIVE = ("n.......", "dn......", "ddn.....", "dddn....")
DIFFUSION = ("mnmmnmmm", "ndnmdmnm", "dddndmdn", "dddddndd")
# Capitals are computed.
GRANULARITIES = {
    "Whole block": "DDDNMDNMMNMMMMMM",
    "Fixed chunk of 4": "dddNMdNMmmmmmmmm",
    "Elastic, GPU idle": "dddNMdNMMNMMMMMM",
    "Elastic, GPU busy": "dddNMdmmmmmmmmmm",
}
# Colour, and the side of its line that the name stands on.
LINES = {
    "lmdeploy-bd32": ("#d9822b", "end"), "optimus": ("#2f7ed8", "end"),
    "chunk:8": ("#3aa675", "start"), "ar": ("#8a63c9", "start"),
}  # fmt: skip
MOST, NAMED_AT, LAST = 100.0, 85.0, 12.0  # ms a token: of the axis, of the names; req/s
TITLES = {
    "steps": "Autoregressive models decide one token a step, block-diffusion models some of a block",
    "granularity": "Positions that a step computes: whole block, fixed chunk and elastic chunk",
    "load": "Latency per token against load: whole blocks are fast when idle and overloaded first",
}


def svg(name: str, width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    about = f'role="img" aria-label={quoteattr(TITLES[name])} font-family="system-ui, sans-serif" font-size="13">'
    return "\n".join([head + about, f"<title>{escape(TITLES[name])}</title>", *parts, "</svg>", ""])


def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start", *, bold: bool = False) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}"' + (' font-weight="600"' if bold else "")
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def cell(x: int, y: int, state: str, side: int = SIDE) -> str:
    edge = SEEN if state in "DNM " else PALE if state == "." else "none"
    style = f'fill="{FILLS[state.lower()]}" stroke="{edge}" stroke-width="2"'
    return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="3" {style}/>'


def row(x: int, y: int, states: str) -> list[str]:
    return [cell(x + PITCH * i, y, state) for i, state in enumerate(states)]


def key(y: int, *entries: tuple[int, str, str]) -> list[str]:
    """(x, state, what it means)."""
    return [part for x, state, said in entries for part in (cell(x, y, state, 12), text(x + 18, y + 11, said))]


def steps() -> str:
    out = []
    for x, title, states in (
        (20, "Autoregressive: one new token a step", AUTOREGRESSIVE),
        (330, "Block diffusion: some of a block a step", DIFFUSION),
    ):
        out.append(text(x, 24, title, bold=True))
        for i, step in enumerate(states):
            out += [text(x, 54 + 26 * i, f"step {i + 1}"), *row(x + 55, 40 + 26 * i, step)]
    masked = "masked: computed, not decided yet"
    out += key(160, (75, "d", "decided before"), (215, "n", "decided in this step"), (385, "m", masked))
    return svg("steps", 640, 185, out)


def granularity() -> str:
    [block] = {states.lower().replace("n", "m") for states in GRANULARITIES.values()}
    asked = f"One step of a request: {len(block)} positions of a block, {block.count('d')} decided already"
    out = [text(20, 24, asked, bold=True)]
    for i, (name, states) in enumerate(GRANULARITIES.items()):
        y = 42 + 34 * i
        computed = f"{sum(map(str.isupper, states))} computed, {states.count('N')} decided"
        out += [text(20, y + 14, name), *row(160, y, states), text(525, y + 14, computed)]
    meaning = ((20, "d", "decided before"), (160, "n", "decided in this step"), (340, "m", "masked"))
    return svg("granularity", 700, 205, [*out, *key(182, *meaning, (440, " ", "computed in this step"))])


def measured() -> dict[str, list[tuple[float, float]]]:
    """(req/s, median of norm_latency in ms) by policy, of eager mode's first tables of benchmarks/ranking.md."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LINES}
    rates: list[float] = []
    for line in FIGURES.read_text(encoding="utf-8").partition("\nFlooded")[0].splitlines():
        name, *cells = [part.strip(" `") for part in line.strip("|").split("|")]
        if name == "policy":
            rates = [float(part.removesuffix(" req/s")) for part in cells]
        elif name in found:
            medians = [float(re.findall(r"[\d.]+", part)[0]) for part in cells]
            found[name] += zip(rates, medians, strict=True)
    return {name: sorted(points) for name, points in found.items()}


def until(points: list[tuple[float, float]], most: float) -> list[tuple[float, float]]:
    """The line up to where it first exceeds `most`."""
    for i, (rate, latency) in enumerate(points):
        if latency > most:
            before, low = points[i - 1]
            return [*points[:i], (before + (rate - before) * (most - low) / (latency - low), most)]
    return points


def load() -> str:
    def at(rate: float, latency: float) -> tuple[float, float]:
        return round(60 + 500 * rate / LAST, 1), round(255 - 215 * latency / MOST, 1)

    out = [text(60, 22, "Latency per token (median, ms) against load: one A100, estimated", bold=True)]
    for latency in range(0, int(MOST) + 1, 25):
        y = at(0, latency)[1]
        out.append(f'<line x1="60" x2="560" y1="{y:g}" y2="{y:g}" stroke="{PALE}" stroke-width="0.7"/>')
        out.append(text(52, y + 4, str(latency), anchor="end"))
    out += [text(at(rate, 0)[0], 273, str(rate), anchor="middle") for rate in range(0, int(LAST) + 1, 4)]
    out.append(text(310, 292, "requests per second", anchor="middle"))
    for name, points in measured().items():
        colour, anchor = LINES[name]
        line = " ".join("{:g},{:g}".format(*at(*point)) for point in until(points, MOST))
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2.5" points="{line}"/>')
        x, y = at(*until(points, NAMED_AT)[-1])
        out.append(text(x + (-10 if anchor == "end" else 10), y + 4, name, colour, anchor, bold=True))
    return svg("load", 640, 300, out)


SVGS = {"steps": steps, "granularity": granularity, "load": load}


def command() -> list[str]:
    """Of docs/report.md, without `dsim`."""
    lines = re.sub(r"\\\n\s*", "", REPORT.read_text(encoding="utf-8"))
    [line] = re.findall(r"^dsim (replay .*)$", lines, re.M)
    return shlex.split(line)


def shown(folder: Path) -> dict[str, Any]:
    """Run the command into a folder: the answer and the numbers at the top of the report's page."""
    words = command()
    words[words.index("-o") + 1] = str(folder)
    subprocess.run([sys.executable, "-m", "dsim", *words], stdout=subprocess.DEVNULL, check=True)
    page = run_page(read_run(folder))
    tiles = {number.label: [value for _, value in number.values] for number in page.numbers}
    return {"command": shlex.join(["dsim", *command()]), "answer": page.answer, "tiles": tiles}


def kept() -> dict[str, Any]:
    """What the photograph shows."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def digest() -> str:
    """Of the photograph."""
    return hashlib.sha256(PHOTO.read_bytes()).hexdigest()[:16]


def photograph() -> None:
    """Keep the first screen of the command's report, and what it says."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser, "no chromium on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said = shown(Path(folder) / "run")
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=10000",
                f"--user-data-dir={folder}/browser", f"--screenshot={PHOTO}", "--window-size={},{}".format(*WINDOW),
                (Path(folder) / "run" / "report.html").as_uri(),
            ],
            stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    KEPT.write_text(json.dumps({**said, "picture": digest()}, indent=1) + "\n", encoding="utf-8")
    print(f"![A report: {said['answer']}](images/{PHOTO.name})")


def main() -> None:
    for name, draw in SVGS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
    photograph()


if __name__ == "__main__":
    main()
