"""Write profiler/published.json: `python -m dsim.research.calibration.publications`.

Optimus's Table 2 mixes ordinary steps with steps that commit a whole padding block, as when generation runs past an EOS
to a fixed length (`<workload>-fixed`); a server that stops at EOS runs ordinary steps. SDAR-8B's rows were separated by
hand (a std of about 2), the others by a test of calibrate.py (2 / 2.2 of the mean); both agree within 0.15 tokens but
for LongBench (1.69, not 2.2).
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsim.engine.commits import CanvasLaw, CommitModel, ImportanceDeltas
from dsim.files.read import read_json
from dsim.files.write import json_text
from dsim.profiler.calibrate import calibrate_commits
from dsim.profiler.published import FILE

BLOCK_LENGTH = 32


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# Assumed: FOCUS says that importance grows more for decodable tokens, without figures.
FOCUS_DELTAS = ImportanceDeltas(
    decodable_mean=2.0, decodable_std=1.0, undecodable_mean=0.0, undecodable_std=1.0, distance_slope=0.2
)


_PUBLISHED = read_json(Path(__file__).with_name("publications.json"))
# Forwards per canvas of DiffusionGemma; the first workload is the default: tt-metal #50431, an accuracy evaluation
# (changes-2026-11.md 1), in buckets of eight steps, of which by_canvas gives a mean of 22.7 for first and 27.0 for
# later canvases; a test solves again.
CANVAS_LAWS = tuple(
    CanvasLaw(**{key: _frozen(value) for key, value in row.items()}) for row in _PUBLISHED["canvas_laws"]
)
# Forwards of an editing block of 32 (JointThreshold), whose last changes nothing. By model and task: tokens a forward
# in LLaDA2.1's report (speed mode, one request; production-dllm-serving.md 6.3), and the median that gives 32 / that
# number on average; a test solves again. Spreads are assumed.
EDITING_SPREADS = 0.2, 0.3  # of requests and blocks: standard deviations of the logarithm
# A third entry is another source: the released build on random text, where the data sheet alone would give 16 forwards
# at 4.3 ms; LLaDA2.2-mini's own decoder, whose rules are those of SGLang's JointThresholdInDel.
EDITING: dict[str, Any] = _PUBLISHED["editing"]


def editing_laws(model: str) -> tuple[CanvasLaw, ...]:
    """Laws of forwards per block edited until no token changes; empty for other models."""
    report = f"LLaDA2.1's report, {model}, speed mode: {{:g}} tokens a forward, which is {{:.2f}} forwards a block of "
    report += f"{BLOCK_LENGTH}; spreads between requests and blocks are assumed"
    cap = BLOCK_LENGTH + 17 + model.startswith("LLaDA2.2")
    return tuple(
        CanvasLaw(
            workload, BLOCK_LENGTH, median, *EDITING_SPREADS, most=cap, engine="SGLang" * ("SGLang" in "".join(other)),
            source=other[0] if other else report.format(tokens, BLOCK_LENGTH / tokens),
        )
        for workload, (tokens, median, *other) in EDITING.get(model, {}).items()
    )  # fmt: skip


@dataclass(frozen=True)
class Yield:
    """The yield of a workload's denoise steps."""

    workload: str
    mean: float  # tokens of an ordinary denoise step
    padding_steps: float  # share of steps that commit a whole padding block
    source: str
    threshold: float = 0.9
    temperature: float | None = None


_TABLE = "Optimus, Table 2, {} ({}), taken apart: ordinary steps commit {:g} tokens, {:g} of all steps a whole block"


def _table_2(model: str, workload: str, printed: str, mean: float, steps: float) -> tuple[Yield, Yield]:
    """A row of Table 2: up to EOS, and as printed."""
    source = _TABLE.format(workload, f"{model}, {printed}", mean, steps)
    name = workload.lower()
    return (
        Yield(name, mean, 0.0, f"{source}; here the ordinary steps, as when serving stops at EOS"),
        Yield(f"{name}-fixed", mean, steps, f"{source}; here both, as when generation runs to a fixed length"),
    )


def _yields(model: str) -> tuple[Yield, ...]:
    """A model's yields in published.json: those of other sources, and rows of Table 2."""
    own, rows = (_PUBLISHED[key][model] for key in ("yields", "table_2"))
    return (*(Yield(**row) for row in own), *(one for row in rows for one in _table_2(model, *row)))


_FIGURE_5 = "Fast-dLLM, Fig. 5, GSM8K 5-shot (LLaDA-8B): {} tokens a step at threshold {}; scatter assumed"
_BOARD = "d3LLM's leaderboard, Fast-dLLM (LLaDA-8B): {} tokens a forward, GSM8K 2.77; threshold and scatter assumed"
_LLADA = (
    *(
        Yield("gsm8k", mean, 0.0, _FIGURE_5.format(mean, threshold), threshold, 0.0)
        for threshold, mean in ((0.9, 3.25), (0.8, 4.24), (0.7, 5.12), (0.6, 6.17), (0.5, 7.01))
    ),
    *(
        Yield(workload, mean, 0.0, _BOARD.format(mean), temperature=0.0)
        for workload, mean in (("math", 1.97), ("mbpp", 2.13), ("humaneval", 2.56))
    ),
)

# By model name's prefix: the published model and its yields, the default workload first.
YIELDS: dict[str, tuple[str, tuple[Yield, ...]]] = {
    "SDAR": ("SDAR-8B", _yields("SDAR-8B")),
    "LLaDA2": ("LLaDA2.0-mini", _yields("LLaDA2.0-mini")),
    "LLaDA-": ("LLaDA-8B", _LLADA),
    "Dream": ("LLaDA-8B", _LLADA),
}


def _commit_model(y: Yield) -> CommitModel:
    model = calibrate_commits(
        y.mean,
        workload=y.workload,
        threshold=y.threshold,
        temperature=y.temperature,
        source=y.source,
        solved=SOLVED[y.mean],
    )
    padding = float(f"{padding_blocks(y.padding_steps, y.mean, BLOCK_LENGTH):.4g}")
    return replace(model, padding_share=padding)


def padding_blocks(steps: float, mean: float, block_length: int) -> float:
    """The share of padding blocks from that of steps; an ordinary block takes B / mean steps."""
    ordinary = block_length / mean
    return steps * ordinary / ((1.0 - steps) + steps * ordinary)


# `calibrate.solve` by mean: chance at the frontier, spread of steps. A test solves again.
SOLVED: dict[float, tuple[float, float]] = {
    4.31: (0.91015, 0.53),
    2.28: (0.52513, 0.97),
    3.2: (0.80761, 0.91),
    2.2: (0.48511, 0.97),
    2.6: (0.67255, 0.97),
    1.67: (0.1855, 1.16),
    1.5: (0.10494, 1.28),
    2.03: (0.38422, 1.03),
    1.82: (0.26683, 1.09),
    1.58: (0.14891, 1.16),
    2.18: (0.47439, 0.97),
    3.6: (0.86002, 0.72),
    2.75: (0.73355, 0.97),
    2.85: (0.75256, 1.03),
    1.22: (0.0095872, 2.09),
    1.97: (0.35421, 1.03),
    2.13: (0.44867, 0.97),
    2.56: (0.64041, 1.03),
    3.25: (0.82347, 0.84),
    4.24: (0.90789, 0.53),
    5.12: (0.94515, 0.22),
    6.17: (0.96476, 0.03),
    7.01: (0.97504, 0.03),
}


def main() -> None:
    commits = [
        {"prefix": prefix, "model": model, "models": [asdict(_commit_model(y)) for y in yields]}
        for prefix, (model, yields) in YIELDS.items()
    ]
    editing = {model: [asdict(law) for law in editing_laws(model)] for model in EDITING}
    data = {
        "commits": commits, "editing": editing, "canvas_laws": [asdict(law) for law in CANVAS_LAWS],
        "focus": asdict(FOCUS_DELTAS),
    }  # fmt: skip
    FILE.write_text(json_text(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
