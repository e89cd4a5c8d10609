"""The gain of prefix caching on Mooncake's conversation trace: `python benchmarks/prefix_gain.py [NAME ...]`.

The tables of research/evidence/prefix-results.md, predicted: nothing here was measured.
"""

from collections.abc import Callable

from dsim.benchmarks.tables import print_named, table
from dsim.engine.spec import parse
from dsim.profiler.profile import load as load_profile
from dsim.results.metrics import Summary, summarize
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace, load

PROFILE, REPLICAS = "h100-qwen3-8b-ar", 4
CACHED = "vllm-ar,prefix_caching=true"


def requests(rate: float | None = None) -> Trace:
    """Those that fit the model's context, at their times or a rate."""
    trace = load("mooncake-conv")
    fits = trace.input_length + trace.output_length <= load_profile(PROFILE).model.context_limit
    trace = trace.take([i for i, fit in enumerate(fits.tolist()) if fit])
    return trace if rate is None else trace.scaled_to_rate(rate)


def served(trace: Trace, policy: str, router: str, replicas: int = REPLICAS) -> Summary:
    run = simulate(trace, Setting(parse(policy), load_profile(PROFILE)), replicas=replicas, router=router)
    caches = run.cached_tokens is not None
    return summarize(policy, run.table.columns, run.totals, replicas=replicas, caches_prefixes=caches)


def hits(run: Summary) -> str:
    """Share of prompt tokens in the cache."""
    return "–" if run.prefix_cache is None else f"{100 * run.prefix_cache.hit_rate:.1f} %"


def routers() -> None:
    """Routers with a prefix cache and without."""
    rows = []
    for rate in (None, 6.0, 8.0):
        trace = requests(rate)
        asked = [("vllm-ar", "least-tokens"), *((CACHED, r) for r in ("round-robin", "jsq", "least-tokens", "prefix"))]
        for policy, router in asked:
            run = served(trace, policy, router)
            rows.append([
                f"{trace.rate:.1f}", "on" if policy == CACHED else "off", f"`{router}`", hits(run),
                f"{run.ttft_ms.p50 / 1e3:.2f} s", f"{run.ttft_ms.p99 / 1e3:.2f} s", f"{run.tpot_ms.p50:.1f} ms",
                f"{run.e2el_ms.p99 / 1e3:.1f} s", "yes" if run.stable else "no",
            ])  # fmt: skip
    table(("req/s", "prefix cache", "router", "found", "ttft p50", "ttft p99", "tpot p50", "e2el p99", "stable"), rows)


def pools() -> None:
    trace, profile = requests(), load_profile(PROFILE)
    own = Setting(parse(CACHED), profile).limits.num_pages
    rows = []
    for times in (1, 2, 4, 8, 16, 64):
        cells = [f"{times} x {own:,}"]
        for router in ("least-tokens", "prefix"):
            run = served(trace, f"{CACHED},num_pages={times * own}", router)
            cells += [hits(run), f"{run.ttft_ms.p50 / 1e3:.2f} s"]
        rows.append(cells)
    table(("pages a replica", "`least-tokens`: found", "ttft p50", "`prefix`: found", "ttft p50"), rows)


ANSWERS: dict[str, Callable[[], None]] = {"routers": routers, "pools": pools}


if __name__ == "__main__":
    print_named(ANSWERS, __doc__)
