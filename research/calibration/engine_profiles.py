"""Profiles of production engines with forwards fitted to published runs; nothing was measured here.

Whole forwards of the rows named in `source` are fitted. Attention and KV reads keep the data sheets' terms, so longer
prompts are predicted. Figures and sections are production-dllm-serving.md's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.latency import Features
from dsim.profiler.calibrate import SPREAD_SOURCE
from dsim.profiler.hardware import gpu
from dsim.profiler.known import drafted
from dsim.profiler.models import BYTES, model
from dsim.profiler.profile import Fit, Profile, Provenance, digits
from dsim.profiler.roofline import roofline

from .publications import EDITING

CANVAS = 256
FIXED_48 = "fixed-48", round(CANVAS / 48, 4)  # the law of SGLang's benchmark, and tokens a denoising forward


@dataclass(frozen=True)
class Published:
    """Points (tokens, s) of forwards, at about `keys` visible keys a row of `row` tokens."""

    points: tuple[tuple[float, float], ...]
    row: int
    keys: float
    source: str
    workload: str  # of these forwards: a law of the profile, or a step's drafts
    tokens: float  # tokens a (for a canvas: denoising) forward
    host_step: float = 0.0  # s of the scheduler, not in the points
    host_request: float = 0.0
    overlap: bool = True  # host and device work at once
    weight_bytes: int = BYTES  # bytes a parameter
    terms: Mapping[str, float] = field(default_factory=dict)  # of the latency model, if known; else the data sheet's
    uncertainty: float = 0.1
    most_tokens: float = 0.0  # of a published step, if the last point is assumed


def engine_profile(device: str, shape: str, runs: Published, tp: int = 1, **said: str) -> Profile:
    """A roofline, its layers bent so that whole forwards pass through the points."""
    base = roofline(
        gpu(device), model(shape), tp, name=said["name"], description=said["description"], date=said["date"]
    )
    # The points include head and sampler, unless known separately.
    terms: dict[str, Any] = {"head": 0.0, "sample": 0.0, **dict(runs.terms)}
    roof = replace(base.latency, **terms)
    seen = min(runs.keys, roof.window + runs.row)
    row = {"sum_q_kv": runs.row * runs.keys, "sum_kv": runs.keys, "window_q_kv": runs.row * seen, "window_kv": seen}

    keys_alone = replace(
        roof, knots=((0.0, 0.0),), slope=0.0, sequence=0.0, launch=0.0, host_step=0.0, host_request=0.0
    )

    def known(tokens: float) -> float:
        """s of attention (and head and sampler, if known) of whole rows with `tokens` in all."""
        rows = tokens / runs.row
        columns: dict[str, Any] = {name: number * rows for name, number in row.items()}
        columns |= {"tokens": tokens, "head_rows": tokens, "sampled_rows": tokens, "batch": rows}
        return keys_alone.step(Features(**columns, prefill_tokens=0))

    knots = tuple((x, digits(y - known(x))) for x, y in runs.points)
    (x0, y0), (x1, y1) = runs.points[-2:]
    per_token = (known(x1) - known(x0)) / (x1 - x0)
    latency = replace(
        roof, knots=knots, slope=digits((y1 - y0) / (x1 - x0) - per_token), host_step=runs.host_step,
        host_request=runs.host_request, overlap=runs.overlap, cache_overhead=(),
        launch=0.0, eviction=0.0,  # in the points
    )  # fmt: skip
    memory = replace(base.memory, weight_bytes=base.memory.weight_bytes * runs.weight_bytes // BYTES, utilisation=0.9)
    return replace(
        base,
        origin="calibrated",
        implementation=said["implementation"],
        latency=latency,
        memory=memory,
        fit=Fit((runs.points[0][0], runs.most_tokens or runs.points[-1][0]), None, None, runs.uncertainty),
        provenance=Provenance(
            (runs.source, *base.provenance.sources),
            said["date"],
            base.provenance.tool_version,
            settings={"calibrated_yield": runs.tokens, "calibrated_workload": runs.workload},
        ),
    )


def _line(base: float, slope: float, row: int, rows: int) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), digits(base + slope * x)) for x in (row, row * rows))


# vLLM: 50 forwards (prefill, 48, commit) of 0.569, 1.281 and 2.226 s at 1, 4 and 8 rows of 256 tokens (6.1).
VLLM_GEMMA = Published(
    _line(6.65e-3, 18.5e-6, CANVAS, 8),
    CANVAS,
    384,
    "SGLang's benchmark README (PR 34061), H200 TP 2, 48 fixed steps, prompts of 128: vLLM 0.28 0.569, 1.281, 2.226 s "
    "at 1, 4, 8 concurrent, read as 50 forwards of 6.65 ms + 18.5 us a token",
    *FIXED_48,
)
# SGLang: 49 forwards. In step (sync) 15.1, 28.8 and 50.1 ms; FDFO 1.4 to 2.3 ms more, its scheduler's share. Its
# attention (extend_attention.py, Triton; required of DiffusionGemma on Hopper): a block of 64 queries of a head (32
# where heads are 512 wide) reads its row's keys in tiles of 64, in one stage, so nothing overlaps. With a GPU's 8 heads
# a canvas is 32 such blocks, or 64: four canvases, or two, fill 132 multiprocessors. Kernel, head and sampler were
# timed on an H200 (research/calibration/sglang_attention.py), without the exchange between the GPUs; nothing is fitted
# to longer prompts.
MEASURED = json.loads((Path(__file__).parent / "sglang_attention.json").read_text())["terms"]
SGLANG_TERMS = {
    "walk": MEASURED["walk, all"],
    "walk_rows": 2,
    "window_walk": MEASURED["walk, window"],
    "window_walk_rows": 4,
    "attention": MEASURED["attention, all"],
    "window_attention": MEASURED["attention, window"],
    "dense": 1.0,
    "head": MEASURED["head"],
    "sample": MEASURED["sample"],
}
SGLANG_GEMMA = Published(
    ((256.0, 15.1e-3), (1024.0, 28.8e-3), (2048.0, 50.1e-3)),
    CANVAS,
    384,
    "SGLang's benchmark README (PR 34061), H200 TP 2, 48 fixed steps, prompts of 128: sync 0.741, 1.409, 2.455 s and "
    "FDFO 0.810, 1.521, 2.561 s at 1, 4, 8 concurrent, read as 49 forwards; its attention kernel, head and sampler "
    "timed on an H200 (research/calibration/sglang_attention.py)",
    *FIXED_48,
    host_step=1.5e-3,
    host_request=0.1e-3,
    overlap=False,
    terms=SGLANG_TERMS,
)
# One point, batch 1: 17 forwards a canvas of 1,008 tokens a second; the data sheet's slope at FP8.
BLOG_GEMMA = Published(
    _line(14.9e-3 - CANVAS * 9.0e-6, 9.0e-6, CANVAS, 8),
    CANVAS,
    1664,
    "vLLM's blog of 2026-06-10, H100, FP8, batch 1, 1024/1024 tokens, 16 fixed steps: 1,008 tok/s, read as 17 forwards "
    "a canvas of 14.9 ms; what more rows cost is assumed (9 us a token, half of what the H200s' bf16 runs show)",
    "fixed-16",
    CANVAS / 16,
    weight_bytes=1,
    uncertainty=0.3,
    most_tokens=CANVAS,
)
# Autoregressive: 149 tok/s alone and 5,794 at 64 (6.4): 6.71 and 11.05 ms a forward.
QWEN_AR = Published(
    ((1.0, 6.71e-3), (64.0, 11.05e-3)),
    1,
    1000,
    "DreamShift's report, Qwen3-8B on SGLang, H100, AIME: 149 tok/s at concurrency 1 and 5,794 at 64; a context "
    "of 1,000 tokens assumed (1,200 would leave nothing but KV reads between the two)",
    drafted((1.0,)),
    1.0,
)
# The same GPU and shape with its speculation: a forward verifies three drafts and the next token. With half of them
# accepted (assumed) it yields 1.875 tokens, in 6.9 and 18.7 ms.
SDAR_DRAFTS = (1.0, 0.5, 0.5, 0.5)
SDAR_TOKENS = float(np.cumprod(SDAR_DRAFTS).sum())
SDAR_SGLANG = Published(
    ((4.0, SDAR_TOKENS / 272), (256.0, 64 * SDAR_TOKENS / 6414)),
    4,
    1000,
    "DreamShift's report, SDAR-8B speculative (N=3, greedy) on SGLang, H100, AIME: 272 tok/s at concurrency 1 and "
    "6,414 at 64; each draft accepted with probability 0.5 and a context of 1,000 tokens assumed",
    drafted(SDAR_DRAFTS),
    SDAR_TOKENS,
    overlap=False,
    uncertainty=0.3,
)
# LLaDA2.1-mini: a forward of 128 rows of short prompts takes 90 ms of kernels and 5.5 ms of the host; at 72 rows and
# 4,900 keys attention took 24.1 ms, 4.5 of them the data sheet's KV reads. The times at 32 and 512 tokens, and 1.05 ms
# a row, are fitted to 592, 2,451 and 3,412 tok/s (6.2). FDFO is published at 1.89 times sync's tok/s, which pays the
# scheduler's share of a row once a round and the rest (kernels, the decoder's loop over rows) in every forward: 0.314
# and 0.736 ms at 128 clients, where all on either side would be 1.04 and 2.25 times. The ratio's conditions are
# assumed.
LLADA21_SGLANG = Published(
    ((32.0, 4.78e-3), (512.0, 14.7e-3), (4096.0, 90e-3)),
    32,
    250,
    "SGLang issue 33322 and its report, LLaDA2.1-mini, JointThreshold, H20, a contributor's tuned fork, gsm8k: 592, "
    "2,451 and 3,412 tok/s at concurrency 1, 16 and 128; 90 ms of kernels at 4,096 tokens, 5.5 ms of host a forward; "
    "prompts of 64 tokens that no cache holds and outputs of 256 assumed; FDFO 1.89 times sync, at 128 clients assumed",
    "gsm8k",
    EDITING["LLaDA2.1-mini"]["gsm8k"][0],
    host_step=5.5e-3,
    host_request=0.314e-3,
    overlap=False,
    # Attention of short windows; no less in a dense pass.
    terms={"attention": 1.74e-9, "dense": 1.0, "sequence": 0.736e-3},
    uncertainty=0.3,
)
# The same model in its report, on a build of SGLang and an unnamed GPU: a forward of one row gives its three
# throughputs in bf16 within 10 % (6.3), prompts included, a block a forward. Read without prompts, they say 7.5 ms a
# block more. More rows cost as on an H100's data sheet, in proportion.
REPORT_FORWARD = 5.0e-3  # s
REPORT = (
    "LLaDA2.1's report, LLaDA2.1-mini, speed mode, bf16, one request: 1,497, 1,081 and 339 tok/s at 12.32, 6.82 and "
    "1.83 tokens a forward, read as 5.0 ms a forward, of prompts too; the GPU is not named, an H100 assumed"
)
DATE = "2026-11-22"


def of_the_report(base: Profile) -> Profile:
    """The roofline of LLaDA2.1-mini with the time of the report's forwards."""
    roof = replace(base.latency, launch=0.0, host_step=0.0, host_request=0.0)
    keys = 400  # a short prompt and its answer: under 1 % of the forward depends on it
    whole = roof.step(Features(32, 32 * keys, keys, 32, 32, 1, 0))
    scaled = roof.scaled(REPORT_FORWARD / whole)
    terms: dict[str, Any] = {
        name: digits(getattr(scaled, name)) for name in ("slope", "attention", "kv_read", "head", "sample", "eviction")
    }
    latency = replace(scaled, knots=tuple((x, digits(y)) for x, y in scaled.knots), **terms)
    return replace(
        base,
        name=f"{base.name}/sglang",
        description="LLaDA2.1-mini on an H100, SGLang, calibrated to the report's throughput of one request",
        origin="calibrated",
        implementation="SGLang, the report's build",
        latency=latency,
        fit=replace(base.fit, domain=(32.0, 1024.0), relative_uncertainty=0.3),
        provenance=Provenance((REPORT, *base.provenance.sources), DATE, base.provenance.tool_version),
    )


def engine_profiles() -> list[Profile]:
    """By the releases of published runs."""
    vllm, sglang = "vLLM 0.28 to 0.32", "SGLang 0.5.23"
    gemma = "DiffusionGemma-26B-A4B"
    found = [
        engine_profile(
            "H200", gemma, VLLM_GEMMA, 2, name="h200x2-diffusiongemma/vllm", date=DATE, implementation=vllm,
            description="DiffusionGemma on two H200s, vLLM, calibrated to fixed-step runs",
        ),
        engine_profile(
            "H200", gemma, SGLANG_GEMMA, 2, name="h200x2-diffusiongemma/sglang", date=DATE, implementation=sglang,
            description="DiffusionGemma on two H200s, SGLang, calibrated to fixed-step runs",
        ),
        engine_profile(
            "H100", gemma, BLOG_GEMMA, name="h100-diffusiongemma-fp8", date=DATE, implementation=vllm,
            description="DiffusionGemma in FP8 on an H100, vLLM, calibrated to one published run",
        ),
        engine_profile(
            "H100", "Qwen3-8B", QWEN_AR, name="h100-qwen3-8b-ar", date=DATE, implementation=sglang,
            description="Qwen3-8B on an H100, autoregressive, calibrated to two published runs",
        ),
        engine_profile(
            "H100", "SDAR-8B", SDAR_SGLANG, name="h100-sdar-8b/sglang-drafts", date=DATE, implementation=sglang,
            description="SDAR-8B on an H100, SGLang, three drafts a step, calibrated to two published runs",
        ),
        engine_profile(
            "H20", "LLaDA2.1-mini", LLADA21_SGLANG, name="h20-llada2.1-mini-sglang", date=DATE,
            implementation="SGLang, a fork of 2026",
            description="LLaDA2.1-mini on an H20, SGLang with JointThreshold, calibrated to published runs",
        ),
    ]  # fmt: skip
    return [
        replace(
            p,
            family="autoregressive",
            commits=(),
            focus=None,
            provenance=replace(p.provenance, sources=tuple(s for s in p.provenance.sources if s != SPREAD_SOURCE)),
        )
        if p.model.name == "SDAR-8B"
        else p
        for p in found
    ]
