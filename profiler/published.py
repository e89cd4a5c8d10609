"""Published yields of diffusion models, with workload and source.

Optimus's Table 2 mixes ordinary steps with steps that commit a whole padding block, as when generation runs past an EOS
to a fixed length (`<workload>-fixed`); a server that stops at EOS runs ordinary steps. SDAR-8B's rows were separated by
hand (a std of about 2), the others by a test of calibrate.py (2 / 2.2 of the mean); both agree within 0.15 tokens but
for LongBench (1.69, not 2.2).
"""

from dataclasses import dataclass, replace

from ..engine.commits import CanvasLaw, CommitModel, ImportanceDeltas
from .calibrate import calibrate_commits

BLOCK_LENGTH = 32

# Assumed: FOCUS says that importance grows more for decodable tokens, without figures.
FOCUS_DELTAS = ImportanceDeltas(
    decodable_mean=2.0, decodable_std=1.0, undecodable_mean=0.0, undecodable_std=1.0, distance_slope=0.2
)


# tt-metal #50431, an accuracy evaluation (changes-2026-11.md 1): steps and canvases in buckets of eight; 451 ran to the
# cap of 48.
_COUNTED = ((8, 150.0), (16, 543.0), (24, 467.0), (32, 230.0), (40, 171.0), (47, 103.0), (48, 451.0))
_SUGGESTED = "no distribution is published; production-dllm-serving.md 1.3 suggests it from means: {}"
# Forwards per canvas of DiffusionGemma; the first workload is the default.
CANVAS_LAWS = (
    # by_canvas gives a mean of 22.7 for first and 27.0 for later canvases; a test solves again.
    CanvasLaw(
        "evaluation", 256, 23.0, request_spread=0.78, canvas_spread=0.6258, engine="tt-metal", histogram=_COUNTED,
        by_canvas=(-0.278, 0.034),
        source="tt-metal #50431, an accuracy evaluation, 2,115 canvases: mean 26.6, median 23, 21.3 % at the cap of "
        "48; first canvases 22.7, later ones 27.0; how requests and canvases share the variance is assumed",
    ),
    CanvasLaw(
        "mixed", 256, 14.0, request_spread=0.35, canvas_spread=0.28,
        source=_SUGGESTED.format("log-normal, median 14, spread 0.45 in all"),
    ),
    CanvasLaw(
        "chat", 256, 13.96, canvas_spread=0.3, engine="vLLM",
        # changes-2026-11.md 1
        source="vLLM's counters on an L40S, chat with thinking, 253 canvases: mean 14.6, none of 213 at the cap, a "
        "canvas's time spread by 0.25 to 0.36 of its mean; requests alike is assumed",
    ),
    CanvasLaw("code", 256, 16.0, 0.2, 0.15, source=_SUGGESTED.format("code 12 to 20")),
    CanvasLaw("prose", 256, 26.0, 0.2, 0.2, source=_SUGGESTED.format("prose and mixed 20 to 34")),
    CanvasLaw("fixed-48", 256, 48.0, source="fixed steps, as SGLang's benchmark has them (PR 34061)"),
    CanvasLaw("fixed-16", 256, 16.0, source="fixed steps, as vLLM's blog benchmark has them (2026-06-10)"),
)  # fmt: skip


# Forwards of an editing block of 32 (JointThreshold), whose last changes nothing. By model and task: tokens a forward
# in LLaDA2.1's report (speed mode, one request; production-dllm-serving.md 6.3), and the median that gives 32 / that
# number on average; a test solves again. Spreads are assumed.
EDITING_SPREADS = 0.2, 0.3  # of requests and blocks: standard deviations of the logarithm
EDITING: dict[str, dict[str, tuple[float, float]]] = {
    "LLaDA2.1-mini": {
        "gsm8k": (6.82, 4.396), "humaneval": (12.32, 2.33), "gpqa": (3.62, 8.284), "ifeval": (1.83, 16.39),
        "average": (5.34, 5.616), "random": (2.909, 10.312),
    },
    "LLaDA2.1-flash": {
        "gsm8k": (7.14, 4.198), "humaneval": (13.81, 1.961), "gpqa": (3.95, 7.592), "ifeval": (2.24, 13.39),
        "average": (5.93, 5.057),
    },
}  # fmt: skip
# The released build on random text, not the report's; the data sheet alone would give 16, at 4.3 ms a forward.
_STOCK = (
    "a stock SGLang run on a B200, {}, JointThreshold, random text, one client: 426 tok/s, read as {:.3g} forwards a "
    "block of {}, 6.8 ms each with the host; spreads are assumed"
)


def editing_laws(model: str) -> tuple[CanvasLaw, ...]:
    """Laws of forwards per block edited until no token changes; empty for other models."""
    return tuple(
        CanvasLaw(
            workload, BLOCK_LENGTH, median, *EDITING_SPREADS, most=BLOCK_LENGTH + 17,
            source=_STOCK.format(model, BLOCK_LENGTH / tokens, BLOCK_LENGTH) if workload == "random" else
            f"LLaDA2.1's report, {model}, speed mode: {tokens:g} tokens a forward, which is "
            f"{BLOCK_LENGTH / tokens:.2f} forwards a block of {BLOCK_LENGTH}; spreads between requests and blocks "
            "are assumed",
            engine="SGLang" if workload == "random" else "",
        )
        for workload, (tokens, median) in EDITING.get(model, {}).items()
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


def per_denoise_step(per_forward: float, block_length: int = BLOCK_LENGTH) -> float:
    """Tokens per denoise step, from a figure that also counts the KV-writing forward."""
    return block_length / (block_length / per_forward - 1.0)


_TABLE = "Optimus, Table 2, {} ({}), taken apart: ordinary steps commit {:g} tokens, {:g} of all steps a whole block"


def _table_2(model: str, workload: str, printed: str, mean: float, steps: float) -> tuple[Yield, Yield]:
    """A row of Table 2: up to EOS, and as printed."""
    source = _TABLE.format(workload, f"{model}, {printed}", mean, steps)
    name = workload.lower()
    return (
        Yield(name, mean, 0.0, f"{source}; here the ordinary steps, as when serving stops at EOS"),
        Yield(f"{name}-fixed", mean, steps, f"{source}; here both, as when generation runs to a fixed length"),
    )


_SDAR = (
    Yield(
        "sharegpt-focus",
        2.28,
        0.0,
        "FOCUS, ShareGPT (SDAR-8B): 15.02 tokens computed per token decoded at B=32, serving stops at EOS: "
        "32 / (15.02 - 1) = 2.28 per denoise step; LMDeploy's benchmark samples at temperature 0.8, top-k 1",
        temperature=0.8,
    ),
    Yield(
        "sharegpt",
        4.31,
        0.0,
        "Optimus, Figs 1-3, ShareGPT (SDAR-8B): 3.8 tokens a step at B=32, read as tokens per forward with each "
        "block's KV pass counted: 32 / (32 / 3.8 - 1) = 4.31 per denoise step",
    ),
    _table_2("SDAR-8B", "ShareGPT", "5.29 ± 9.44", 2.2, 0.104)[1],
    Yield(
        "sharegpt-focus",
        3.2,
        0.0,
        "calibrated: with 3.2 per denoise step the twin's closed loops give FOCUS's own throughput (Fig. 6, SDAR-8B, "
        "ShareGPT, threshold 0.8, alpha 1.5); no yield is published at this threshold",
        threshold=0.8,
        temperature=0.8,
    ),
    *_table_2("SDAR-8B", "LMSYS", "4.81 ± 8.80", 2.2, 0.088),
    *_table_2("SDAR-8B", "LongBench", "6.06 ± 10.74", 2.2, 0.130),
    *_table_2("SDAR-8B", "GSM8K", "3.20 ± 5.68", 2.2, 0.034),
    *_table_2("SDAR-8B", "HumanEval", "3.75 ± 5.96", 2.6, 0.039),
    *_table_2("SDAR-8B", "MBPP", "1.96 ± 3.33", 1.67, 0.0097),
    *_table_2("SDAR-8B", "IFEval", "1.88 ± 3.90", 1.5, 0.013),
)

_LLADA2 = (
    Yield(
        "sharegpt-focus",
        2.03,
        0.0,
        "FOCUS publishes no yield for LLaDA2.0-mini: the ordinary steps of Optimus, Table 2, ShareGPT (2.51 ± 4.19), "
        "in FOCUS's harness, which stops at EOS and samples at temperature 0.8, top-k 1",
        temperature=0.8,
    ),
    Yield(
        "sharegpt-focus",
        2.85,
        0.0,
        "assumed, nothing is published of this model at 0.8: its yield at 0.9 (2.03) times SDAR-8B's ratio "
        "(3.2 / 2.28); with it FOCUS comes out 31 to 67 % above its published throughput (research/reproduce "
        "focus-llada2), so that it may be a third too large",
        threshold=0.8,
        temperature=0.8,
    ),
    *_table_2("LLaDA2.0-mini", "ShareGPT", "2.51 ± 4.19", 2.03, 0.0161),
    *_table_2("LLaDA2.0-mini", "LMSYS", "2.52 ± 4.84", 1.82, 0.0233),
    *_table_2("LLaDA2.0-mini", "LongBench", "1.63 ± 1.90", 1.58, 0.0017),
    *_table_2("LLaDA2.0-mini", "GSM8K", "2.61 ± 4.07", 2.18, 0.0145),
    *_table_2("LLaDA2.0-mini", "HumanEval", "6.01 ± 8.51", 3.60, 0.0848),
    *_table_2("LLaDA2.0-mini", "MBPP", "3.34 ± 4.81", 2.75, 0.0203),
    *_table_2("LLaDA2.0-mini", "IFEval", "1.28 ± 1.74", 1.22, 0.0019),
)

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
    "SDAR": ("SDAR-8B", _SDAR),
    "LLaDA2": ("LLaDA2.0-mini", _LLADA2),
    "LLaDA-": ("LLaDA-8B", _LLADA),
    "Dream": ("LLaDA-8B", _LLADA),
}


def published_commits(model: str) -> tuple[CommitModel, ...]:
    """Commit models for a model name; those of another size are marked as borrowed."""
    for prefix, (published, yields) in YIELDS.items():
        if model.startswith(prefix):
            models = tuple(_commit_model(y) for y in yields)
            if model == published:
                return models
            return tuple(replace(m, source=f"borrowed from {published}: {m.source}") for m in models)
    return ()


def _commit_model(y: Yield) -> CommitModel:
    return calibrate_commits(
        y.mean,
        workload=y.workload,
        threshold=y.threshold,
        temperature=y.temperature,
        padding_steps=y.padding_steps,
        source=y.source,
        solved=SOLVED[y.mean],
    )


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
