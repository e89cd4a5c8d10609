"""The profile that an H100 measured, fitted again to every sample that came back (tests/profiler/h100_sdar_8b.csv)."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsim.engine.latency import Features
from dsim.live.padding import MAX_ROWS
from dsim.profiler.fit import fit_latency, predict
from dsim.profiler.profile import Profile, Provenance, digits
from dsim.profiler.samples import Samples, samples

H100_STEPS = Path(__file__).resolve().parents[2] / "tests" / "profiler" / "h100_sdar_8b.csv"
FULL = 64  # sequences of the served batches


def h100_steps(origin: str) -> Samples:
    """origin: "shape", repeats of shapes whose sequences are alike, or "served", steps of serving random requests."""
    with H100_STEPS.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["of"] == origin]
    features = [Features(*(int(row[name]) for name in Features._fields[:8])) for row in rows]
    latency, device = (np.array([float(row[name]) for row in rows]) / 1e6 for name in ("latency_us", "device_us"))
    return samples(features, latency, device)


def full_batches(served: Samples, profile: Profile) -> str:
    """How far the profile is off in the served full batches that judged it, of blocks cut short and of whole ones."""
    judges = served[1::2]
    off = predict(profile.latency, judges.features) / judges.latency - 1.0
    full = (judges.column("prefill_tokens") == 0) & (judges.column("batch") == FULL)
    whole = judges.column("tokens") == FULL * 32
    found = [f"{np.median(off[full & rows]):+.1%} ({name}, {(full & rows).sum()} steps)"
             for name, rows in (("partial blocks", ~whole), ("whole blocks", whole))]  # fmt: skip
    return f"predicted / measured - 1 of {FULL} sequences, median: {' and '.join(found)}"


def h100(estimate: Profile) -> Profile:
    """Step times as measured; commit models, memory, importance and the time of an eviction are the estimate's."""
    served = h100_steps("served")
    latency, fit = fit_latency(h100_steps("shape"), graph_tokens=MAX_ROWS, journal=served)
    latency = replace(latency, early=digits(estimate.model.early), eviction=estimate.latency.eviction)
    found = replace(
        estimate,
        name="h100-sdar-8b/dsim",
        description="SDAR-8B with random weights on H100, step times measured through dsim's own executor; yields are "
        "published ones, not measured",
        origin="measured",
        implementation="dsim live at ff9763d",
        latency=latency,
        fit=fit,
        provenance=Provenance(
            sources=(
                "step times: 192 shapes and 162 served steps of an NVIDIA H100 80GB HBM3 (benchmarks/validation.md), "
                "tests/profiler/h100_sdar_8b.csv, fitted by research/calibration/refit_h100.py",
                "commit models, memory, importance deltas and time of an eviction: those of h100-sdar-8b, estimated",
                *estimate.provenance.sources[2:],
            ),
            date="2026-11-26",
            tool_version=estimate.provenance.tool_version,
            torch="2.11",
            clocks="1635 MHz (1320 to 1980), 659 W (133 to 706), 70 C (45 to 75), slowed by power cap in 94%",
            settings={
                "device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "graphs": True, "block_length": 32,
                "executor": "at this commit captured steps with padding read every key twice; mended since (09d8b78c)",
            },
        ),
        implementations=(),
    )  # fmt: skip
    settings = found.provenance.settings | {"full_batches": full_batches(served, found)}
    return replace(found, provenance=replace(found.provenance, settings=settings))
