"""The text of /metrics: the fleet's quantities under the names of an engine."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Metric, generate_latest, metrics_core
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.utils import floatToGoString

from ..results import engine_metrics
from ..results.engine_metrics import QUANTITIES, RELEASES, Quantity
from .counts import Watch
from .replica_thread import Replica
from .served import Fleet

# Quantities that the engine counts; the watch counts all others.
OF_ENGINE: dict[str, Callable[[Replica], float]] = {
    "running": lambda replica: replica.engine.num_running,
    "waiting": lambda replica: replica.num_queued,
    "waiting_for_handle": lambda replica: 0,  # all wait in the queue
    "kv_usage": lambda replica: replica.engine.pages_held / replica.engine.limits.num_pages,
}


TOTALS = {
    "prefix_queries": "prefix_queries",
    "prefix_hits": "prefix_hits",
    "preemptions": "preemptions",
    "steps": "forwards",
    "positions": "tokens",
    "committed_tokens": "committed",
}


class MetricsPage:
    """A collector of prometheus_client: one replica is one engine."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model

    def text(self) -> bytes:
        page: Any = self
        return generate_latest(page)

    def collect(self) -> Iterator[Metric]:
        """Every quantity that the engine publishes, and three of dsim's own that show that time is simulated."""
        fleet, engine = self._fleet, self._fleet.publishes
        masks = fleet.engines[0].policy.rows.commits == "masks"
        for quantity in QUANTITIES:
            if quantity.name_in(engine) and (masks or not quantity.diffusion):
                yield self._family(quantity, engine)
        if engine == "vllm":  # read by routers and autoscalers of vLLM
            sizes = GaugeMetricFamily(
                engine_metrics.CACHE_SETTINGS,
                "Sizes of the KV cache.",
                labels=["engine", "block_size", "num_gpu_blocks"],
            )
            for replica in fleet.engines:
                sizes.add_metric(
                    [str(replica.replica), str(replica.policy.memory.page_size), str(replica.limits.num_pages)], 1.0
                )
            yield sizes
        if fleet.simulates:
            info = GaugeMetricFamily(
                engine_metrics.SIMULATED,
                "A twin without a GPU; its times are simulated.",
                labels=["dsim_speed", "engine"],
            )
            info.add_metric([f"{fleet.clock.speed:g}", RELEASES[engine]], 1.0)
            yield info
            time = min(replica.time for replica in fleet.replicas)
            yield GaugeMetricFamily(engine_metrics.SIMULATED_TIME, "Simulated time since the start.", value=time)
            about = "When the simulated time was 0, in seconds since 1970."
            yield GaugeMetricFamily(engine_metrics.SIMULATED_START, about, value=fleet.clock.opened)

    def _family(self, quantity: Quantity, engine: str) -> Metric:
        families: Any = {
            "counter": metrics_core.CounterMetricFamily,
            "gauge": metrics_core.GaugeMetricFamily,
            "histogram": metrics_core.HistogramMetricFamily,
        }
        names = ["model_name", engine_metrics.RANK_LABELS[engine]]
        by_reason = quantity.name == "requests" and engine == "vllm"
        if by_reason:
            names.append("finished_reason")
        family: Any = families[quantity.kind](quantity.name_in(engine), quantity.about, labels=names)
        for replica, watch in zip(self._fleet.replicas, self._fleet.watches, strict=True):
            labels = [self._model, str(replica.engine.replica)]
            if quantity.kind == "histogram":
                buckets = watch.histograms[quantity.name]
                ends = [*map(floatToGoString, buckets.edges), "+Inf"]
                family.add_metric(labels, list(zip(ends, buckets.cumulative, strict=True)), buckets.sum)
            elif by_reason:
                for reason, count in watch.finished.items():
                    family.add_metric([*labels, reason], count)
            else:
                family.add_metric(labels, _value(quantity.name, replica, watch))
        metric: Metric = family
        return metric


def _value(quantity: str, replica: Replica, watch: Watch) -> float:
    if quantity == "requests":
        return sum(watch.finished.values())
    if quantity in TOTALS:
        total: int = getattr(replica.engine.totals, TOTALS[quantity])
        return total
    return OF_ENGINE[quantity](replica) if quantity in OF_ENGINE else watch.counts[quantity]
