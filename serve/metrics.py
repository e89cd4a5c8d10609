"""The text of /metrics: a face's metrics of the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from .metric import OWN, Face, Metric, Values
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


class Page:
    """The text of /metrics. A family that is as it was when last asked for is not encoded again."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._collector = _Collector(fleet, model)
        self._encoded: dict[tuple[str, str], tuple[list[Any], bytes]] = {}  # by content type and name: samples, text

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Text and content type, by the client's Accept header."""
        from prometheus_client.exposition import choose_encoder  # other commands do not need it

        encoder, kind = choose_encoder(accept)
        end = encoder(_Families(()))  # OpenMetrics' last line
        parts = []
        for family in self._collector.collect():
            samples, part = self._encoded.get((kind, family.name), ([], b""))
            if not part or samples != family.samples:
                part = encoder(_Families((family,))).removesuffix(end)
                self._encoded[kind, family.name] = family.samples, part
            parts.append(part)
        return b"".join([*parts, end]), kind


class _Families(tuple[Any, ...]):
    """What prometheus_client's encoders read."""

    def collect(self) -> Iterator[Family]:
        return iter(self)


class _Collector:
    """What a page shows now."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model

    def collect(self) -> Iterator[Family]:
        """The face's metrics, those of this process, and three of dsim's own that show that time is simulated."""
        from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
        from prometheus_client.metrics_core import GaugeMetricFamily

        if self._fleet.face.one_process:
            for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
                yield from collector.collect()
        for metric in self._fleet.metrics:
            family = self._family(metric)
            # prometheus_client's page of several processes lacks metrics without a series.
            if family.samples or self._fleet.face.one_process:
                yield family
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
        from prometheus_client import metrics_core

        replicas, face = self._fleet.replicas, self._fleet.face
        each = [face.scopes[metric.scope](self._model, i, len(replicas)) for i in range(len(replicas))]
        names = [*each[0], *metric.labels]
        made: Any = getattr(metrics_core, f"{metric.kind.capitalize()}MetricFamily")
        family = made(metric.name, metric.about, labels=names)
        groups = [[replica] for replica in replicas] if metric.scope in OWN else [list(replicas)]
        for labels, group in zip(each, groups, strict=False):
            for values, shown in self._shown(metric, group).items():
                series = [*labels.values(), *values]
                if not isinstance(shown, Buckets):
                    family.add_metric(series, shown)
                elif metric.kind == "summary":
                    family.add_metric(series, shown.cumulative[-1], shown.sum)
                else:
                    family.add_metric(series, list(zip(_ends(shown.edges), shown.cumulative, strict=True)), shown.sum)
                if face.dated and metric.kind != "gauge":
                    begun = dict(zip(names, series, strict=True))
                    family.add_sample(f"{family.name}_created", begun, self._fleet.clock.opened)
        found: Family = family
        return found

    def _shown(self, metric: Metric, group: Sequence[Replica]) -> Mapping[Values, float | Buckets]:
        """A metric's values by labels, summed over replicas."""
        if isinstance(metric.value, str):
            tallies = [replica.watch.tallies for replica in group]
            if metric.scope not in OWN:
                tallies.append(self._fleet.tallies)
            return _sum(each.of(metric) for each in tallies)
        asked = [metric.value(self._fleet, replica) for replica in group]
        return _sum(shown if isinstance(shown, Mapping) else {(): shown} for shown in asked)


@cache
def _ends(edges: tuple[float, ...]) -> tuple[str, ...]:
    """The labels of a histogram's buckets."""
    from prometheus_client.utils import floatToGoString

    return (*map(floatToGoString, edges), "+Inf")


def _sum(parts: Iterable[Mapping[Values, float | Buckets]]) -> dict[Values, float | Buckets]:
    total: dict[Values, float | Buckets] = {}
    for part in parts:
        for values, more in part.items():
            if isinstance(more, Buckets):
                merged = total.setdefault(values, Buckets(more.edges))
                assert isinstance(merged, Buckets)
                merged.merge(more)
            else:
                before = total.get(values, 0.0)
                assert isinstance(before, int | float)
                total[values] = before + float(more)
    return total
