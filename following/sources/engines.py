"""Reads the page of metrics of vLLM 0.33, SGLang 0.5.23 or LMDeploy 0.18."""

import math
from collections import defaultdict

from ...engine.errors import DsimError
from ...engine.plain import Range, plain
from ...files.metrics_text import Page, page_of
from ...files.read import cut, parsing
from ...results.engine_metrics import (
    BY_NAME,
    CACHE_SETTINGS,
    RELEASES,
    SIMULATED,
    SIMULATED_START,
    SIMULATED_TIME,
    WITH_HANDLES,
)
from .sample import MAX_REQUESTS, MEAN_GAUGES, Buckets, Sample

MAX_COUNT = 1e15  # no value of a page that is read is larger
LATEST = 1e11  # s since 1970
NO_SETTINGS = ("engine", "engine_index", "engine_id")  # other labels of CACHE_SETTINGS


def sample_of(text: str, time: float, source: str) -> Sample:
    """The sample of a Prometheus page; DsimError names the page if it is of none of the three engines.

    A page of `dsim serve` states its own time (s since 1970), which may pass faster from the server's start on.
    """
    every = page_of(text, source)
    usual = {name: [row for row in rows if 0 <= row[1] <= MAX_COUNT] for name, rows in every.items()}
    with parsing(source, "Prometheus metrics"):
        return _sample({name: rows for name, rows in usual.items() if rows}, time, source)


def _sample(page: Page, time: float, source: str) -> Sample:
    engine = next((engine for engine in RELEASES if any(name.startswith(f"{engine}:") for name in page)), None)
    if engine is None:
        names = ", ".join(sorted(page)[:3]) or "nothing"
        expected = ", ".join(f"{engine}:*" for engine in RELEASES)
        raise DsimError(f"{source}: holds {cut(names)}, expected the metrics of an engine: {expected}")
    running = BY_NAME["running"].name_in(engine)
    if running not in page:
        raise DsimError(f"{source}: lacks {running}, expected it among the metrics")
    # Some metrics only appear with the first request.
    values = {"counter": dict.fromkeys(("requests", "generation_tokens"), 0.0), "gauge": {"waiting": 0.0}}
    histograms = {}
    for name, quantity in BY_NAME.items():
        key = quantity.name_in(engine)
        if quantity.kind == "histogram":
            if (buckets := _buckets(page, key)) is not None:
                histograms[name] = buckets
        elif key in page:
            values[quantity.kind][name] = _total(page, key)
            if name in MEAN_GAUGES:
                values[quantity.kind][name] /= len(page[key])
    counters, gauges = values["counter"], values["gauge"]
    if engine == WITH_HANDLES:
        gauges["waiting"] += _total(page, BY_NAME["waiting_for_handle"].name_in(engine))
    if BY_NAME["requests"].name_in(engine) not in page and "e2el" in histograms:
        counters["requests"] = histograms["e2el"].num
    settings: dict[str, str] = {}
    for labels, _ in page.get(CACHE_SETTINGS, []):
        settings |= {key: value for key, value in labels.items() if key not in NO_SETTINGS}
    for labels, _ in page.get(SIMULATED, []):  # a twin's page (docs/serve-metrics.md)
        settings["dsim_speed"] = str(plain(float(labels.get("dsim_speed", 1)), float, Range(0, 1e6)))
        time = _total(page, SIMULATED_START) + _total(page, SIMULATED_TIME)
    sample = Sample(
        time=min(time, LATEST),
        engine=engine,
        num_engines=len(page[running]),
        counters=counters,
        gauges=gauges,
        histograms=histograms,
        settings=settings,
    )
    if sample.num_open > MAX_REQUESTS:
        raise DsimError(f"{source}: {sample.num_open:g} requests run or wait, expected at most {MAX_REQUESTS}")
    return sample


def _total(page: Page, name: str) -> float:
    """The sum over labels."""
    return sum(value for _, value in page.get(name, []))


def _buckets(page: Page, name: str) -> Buckets | None:
    counts: dict[float, float] = defaultdict(float)
    for labels, value in page.get(f"{name}_bucket", []):
        counts[float(labels.get("le", "nan"))] += value
    if math.inf not in counts or any(math.isnan(end) for end in counts):
        return None
    ends = tuple(sorted(end for end in counts if end < math.inf))
    return Buckets(ends, tuple(counts[end] for end in (*ends, math.inf)), _total(page, f"{name}_sum"))
