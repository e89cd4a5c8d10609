"""Write the shipped profiles anew: `python -m dsim.benchmarks.calibration.profiles [folder]`, always the same bytes."""

import sys
from dataclasses import replace
from pathlib import Path

from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.profile import SHIPPED, Profile, save
from dsim.profiler.roofline import eager_launch, roofline

from .calibrated import (
    CALIBRATED_EVICTION,
    CALIBRATED_INTERCEPT,
    CALIBRATED_LAUNCH,
    CALIBRATED_SLOPE,
    LLADA2_INTERCEPT,
    LLADA2_SLOPE,
    Line,
    calibrated,
)
from .engines import engine_profiles

DATE = "2026-11-21"

# Research scripts and dLLM-Serve, eager PyTorch: Sparse-dLLM's reuse steps take 26 ms for 32 layers.
SCRIPT_LAUNCH = 0.0256  # s
# dLLM-Serve loops over requests in Python: about half of its 10 ms per request and step.
SERVE_HOST_REQUEST = 0.005  # s


def profiles() -> list[Profile]:
    """The shipped profiles."""
    a100, sdar, llada2, llada = gpu("A100-80GB"), model("SDAR-8B"), model("LLaDA2.0-mini"), model("LLaDA-8B")
    sdar_line = Line(
        CALIBRATED_INTERCEPT,
        CALIBRATED_SLOPE,
        CALIBRATED_LAUNCH,
        "step times of FOCUS's baseline (Fig. 6, SDAR-8B, ShareGPT), launch floor from Optimus's AR to B=32 ratios, "
        "steps that evict from FOCUS's own throughput (Fig. 6)",
        CALIBRATED_EVICTION,
    )
    llada2_line = Line(
        LLADA2_INTERCEPT,
        LLADA2_SLOPE,
        eager_launch(llada2),
        "step times of FOCUS's baseline (Fig. 6, LLaDA2.0-mini, ShareGPT), launch floor scaled from SDAR-8B's",
    )
    return [
        calibrated(
            a100, sdar, sdar_line, name="a100-sdar-8b", date=DATE,
            description="SDAR-8B on A100-80GB, eager LMDeploy, calibrated to published throughput",
        ),
        calibrated(
            a100, llada2, llada2_line, name="a100-llada2-mini", date=DATE,
            description="LLaDA2.0-mini on A100-80GB, eager LMDeploy, calibrated to published throughput",
        ),
        roofline(a100, sdar, name="a100-sdar-8b-graphs", date=DATE),
        roofline(gpu("H100"), sdar, name="h100-sdar-8b", date=DATE),
        roofline(gpu("H200"), sdar, name="h200-sdar-8b", date=DATE),
        _script(roofline(gpu("L40S"), llada, graphs=False, name="l40s-llada-8b", date=DATE), SERVE_HOST_REQUEST),
        _script(roofline(gpu("RTX4090"), llada, graphs=False, name="rtx4090-llada-8b", date=DATE), SERVE_HOST_REQUEST),
        _script(roofline(gpu("RTX4090-48GB"), llada, graphs=False, name="rtx4090-48gb-llada-8b", date=DATE), 0.0),
        *engine_profiles(),
    ]  # fmt: skip


def main(folder: Path = SHIPPED) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles():
        save(profile, folder / f"{profile.name}.json", force=True)
        print(f"Wrote {folder / profile.name}.json")


def _script(profile: Profile, host_request: float) -> Profile:
    """The same GPU and model under research code: a lower launch floor, and a host term for each request."""
    how = "dLLM-Serve" if host_request else "a research script (Sparse-dLLM)"
    return replace(
        profile,
        description=f"{profile.model.name} on {profile.device.name}, {how}, from data sheets",
        implementation=f"roofline with the host terms of {how}",
        # Its floor and its efficiency were read off whole runs, what their caches move included.
        latency=replace(profile.latency, launch=SCRIPT_LAUNCH, host_request=host_request, cache_overhead=()),
    )


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
