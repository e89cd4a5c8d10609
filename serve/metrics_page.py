"""The text of /metrics: the fleet's quantities under the names of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..results.engine_metrics import QUANTITIES, RELEASES, Quantity

if TYPE_CHECKING:
    from prometheus_client import Metric

    from .fleet import Fleet
    from .replica import Replica

REPLICA_LABEL = {"vllm": "engine", "sglang": "dp_rank", "lmdeploy": "engine"}


def _waiting_for_handle(replica: Replica) -> int:
    return max(0, replica.engine.num_running + replica.num_queued - replica.engine.limits.max_batch)


# Quantities that the engine counts; the watch counts all others.
OF_ENGINE: dict[str, Callable[[Replica], float]] = {
    "running": lambda replica: replica.engine.num_running,
    "waiting": lambda replica: replica.num_queued,
    "waiting_for_handle": _waiting_for_handle,
    "kv_usage": lambda replica: replica.engine.pages_held / replica.engine.limits.num_pages,
    "prefix_queries": lambda replica: replica.engine.totals.prefix_queries,
    "prefix_hits": lambda replica: replica.engine.totals.prefix_hits,
    "preemptions": lambda replica: replica.engine.totals.preemptions,
    "steps": lambda replica: replica.engine.totals.forwards,
    "positions": lambda replica: replica.engine.totals.tokens,
    "committed_tokens": lambda replica: replica.engine.totals.committed,
}


class MetricsPage:
    """A collector of prometheus_client: one replica is one engine."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Text and content type, by the client's Accept header."""
        from prometheus_client.exposition import choose_encoder  # other commands do not need it

        encode, kind = choose_encoder(accept)
        page: Any = self
        return encode(page), kind

    def collect(self) -> Iterator[Metric]:
        """Every quantity that the engine publishes, and three of dsim's own that show that time is simulated."""
        engine = self._fleet.publishes
        masks = self._fleet.engines[0].policy.rows.commits == "masks"
        for quantity in QUANTITIES:
            if quantity.name_in(engine) and (masks or not quantity.diffusion):
                yield self._family(quantity, engine)
        if engine == "vllm":
            yield self._cache_config()
        if self._fleet.simulates:
            yield from self._simulated(engine)

    def _family(self, quantity: Quantity, engine: str) -> Metric:
        from prometheus_client import metrics_core
        from prometheus_client.utils import floatToGoString

        families: Any = {
            "counter": metrics_core.CounterMetricFamily, "gauge": metrics_core.GaugeMetricFamily,
            "histogram": metrics_core.HistogramMetricFamily,
        }  # fmt: skip
        reasons = quantity.name == "requests" and engine == "vllm"
        names = ["model_name", REPLICA_LABEL[engine], *(["finished_reason"] if reasons else [])]
        family: Any = families[quantity.kind](quantity.name_in(engine), quantity.about, labels=names)
        for replica, watch in zip(self._fleet.replicas, self._fleet.watches, strict=True):
            labels = [self._model, str(replica.engine.replica)]
            if quantity.kind == "histogram":
                buckets = watch.histograms[quantity.name]
                ends = [*map(floatToGoString, buckets.edges), "+Inf"]
                family.add_metric(labels, list(zip(ends, buckets.cumulative, strict=True)), buckets.sum)
            elif reasons:
                for reason, count in watch.finished.items():
                    family.add_metric([*labels, reason], count)
            elif quantity.name == "requests":
                family.add_metric(labels, sum(watch.finished.values()))
            elif quantity.name == "waiting" and watch.handles is not None:
                family.add_metric(labels, replica.num_queued - _waiting_for_handle(replica))
            elif quantity.name in OF_ENGINE:
                family.add_metric(labels, OF_ENGINE[quantity.name](replica))
            else:
                family.add_metric(labels, watch.counts[quantity.name])
        metric: Metric = family
        return metric

    def _cache_config(self) -> Metric:
        """Sizes of the KV cache, which routers and autoscalers of vLLM read."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        names = ["engine", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache.", labels=names)
        for engine in self._fleet.engines:
            sizes = (engine.replica, engine.policy.memory.page_size, engine.limits.num_pages)
            family.add_metric([*map(str, sizes)], 1.0)
        return family

    def _simulated(self, engine: str) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        info = GaugeMetricFamily(
            "dsim_simulated", "A twin without a GPU; its times are simulated.", labels=["dsim_speed", "engine"]
        )
        info.add_metric([f"{self._fleet.clock.speed:g}", RELEASES[engine]], 1.0)
        yield info
        yield GaugeMetricFamily(
            "dsim_simulated_time_seconds", "Simulated time since the start.",
            value=min(replica.time for replica in self._fleet.replicas),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "dsim_simulated_start_seconds", "When the simulated time was 0, in seconds since 1970.",
            value=self._fleet.clock.opened,
        )  # fmt: skip
