"""What KV tiers are worth on Mooncake's conversation trace: `python benchmarks/tiers.py [NAME ...]`.

The tables of docs/tiers-results.md, predicted: nothing here was measured.
"""

import math
import sys
from collections.abc import Iterator

from dsim.benchmarks.prefix import CACHED, PROFILE, REPLICAS, hits, requests
from dsim.benchmarks.tables import print_named, table
from dsim.engine.policy import parse
from dsim.profiler.profile import load as load_profile
from dsim.results.metrics import Summary, summarize
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.setting import Setting
from dsim.sim.tiers import Tier
from dsim.sim.twin import simulate
from dsim.traces import Trace

NUM_REQUESTS = 1500
TTFT = 2.0  # s, p90: a served load
BRACKET, CLOSE = (4.0, 16.0), 1.05  # req/s, relative: where and how closely that load is sought
TIERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "host": ("host:128GB",),
    "host, disk": ("host:128GB", "disk:2TB"),
    "host, shared": ("host:128GB", "shared:8TB"),
}


def served(trace: Trace, tiers: tuple[str, ...], router: str = "least-tokens") -> Summary:
    pool = Pool(Setting(parse(CACHED), load_profile(PROFILE)), REPLICAS)
    run = simulate(trace, Fleet((pool,), routing(router), tiers=tuple(Tier.parse(text) for text in tiers)))
    return summarize(
        "", run.table.columns, run.totals, replicas=REPLICAS, caches_prefixes=True, tiered=run.tiered
    )  # fmt: skip


def cells(run: Summary) -> list[str]:
    tiers = {} if run.kv_tiers is None else {tier.tier: tier for tier in run.kv_tiers.tiers}
    waited = "–"
    if run.kv_tiers is not None and run.kv_tiers.deferred_requests:
        waited = f"{1e3 * run.kv_tiers.deferral_s / run.kv_tiers.deferred_requests:.0f} ms"
    last = [f"{100 * max(t.read_share, t.write_share):.1f} %" for t in tiers.values()]
    return [
        hits(run), " + ".join(f"{100 * t.loaded_rate:.1f} %" for t in tiers.values()) or "–", waited,
        " + ".join(last) or "–", f"{run.ttft_ms.p50 / 1e3:.2f} s", f"{run.ttft_ms.p99 / 1e3:.2f} s",
        f"{run.e2el_ms.p99 / 1e3:.1f} s",
    ]  # fmt: skip


def tiers() -> None:
    """Tiers at the trace's rate and near the limit."""
    head = "req/s", "tiers", "found", "in tiers", "a load waits", "bandwidth used", "ttft p50", "ttft p99", "e2el p99"
    table(
        head, ([f"{trace.rate:.1f}", name, *cells(served(trace, TIERS[name]))] for trace in traces() for name in TIERS)
    )


def traces() -> Iterator[Trace]:
    """The first requests, at their rate and at 8 a second."""
    for rate in (None, 8.0):
        trace = first_requests()
        yield trace if rate is None else trace.scaled_to_rate(rate)


def first_requests() -> Trace:
    """At their rate."""
    return requests().take(list(range(NUM_REQUESTS)))


def capacities() -> None:
    """The highest load at which the p90 of ttft is at most TTFT, by halving: of the same requests, closer in time."""
    rows = []
    for name, own in TIERS.items():
        low, high = BRACKET
        while high > CLOSE * low:
            rate = math.sqrt(low * high)
            run = served(first_requests().scaled_to_rate(rate), own)
            low, high = (rate, high) if run.ttft_ms.p90 <= 1e3 * TTFT else (low, rate)
            print(f"{name}: {low:.1f} to {high:.1f} req/s", file=sys.stderr, flush=True)
        rows.append([name, f"{low:.1f}"])
    table(("tiers", "req/s"), rows)


if __name__ == "__main__":
    print_named({"tiers": tiers, "capacities": capacities}, __doc__)
