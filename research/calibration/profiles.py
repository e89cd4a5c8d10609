"""Write the shipped profiles: `python -m dsim.research.calibration.profiles [folder]`, always the same bytes."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsim.profiler.hardware import gpu
from dsim.profiler.models import ModelShape, model
from dsim.profiler.profile import SHIPPED, Implementation, Profile, save, to_json
from dsim.profiler.roofline import eager_launch, roofline
from dsim.profiler.scripts import SERVE_REQUEST, SPARSE, SPARSE_PASS, script, scripts

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
from .engine_profiles import engine_profiles, of_the_report
from .refit_h100 import h100

DATE = "2026-11-21"

# SDAR-8B on an H100, by engine: overlap of host and device, and host times.
_FDFO = (
    "SGLang's FDFO over its sync runs, DiffusionGemma on two H200s (PR 34061): 1.4 to 2.3 ms a forward; assumed to be "
    "the same for SDAR-8B"
)
_AHEAD = "1 ms a step and 10 us a row, assumed as in every roofline, pass while the device works: {}"
SERVING = (
    Implementation(
        "sglang", "SGLang, captured graphs, from data sheets",
        {"latency": {"host_step": 1.5e-3, "host_request": 0.1e-3}},
        (f"host_step of 1.5 ms, estimated: {_FDFO}", f"host_request of 0.1 ms, estimated: {_FDFO}"),
    ),
    *(
        Implementation(
            name, f"{words}, captured graphs, from data sheets",
            {"latency": {"host_step": 1e-3, "overlap": True}},
            (f"host_step of 1 ms, estimated: {_AHEAD.format(why)}",),
        )
        for name, words, why in (
            ("vllm", "vLLM", "async scheduling"), ("lmdeploy", "LMDeploy", "inputs are sent a forward ahead"),
        )
    ),
)  # fmt: skip


def profiles() -> list[Profile]:
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
    on_a100 = calibrated(
        a100, sdar, sdar_line, name="a100-sdar-8b", date=DATE,
        description="SDAR-8B on A100-80GB, eager LMDeploy, calibrated to published throughput",
    )  # fmt: skip
    on_h100 = roofline(gpu("H100"), sdar, name="h100-sdar-8b", date=DATE)
    engines = {profile.name: profile for profile in engine_profiles()}
    drafts = engines.pop("h100-sdar-8b/sglang-drafts")
    vllm, sglang = engines.pop("h200x2-diffusiongemma/vllm"), engines.pop("h200x2-diffusiongemma/sglang")
    edits = roofline(gpu("H100"), model("LLaDA2.1-mini"), name="h100-llada2.1-mini", date=DATE)
    gemma = replace(vllm, name="h200x2-diffusiongemma")
    return [
        with_others(on_a100, {"graphs": roofline(a100, sdar, name="a100-sdar-8b/graphs", date=DATE)}),
        calibrated(
            a100, llada2, llada2_line, name="a100-llada2-mini", date=DATE,
            description="LLaDA2.0-mini on A100-80GB, eager LMDeploy, calibrated to published throughput",
        ),
        with_others(replace(on_h100, implementations=SERVING), {"sglang-drafts": drafts, "dsim": h100(on_h100)}),
        roofline(gpu("H200"), sdar, name="h200-sdar-8b", date=DATE),
        _script(roofline(gpu("L40S"), llada, graphs=False, name="l40s-llada-8b", date=DATE), SERVE_REQUEST),
        _script(roofline(gpu("RTX4090"), llada, graphs=False, name="rtx4090-llada-8b", date=DATE), SERVE_REQUEST),
        _script(roofline(gpu("RTX4090-48GB"), llada, graphs=False, name="rtx4090-48gb-llada-8b", date=DATE), 0.0),
        roofline(gpu("RTX4090"), model("Dream-7B"), graphs=False, name="rtx4090-dream", date=DATE),
        roofline(gpu("H100"), llada, name="h100-llada-8b", date=DATE),
        roofline(gpu("H100"), model("Dream-7B"), name="h100-dream-7b", date=DATE),
        with_others(edits, {"sglang": of_the_report(edits)}),
        with_others(gemma, {"vllm": vllm, "sglang": sglang}),
        *engines.values(),
    ]  # fmt: skip


def with_others(profile: Profile, others: Mapping[str, Profile]) -> Profile:
    """With others of its device and model as implementations of what differs."""
    own: Any = to_json(replace(profile, implementations=()))
    found = tuple(
        Implementation(
            name, other.implementation,
            {"name": other.name, "description": other.description, **_changes(own, to_json(other))},
        )
        for name, other in others.items()
    )  # fmt: skip
    return replace(profile, implementations=(*profile.implementations, *found))


def _changes(own: dict[str, Any], other: Any) -> dict[str, Any]:
    """The other's differing keys; in objects those within."""
    found: dict[str, Any] = {}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(own.get(key), dict) and key != "settings":
            value = _changes(own[key], value)
            if value:
                found[key] = value
        elif value != own.get(key):
            found[key] = value
    return found


def main(folder: Path = SHIPPED) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles():
        save(profile, folder / f"{profile.name}.json", force=True)
        print(f"Wrote {folder / profile.name}.json")


def _script(profile: Profile, host_request: float) -> Profile:
    """Research code: a lower launch floor, and a host term a request."""
    how = "dLLM-Serve" if host_request else "a research script (Sparse-dLLM)"
    others = _scripts_beside_dllm_serve(profile.model) if host_request else profile.implementations
    return replace(
        profile,
        description=f"{profile.model.name} on {profile.device.name}, {how}, from data sheets",
        implementation=f"roofline with the host terms of {how}",
        implementations=tuple(own for own in others if own.name not in how.lower()),
        # Floor and efficiency are whole runs', with the caches' moves.
        latency=replace(profile.latency, launch=SPARSE_PASS, host_request=host_request, cache_overhead=()),
    )


def _scripts_beside_dllm_serve(shape: ModelShape) -> tuple[Implementation, ...]:
    """The scripts on dLLM-Serve's machines, all with Sparse-dLLM's time per pass."""
    there = "dLLM-Serve, Table 4 (L40S): 33 and 34 tok/s of dLLM-Cache and Sparse-dLLM are 30 ms a pass, not 46"
    return tuple(
        script(own.name, own.implementation, shape.layers, SPARSE_PASS, f"estimated: {there}; {SPARSE}")
        for own in scripts(shape)
        if own.name != "dllm-serve"
    )


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
