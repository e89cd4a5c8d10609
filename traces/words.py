"""A trace in words, for `dsim trace`."""

from typing import Any

from .trace import Trace

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 60


def table(facts: dict[str, Any]) -> str:
    """For `info`."""
    out = [f"{facts['name']}  ({facts['format']})", ""]
    rows = [("requests", f"{facts['num_requests']:,}")]
    for name, key in (("failed", "failed_in_trace"), ("bad rows", "num_skipped"), ("unsorted", "num_unsorted")):
        if facts[key]:
            rows.append((name, f"{facts[key]:,} of {facts['num_rows']:,} rows"))
    if facts["duration"] is not None:
        rows.append(("duration", f"{facts['duration']:,.1f} s"))
    if facts["rate"] is not None:
        rows.append(("rate", f"{facts['rate']:.3g} req/s"))
    if facts["cv"] is not None:
        burst = f"  (burstiness {facts['cv'] ** -2:.2f})" if facts["cv"] else ""
        rows.append(("gap CV", f"{facts['cv']:.2f}{burst}"))
        fanos = "   ".join(f"{w} s {f:.3g}" for w, f in facts["fano"].items() if f is not None)
        rows.append(("Fano factor", fanos or "too short to say"))
        rows += [
            (f"by {name}", by_window(facts[f"by_{name}"], name)) for name in ("minute", "hour") if facts[f"by_{name}"]
        ]
        rows.append(("longest gap", f"{facts['longest_gap']:.1f} s"))
    if facts["zero_gaps"]:
        hint = "  (batched)" if facts["zero_gaps"] > 0.5 else ""
        rows.append(("gaps of 0", f"{facts['zero_gaps']:.1%}{hint}"))
    if facts["repeated_hash_ids"] is not None:
        rows.append(("prefix reuse", f"{facts['repeated_hash_ids']:.1%} of prompt blocks come again"))
    out += [f"  {name:<13}{value}" for name, value in rows]
    heads = ("mean", "std", "p50", "p90", "p99", "max", "total")
    out += ["", "  tokens".ljust(15) + "".join(f"{head:>9}" for head in heads[:-1]) + f"{heads[-1]:>15}"]
    for name in ("input", "output"):
        lengths = facts[f"{name}_length"]
        cells = "".join(f"{lengths[head]:>9,.0f}" for head in heads[:-1])
        out.append(f"  {name:<13}{cells}{lengths['total']:>15,}")
    if facts["extras"]:
        out += ["", f"  also: {', '.join(facts['extras'])}"]
    if facts["warnings"]:
        out += [""] + [f"  warning: {text}" for text in facts["warnings"]]
    return "\n".join(out)


def by_window(found: dict[str, Any], name: str) -> str:
    """By minute or hour: usual, busiest and when; bars from zero to the peak."""
    if found["num"] == 1:
        return f"{found['peak']:.3g} req/s in the only whole {name}"
    told = f"p50 {found['p50']:.3g}   p90 {found['p90']:.3g}   peak {found['peak']:.3g} req/s"
    times = f"{found['peak'] / found['mean']:.2f} x mean"
    told += f", {times}, {name} {found['peak_at'] + 1} of {found['num']:,}"
    if found["rates"] is None:
        return told
    group = -(-found["num"] // MOST_BARS)  # windows a bar, which shows the busiest
    highs = [max(found["rates"][i : i + group]) for i in range(0, found["num"], group)]
    bars = "".join(BARS[min(len(BARS) - 1, int(len(BARS) * high / found["peak"]))] for high in highs)
    return f"{told}\n{'':15}{bars}"


def dropped(trace: Trace) -> str:
    """What loading left out."""
    notes = trace.notes
    counts = {
        "failed dropped": notes.failed_in_trace,
        "bad skipped": notes.num_skipped,
        "out of order sorted": notes.num_unsorted,
    }
    return "".join(f", {count:,} {what}" for what, count in counts.items() if count)
