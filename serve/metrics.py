"""The text of /metrics: a face's metrics of the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from .metric import Face, Metric, Shown, Values
from .tallies import Buckets

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from .fleet import Fleet
    from .replica import Replica

FACES = ("vllm", "sglang", "lmdeploy")


def face_of(policy: str, asked: str | None = None) -> Face:
    """The one asked for, or that of the engine in the policy's name; vLLM's for other policies."""
    if asked is not None and asked not in FACES:
        raise DsimError(f"--metrics-as is {asked}, expected one of {', '.join(FACES)}")
    name = asked or next((name for name in FACES if policy.startswith(name)), FACES[0])
    from .lmdeploy_metrics import LMDEPLOY
    from .sglang_metrics import SGLANG
    from .vllm_metrics import VLLM

    return {"vllm": VLLM, "sglang": SGLANG, "lmdeploy": LMDEPLOY}[name]


def exposition(fleet: Fleet, model: str, accept: str = "") -> tuple[bytes, str]:
    """Text and content type, by the client's Accept header."""
    from prometheus_client.exposition import choose_encoder  # other commands do not need it

    encoder, kind = choose_encoder(accept)
    return encoder(_Collector(fleet, model)), kind


class _Collector:
    """What prometheus_client's encoders read."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model

    def collect(self) -> Iterator[Family]:
        """The face's metrics, and three of dsim's own that show that time is simulated."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        for metric in self._fleet.metrics:
            yield self._family(metric)
        if self._fleet.simulates:
            labels = {"dsim_speed": f"{self._fleet.clock.speed:g}", "engine": self._fleet.face.release}
            info = GaugeMetricFamily(
                "dsim_simulated", "A twin without a GPU; its times are simulated.", labels=[*labels]
            )
            info.add_metric([*labels.values()], 1.0)
            yield info
            yield GaugeMetricFamily(
                "dsim_simulated_time_seconds", "Simulated time since the start.",
                value=min(replica.time for replica in self._fleet.replicas),
            )  # fmt: skip
            yield GaugeMetricFamily(
                "dsim_simulated_start_seconds", "When the simulated time was 0, in seconds since 1970.",
                value=self._fleet.clock.opened,
            )  # fmt: skip

    def _family(self, metric: Metric) -> Family:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        replicas, face = self._fleet.replicas, self._fleet.face
        each = [dict(face.labels(self._model, i, len(replicas))) for i in range(len(replicas))]
        names = list(each[0]) if metric.scope == "engine" else list(face.server_labels)
        if metric.scope == "bare":
            names = ["engine"]
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        family: Any = kinds[metric.kind](metric.name, metric.about, labels=[*names, *metric.labels])
        groups = [[replica] for replica in replicas] if metric.scope != "server" else [list(replicas)]
        for labels, group in zip(each, groups, strict=False):
            own = [labels[name] for name in names]
            for values, shown in self._shown(metric, group).items():
                if isinstance(shown, Buckets):
                    ends = [*map(str, shown.edges), "+Inf"]
                    family.add_metric([*own, *values], list(zip(ends, shown.cumulative, strict=True)), shown.sum)
                else:
                    family.add_metric([*own, *values], shown)
        found: Family = family
        return found

    def _shown(self, metric: Metric, group: Iterable[Replica]) -> Mapping[Values, float | Buckets]:
        """A metric's values by labels, summed over replicas."""
        total: dict[Values, float | Buckets] = {}
        for replica in group:
            tallies = replica.watch.tallies
            if metric.kind == "histogram":
                for values, buckets in tallies.histograms[metric.name].copy().items():
                    merged = total.setdefault(values, Buckets(buckets.edges))
                    assert isinstance(merged, Buckets)
                    merged.merge(buckets)
                continue
            shown: Shown
            if isinstance(metric.value, str):
                shown = tallies.counters[metric.name].copy()
            else:
                shown = metric.value(self._fleet, replica)
            for values, value in shown.items() if isinstance(shown, Mapping) else (((), shown),):
                before = total.get(values, 0.0)
                assert isinstance(before, int | float)
                total[values] = before + float(value)
        return total
