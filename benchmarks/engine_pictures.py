"""Production engines step by step: the pictures of docs/engines/. `python benchmarks/engine_pictures.py`

Each draws the rows of a run's steps (steps.parquet) for a few requests, as an SVG that follows the browser's light or
dark scheme. The same tree writes the same bytes.
"""

import argparse
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

import dsim
from dsim.engine.step import Phase
from dsim.results.run import Run
from dsim.traces import Trace

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH, LEFT, RIGHT, LANE = 960, 150, 16, 26  # pixels
STYLE = """
svg{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.p{fill:#fff}text{fill:#3c4043}.g{stroke:#dadce0}
.w{stroke:#9aa0a6;stroke-dasharray:3 3}.m,.n,.l{text-anchor:middle}
.n,.l{fill:#fff;font-size:9px}.l{fill:#202124}
@media(prefers-color-scheme:dark){.p{fill:#202124}text{fill:#e8eaed}.g{stroke:#3c4043}.n,.l{fill:#fff}}
"""


PHASES = {
    Phase.PREFILL: ("prefill", "#D55E00"),
    Phase.DENOISE: ("denoise", "#0072B2"),
    Phase.FLUSH: ("keys of committed tokens (commit, encode)", "#009E73"),
    Phase.IDLE: ("ended already, computed for nothing", "#9aa0a6"),
}


@dataclass(frozen=True)
class Bar:
    """A request's row in a step."""

    start: float  # ms
    width: float  # ms
    phase: Phase
    request: int
    step: int
    num_tokens: int  # computed
    num_committed: int
    depth: float  # opacity


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
        "sglang-gemma:3", "h200x2-diffusiongemma/sglang",
        ((0, 70, 400), (30, 40, 256), (70, 1200, 400), (120, 300, 150)), "code",
    ),
    "lmdeploy-0.18": World("lmdeploy-0.18,max_batch=4", "h100-sdar-8b", BLOCKS),
}  # fmt: skip


def picture(world: World) -> str:
    arrival, prompt, output = (np.array(column) for column in zip(*world.requests, strict=True))
    trace = Trace("a few requests", arrival / 1e3, prompt, output)
    with tempfile.TemporaryDirectory() as folder:
        # An EOS is not known before, so work decided ahead is wasted.
        run = dsim.replay(
            trace, [world.policy], profile=world.profile, workload=world.workload, eos=True, out=Path(folder) / "run"
        ).run
        return _svg(world, bars_of(run, world.policy))


def bars_of(run: Run, policy: str) -> list[Bar]:
    """Darker: more of the computed positions commit. A repeated pass over committed tokens is pale."""
    steps, lists = run.steps(policy), run.step_lists(policy)
    requests, offsets = lists["requests"]
    words = lists["commits"][0].reshape(len(requests), -1)
    begin, flushed = float(steps["start"].min()), set[tuple[int, int]]()
    bars = []
    for row, i in enumerate(np.repeat(np.arange(len(steps["start"])), np.diff(offsets))):
        phase = Phase(int(lists["phases"][0][row]))
        request, step, computed = int(requests[row]), int(steps["step"][i]), int(lists["num_tokens"][0][row])
        committed = sum(int(word).bit_count() for word in words[row])
        share = committed / max(1, computed)
        if phase == Phase.FLUSH:
            share = 0.0 if (request, step - 1) in flushed else 1.0
            flushed.add((request, step))
        depth = 1.0 if phase in (Phase.PREFILL, Phase.IDLE) else 0.35 + 0.65 * min(1.0, 2 * share)
        start, end = float(steps["start"][i]), float(steps["start"][i] + steps["latency"][i])
        bars.append(
            Bar(
                1e3 * (start - begin), 1e3 * (0.94 * (end - start)), phase, request, step, computed, committed,
                round(depth, 2),
            )
        )  # fmt: skip
    return sorted(bars, key=lambda bar: list(PHASES).index(bar.phase))


def _svg(world: World, bars: list[Bar]) -> str:
    """One lane per request, dashed while it waits."""
    end = max(bar.start + bar.width for bar in bars)
    top, scale = 34, (WIDTH - LEFT - RIGHT) / end
    bottom = top + LANE * len(world.requests)

    def at(ms: float) -> str:
        return f"{LEFT + ms * scale:.1f}"

    out = [f'<rect class="p" width="{WIDTH}" height="{bottom + 40}" rx="6"/>']
    x = LEFT
    for phase in dict.fromkeys(bar.phase for bar in bars):
        name, ink = PHASES[phase]
        out.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{ink}"/>')
        out.append(f'<text x="{x + 16}" y="20">{escape(name)}</text>')
        x += 34 + round(6.4 * len(name))
    tick = next(t for t in (10, 20, 50, 100, 200, 500, 1000) if end / t <= 12)
    for k in range(int(end / tick) + 1):
        out.append(f'<path class="g" d="M{at(k * tick)} {top}V{bottom}"/>')
        out.append(f'<text class="m" x="{at(k * tick)}" y="{bottom + 15}">{k * tick}</text>')
    out.append(f'<text class="m" x="{(LEFT + WIDTH) // 2}" y="{bottom + 31}">ms</text>')
    for request, (arrives, prompt, output) in enumerate(world.requests):
        middle = top + LANE * request + LANE // 2
        first = min(bar.start for bar in bars if bar.request == request)
        out.append(f'<text x="10" y="{middle + 4}">{chr(65 + request)}: {prompt:,} in, {output:,} out</text>')
        out.append(f'<path class="w" d="M{at(arrives)} {middle}H{at(first)}"/>')
    for bar in bars:
        name, ink = PHASES[bar.phase]
        y = top + LANE * bar.request + 3
        about = (
            f"{chr(65 + bar.request)}, step {bar.step}: {name}, {bar.num_tokens} computed, "
            f"{bar.num_committed} committed"
        )
        out.append(
            f'<rect x="{at(bar.start)}" y="{y}" width="{bar.width * scale:.1f}" height="{LANE - 6}" fill="{ink}" '
            f'fill-opacity="{bar.depth}"><title>{escape(about)}</title></rect>'
        )
        if bar.width * scale > 7 * len(str(bar.num_tokens)):
            kind = "n" if bar.depth > 0.6 else "l"
            centre = at(bar.start + bar.width / 2)
            out.append(f'<text class="{kind}" x="{centre}" y="{y + 13}">{bar.num_tokens}</text>')
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
