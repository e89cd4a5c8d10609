"""Production engines step by step: the pictures of docs/engines/. `python benchmarks/engine_pictures.py`

Each is a report's "The engine's steps" (report/closeup.py) for a few requests, as an SVG that follows the browser's
light or dark scheme. The same tree writes the same bytes.
"""

import argparse
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import dsim
from dsim.report.closeup import engine_figure
from dsim.results.run import read_run
from dsim.traces import Trace

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH, LEFT, RIGHT, LANE = 960, 150, 16, 26  # pixels
STYLE = """
svg{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.p{fill:#fff}text{fill:#3c4043}.g{stroke:#dadce0}
.w{stroke:#9aa0a6;stroke-dasharray:3 3}.m,.n,.l{text-anchor:middle}
.n,.l{fill:#fff;font-size:9px}.l{fill:#202124}
@media(prefers-color-scheme:dark){.p{fill:#202124}text{fill:#e8eaed}.g{stroke:#3c4043}.n,.l{fill:#fff}}
"""


@dataclass(frozen=True)
class World:
    """Requests (arrival in ms, prompt, output), policy and profile."""

    policy: str
    profile: str
    requests: tuple[tuple[float, int, int], ...]
    workload: str | None = None


BLOCKS = ((0, 70, 58), (20, 40, 56), (70, 200, 48), (150, 20, 44))
WORLDS = {
    "vllm-ar": World(
        "vllm-ar:3,max_num_batched_tokens=256", "h100-qwen3-8b-ar",
        ((0, 70, 22), (20, 40, 14), (55, 600, 12), (70, 90, 10)),
    ),
    "vllm-diffusion": World(
        "vllm-diffusion:3,max_num_batched_tokens=1024", "h100-diffusiongemma-fp8",
        ((0, 70, 400), (30, 40, 200), (70, 1200, 200), (120, 300, 150)), "code",
    ),
    "sglang-fdfo": World("sglang-fdfo:3", "h100-sdar-8b", BLOCKS),
    "sglang-sync": World("sglang-sync:3", "h100-sdar-8b", BLOCKS),
    "sglang-gemma": World(
        "sglang-gemma:3", "h200x2-diffusiongemma-sglang",
        ((0, 70, 400), (30, 40, 256), (70, 1200, 400), (120, 300, 150)), "code",
    ),
    "lmdeploy-0.18": World("lmdeploy-0.18,max_batch=4", "h100-sdar-8b", BLOCKS),
}  # fmt: skip


def picture(world: World) -> str:
    arrival, prompt, output = (np.array(column) for column in zip(*world.requests, strict=True))
    trace = Trace("a few requests", arrival / 1e3, prompt, output)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        # An EOS is not known before, so work decided ahead is wasted.
        dsim.replay(trace, [world.policy], profile=world.profile, workload=world.workload, eos=True, out=out)
        figure = engine_figure(read_run(out), world.policy, 0, 0.0, "")
    assert figure is not None
    return _svg(world, figure.chart.data)


def _svg(world: World, traces: list[dict[str, Any]]) -> str:
    """One lane per request, dashed while it waits."""
    bars = [
        (1e3 * base, 1e3 * wide, trace["name"], trace["marker"]["color"], deep, about)
        for trace in traces
        for base, wide, deep, about in zip(
            trace["base"], trace["x"], trace["marker"]["opacity"], trace["customdata"], strict=True
        )
    ]
    end = max(base + wide for base, wide, *_ in bars)
    top, scale = 34, (WIDTH - LEFT - RIGHT) / end
    bottom = top + LANE * len(world.requests)

    def at(ms: float) -> str:
        return f"{LEFT + ms * scale:.1f}"

    out = [f'<rect class="p" width="{WIDTH}" height="{bottom + 40}" rx="6"/>']
    x = LEFT
    for trace in traces:
        out.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{trace["marker"]["color"]}"/>')
        out.append(f'<text x="{x + 16}" y="20">{escape(trace["name"])}</text>')
        x += 34 + round(6.4 * len(trace["name"]))
    tick = next(t for t in (10, 20, 50, 100, 200, 500, 1000) if end / t <= 12)
    for k in range(int(end / tick) + 1):
        out.append(f'<path class="g" d="M{at(k * tick)} {top}V{bottom}"/>')
        out.append(f'<text class="m" x="{at(k * tick)}" y="{bottom + 15}">{k * tick}</text>')
    out.append(f'<text class="m" x="{(LEFT + WIDTH) // 2}" y="{bottom + 31}">ms</text>')
    for request, (arrives, prompt, output) in enumerate(world.requests):
        middle = top + LANE * request + LANE // 2
        first = min(base for base, *_, about in bars if about[0] == request)
        out.append(f'<text x="10" y="{middle + 4}">{chr(65 + request)}: {prompt:,} in, {output:,} out</text>')
        out.append(f'<path class="w" d="M{at(arrives)} {middle}H{at(first)}"/>')
    for base, wide, name, ink, deep, (request, step, num, committed) in bars:
        y = top + LANE * request + 3
        about = f"{chr(65 + request)}, step {step}: {name}, {num} computed, {committed} committed"
        out.append(
            f'<rect x="{at(base)}" y="{y}" width="{wide * scale:.1f}" height="{LANE - 6}" fill="{ink}" '
            f'fill-opacity="{deep}"><title>{escape(about)}</title></rect>'
        )
        if wide * scale > 7 * len(str(num)):
            out.append(
                f'<text class="{"n" if deep > 0.6 else "l"}" x="{at(base + wide / 2)}" y="{y + 13}">{num}</text>'
            )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" role="img">'
    title = f"<title>Rows over time under {escape(world.policy)}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, world in WORLDS.items():
        (folder / f"engine-{name}.svg").write_text(picture(world), encoding="utf-8")
    print(f"Wrote {len(WORLDS)} pictures to {folder}")


if __name__ == "__main__":
    main()
