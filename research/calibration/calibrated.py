"""Profiles of LMDeploy on an A100 fitted to published throughput; nothing was measured here."""

from dataclasses import dataclass, replace

from dsim.profiler.hardware import Gpu
from dsim.profiler.models import ModelShape
from dsim.profiler.profile import Profile, Provenance, digits
from dsim.profiler.roofline import latency_model, memory_grid, roofline, weight_read

from .publications import YIELDS

# The twin's closed loops, with prefill and trimmed tails, then give FOCUS's Fig. 6 (SDAR-8B baseline, ShareGPT, 913,
# 938, 979 tok/s at concurrency 64, 128, 256); the experiment `focus-throughput` of research/reproduce prints it.
# Throughput alone would give 14.6 ms + 66.4 us a token.
CALIBRATED_INTERCEPT = 0.0105  # s
CALIBRATED_SLOPE = 59.2e-6  # s a token, with attention, LM head and sampling
# The same eager runs' floor (Optimus's ratios of AR to B=32 at small batches).
CALIBRATED_LAUNCH = 0.041  # s
# Of an evicting step: FOCUS's runs (Fig. 6: 1218, 1850, 2160, 2272 tok/s at concurrency 32, 64, 128, 256, threshold
# 0.8) then come out within some 15 %. The yield at that threshold is fitted to them too.
CALIBRATED_EVICTION = 0.006  # s

# LLaDA2.0-mini: 1770, 2067, 2181 tok/s; its floor is not published.
LLADA2_INTERCEPT = 0.0113  # s
LLADA2_SLOPE = 21.3e-6  # s a token

# Share of the roofline's KV reads that shows in a step: all of it would give AR 4.8 times B=32's commits at batch 512,
# this about 6, as published (Optimus, "up to 6.2").
KV_READ_SHOWN = 0.25

# Visible keys of a ShareGPT row: 213 of prompt, half of 321 of output, the block.
MEAN_KEYS = 400
BLOCK_LENGTH = 32


@dataclass(frozen=True)
class Line:
    """Step time above the launch floor: intercept + slope * tokens."""

    intercept: float  # s
    slope: float  # s a token
    launch: float  # s
    source: str
    eviction: float | None = None  # s; None: the roofline's
    workload: str = "sharegpt-focus"  # the runs' workload


def calibrated(gpu: Gpu, model: ModelShape, line: Line, *, name: str, description: str, date: str) -> Profile:
    """The eager roofline, its layers bent so that whole steps of B=32 rows at MEAN_KEYS follow the line.

    Attention, KV reads, LM head and sampling keep the roofline's terms, subtracted from the slope. Below the launch
    floor the pieces lead from the time of reading the weights up to the floor.
    """
    base = roofline(gpu, model, graphs=False, name=name, description=description, date=date)
    latency = latency_model(gpu, model, tp=1, graphs=False)
    latency = replace(latency, kv_read=digits(KV_READ_SHOWN * latency.kv_read))
    per_token = latency.attention * MEAN_KEYS + latency.kv_read * MEAN_KEYS / BLOCK_LENGTH
    slope = line.slope - per_token - latency.head - latency.sample
    end = int(0.96 * (line.launch - line.intercept) / line.slope)
    grid = memory_grid(model, end // 4)
    points = [(float(x), weight_read(gpu, model, 1, x)) for x in grid] + [(float(end), line.intercept + slope * end)]
    return replace(
        base,
        origin="calibrated",
        implementation="LMDeploy eager, fork of Dec 2025",
        latency=replace(
            latency,
            knots=tuple((x, digits(y)) for x, y in points),
            slope=digits(slope),
            launch=digits(line.launch),
            eviction=latency.eviction if line.eviction is None else line.eviction,
        ),
        fit=replace(base.fit, domain=(1.0, 8192.0), relative_uncertainty=0.1),
        provenance=Provenance(
            (line.source, *base.provenance.sources),
            date,
            base.provenance.tool_version,
            # For runs under another yield.
            settings={
                "calibrated_yield": published_mean(model.name, line.workload, 0.9),
                "calibrated_workload": line.workload,
                "calibrated_threshold": 0.9,
            },
        ),
    )


def published_mean(model: str, workload: str, threshold: float) -> float:
    """Tokens that an ordinary denoise step commits."""
    [found] = [
        y.mean
        for published, yields in YIELDS.values()
        for y in yields
        if (published, y.workload, y.threshold) == (model, workload, threshold)
    ]
    return found
