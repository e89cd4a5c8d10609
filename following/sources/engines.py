"""Reads the page of metrics of vLLM 0.33, SGLang 0.5.23 or LMDeploy 0.18."""

import math
from collections import defaultdict

from ...engine.errors import DsimError
from ...engine.plain import Range, plain
from ...files.read import cut, parsing
from ...files.samples import RANK
from ...results.engine_metrics import (
    BY_NAME,
    CACHE_SETTINGS,
    RELEASES,
    SIMULATED,
    SIMULATED_START,
    SIMULATED_TIME,
    WITH_HANDLES,
    Quantity,
)
from .sample import MEAN_GAUGES, MOST_REQUESTS, Buckets, Sample

# The quantities that a follower compares.
READ = tuple(
    BY_NAME[name]
    for name in (
        "requests", "prompt_tokens", "generation_tokens", "steps", "forward_seconds", "forwards", "running", "waiting",
        "kv_usage", "ttft", "e2el", "queue", "input_length", "output_length",
    )
)  # fmt: skip
MOST_COUNT = 1e15  # no value of a page that is read is larger
LATEST = 1e11  # s since 1970
NO_SETTINGS = ("engine", "engine_index", "engine_id")  # its other labels

_Page = dict[str, list[tuple[dict[str, str], float]]]  # samples by name


def sample_of(text: str, time: float, source: str) -> Sample:
    """The sample of a Prometheus page; DsimError names the page if it is of none of the three engines.

    A page of `dsim serve` states its own time (s since 1970), which may pass faster from the server's start on.
    """
    from prometheus_client.parser import text_string_to_metric_families  # imported here: only `follow` needs it

    page: _Page = defaultdict(list)
    with parsing(source, "Prometheus metrics"):
        for family in text_string_to_metric_families(RANK.sub("", text)):
            for sample in family.samples:
                if 0 <= sample.value <= MOST_COUNT:
                    page[sample.name].append((sample.labels, float(sample.value)))
        return _sample(page, time, source)


def _sample(page: _Page, time: float, source: str) -> Sample:
    engine = next((engine for engine in RELEASES if any(name.startswith(f"{engine}:") for name in page)), None)
    if engine is None:
        names = ", ".join(sorted(page)[:3]) or "nothing"
        expected = ", ".join(f"{engine}:*" for engine in RELEASES)
        raise DsimError(f"{source}: holds {cut(names)}, expected the metrics of an engine: {expected}")
    running = BY_NAME["running"].name_in(engine)
    if _total(page, running) is None:
        raise DsimError(f"{source}: lacks {running}, expected it among the metrics")
    # Some metrics only appear with the first request.
    counters = dict.fromkeys(("requests", "generation_tokens"), 0.0)
    gauges = {"waiting": 0.0}
    histograms = {}
    for quantity in READ:
        if quantity.kind == "histogram":
            if (buckets := _buckets(page, quantity.name_in(engine))) is not None:
                histograms[quantity.name] = buckets
        elif (value := _value(page, quantity, engine)) is not None:
            (counters if quantity.kind == "counter" else gauges)[quantity.name] = value
    if engine == WITH_HANDLES:
        gauges["waiting"] += _value(page, BY_NAME["waiting_for_handle"], engine) or 0.0
    if BY_NAME["requests"].name_in(engine) not in page and "e2el" in histograms:
        counters["requests"] = histograms["e2el"].num
    settings = {
        key: value
        for labels, _ in page.get(CACHE_SETTINGS, [])
        for key, value in labels.items()
        if key not in NO_SETTINGS
    }
    for labels, _ in page.get(SIMULATED, []):  # a twin's page (docs/serve-metrics.md)
        settings["dsim_speed"] = str(plain(float(labels.get("dsim_speed", 1)), float, Range(0, 1e6)))
    times = [value for name in (SIMULATED_START, SIMULATED_TIME) for _, value in page.get(name, [])]
    time = sum(times) if times else time
    sample = Sample(min(time, LATEST), engine, len(page[running]), counters, gauges, histograms, settings)
    if sample.num_open > MOST_REQUESTS:
        raise DsimError(f"{source}: {sample.num_open:g} requests run or wait, expected at most {MOST_REQUESTS}")
    return sample


def _value(page: _Page, quantity: Quantity, engine: str) -> float | None:
    """The sum over labels, or the mean of a gauge that is a share; None if the page lacks it."""
    name = quantity.name_in(engine)
    total = _total(page, name)
    if total is None or quantity.name not in MEAN_GAUGES:
        return total
    return total / len(page[name])


def _total(page: _Page, name: str) -> float | None:
    return sum(value for _, value in page[name]) if name in page else None


def _buckets(page: _Page, name: str) -> Buckets | None:
    counts: dict[float, float] = defaultdict(float)
    for labels, value in page.get(f"{name}_bucket", []):
        counts[float(labels.get("le", "nan"))] += value
    if math.inf not in counts or any(math.isnan(end) for end in counts):
        return None
    total = sum(value for _, value in page.get(f"{name}_sum", []))
    ends = tuple(sorted(end for end in counts if end < math.inf))
    return Buckets(ends, tuple(counts[end] for end in (*ends, math.inf)), total)
