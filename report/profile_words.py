"""A profile from a data sheet, or a fitted one, in words."""

from typing import Any

from ..profiler import roofline as rooflines
from ..profiler.canvas_law import mean_forwards
from ..profiler.hardware import Gpu
from ..profiler.models import ModelShape
from ..profiler.profile import Profile, gb
from .table import counted, number

MAX_PREFILL_TOKENS = 4096  # LMDeploy's default
MOST_KNOTS = 12  # printed
OVERHEAD_AT = 512  # tokens of the request whose overhead is shown


def derived_facts(profile: Profile, gpu: Gpu, model: ModelShape, tp: int) -> dict[str, Any]:
    """In the profile's units."""
    latency, memory = profile.latency, profile.memory
    rows = memory.usual_rows(profile.default_max_batch)
    pages, prefill = memory.fit(rooflines.PAGE, rows, MAX_PREFILL_TOKENS)
    least = profile.canvas_laws[0].canvas_length if profile.canvas_laws else 1  # a canvas is computed whole
    computed = latency.pieces(least) + least * (latency.head + latency.sample)
    return {
        "name": profile.name,
        "origin": profile.origin,
        "knee_tokens": round(rooflines.knee(gpu, model, tp)),
        "floor_s": max(latency.launch, computed) + latency.host_step,
        "floor_tokens": least,
        "floor_is_launch": latency.launch > computed,
        "slope_s_per_token": latency.slope,
        "weight_bytes": memory.weight_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "page": rooflines.PAGE,
        "num_pages": pages,
        "max_batch": rows,
        "max_prefill_tokens": prefill,
        "relative_uncertainty": profile.fit.relative_uncertainty,
        "workloads": list(profile.workloads),
    }


def derived_lines(profile: Profile, f: dict[str, Any]) -> list[str]:
    bound = "kernel launches" if f["floor_is_launch"] else "reading the weights"
    shared = ", which layers with a window share" if profile.memory.window_bytes_per_token else ""
    return [
        f"knee      {f['knee_tokens']} tokens a step: reading the weights takes as long as multiplying with them",
        f"floor     {f['floor_s'] * 1e3:.2g} ms a step of {counted(f['floor_tokens'], 'token')}, set by {bound}",
        f"slope     {f['slope_s_per_token'] * 1e6:.2g} us a token beyond the knee, before attention and LM head",
        f"memory    weights take {gb(f['weight_bytes'])} of {gb(f['capacity_bytes'])}",
        f"KV pages  {f['num_pages']} of {f['page']} tokens{shared}, at a batch of {f['max_batch']} and prefills of "
        f"{f['max_prefill_tokens']} tokens",
        f"commits   {', '.join(f['workloads']) or _no_commits(profile)}",
        f"trust     latencies to about ±{f['relative_uncertainty']:.0%}",
    ]


def fitted_lines(profile: Profile) -> list[str]:
    fit, judged = profile.fit, profile.fit.held_out
    knots = profile.latency.knots
    parts = [f"{seconds * 1e3:.3g} ms at {tokens:.0f}" for tokens, seconds in knots]
    if len(knots) > MOST_KNOTS:
        parts[1:-1] = [f"{len(knots) - 2} between"]
    held = "none held out"
    if judged is not None:
        held = f"held out {judged.num_points}: median error {judged.median:.1%}, 95th percentile {judged.p95:.1%}"
    noise = "unknown" if fit.noise is None else f"{fit.noise:.1%}"
    drift = "unknown" if fit.drift is None else f"{fit.drift:+.1%}"
    lines = [
        f"points    {fit.num_points} step shapes; {held}",
        f"noise     {noise} between repeats, drift {drift}",
        f"pieces    {', '.join(parts)} tokens, then {number(profile.latency.slope * 1e6)} us a token",
    ]
    lines += [f"judged by {error}" for error in fit.judged_by]
    if profile.latency.launch:
        lines.append(f"floor     {profile.latency.launch * 1e3:.3g} ms a step to launch")
    if profile.latency.graph_tokens:
        lines.append(
            f"graphs    decode steps of at most {profile.latency.graph_tokens} tokens are padded to 1, 2, 4 ... 256, "
            "512, 768 ... and wait for no launch"
        )
    if fit.unidentified:
        lines.append(f"unknown   {', '.join(fit.unidentified)}: these steps cannot identify them; stored as 0")
    for found in profile.commit_fits:
        mean = found.predictions[0]
        lines.append(
            f"commits   {found.workload} at {found.threshold:g}: {mean.measured:.3g} tokens a step held out, "
            f"{mean.predicted:.3g} predicted ({mean.error:+.1%})"
        )
    if profile.latency.cache_overhead:
        most = max(profile.latency.cache_overhead, key=lambda part: part.row + part.token * OVERHEAD_AT)
        num = len(profile.latency.cache_overhead)
        lines.append(
            f"overhead  of {num} phases of caches; the longest is {most.cache}'s {most.phase}: "
            f"{(most.row + most.token * OVERHEAD_AT) * 1e3:.3g} ms a request of {OVERHEAD_AT} tokens"
        )
    for law in profile.canvas_laws:
        if law.histogram:
            said = f"histogram of mean {mean_forwards(law):.3g} and median {law.median:.3g}, with shares as counted"
        else:
            said = f"log-normal of median {law.median:.3g}, each {law.drift:.3g} times the one before"
        lines.append(
            f"canvases  {law.workload}: {law.least} to {law.most} steps a canvas of {law.canvas_length}, {said}; "
            f"spread {law.request_spread:.2g} between requests and {law.canvas_spread:.2g} within ({law.source})"
        )
    if not profile.commits and not profile.canvas_laws:
        lines.append(f"commits   {_no_commits(profile)}")
    return lines


def _no_commits(profile: Profile) -> str:
    if profile.family == "full-sequence":
        return "none: policies commit fixed numbers (strategy=low_confidence_static)"
    return "none: it can run `ar` only"
