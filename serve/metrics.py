"""The text of /metrics: a face's metrics of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_ByLabels = Mapping[Values, float | Buckets]


def face_of(policy: str, asked: str | None = None) -> Face:
    """The face asked for, or that of the engine in the policy's name; vLLM's for other policies."""
    if asked is not None and asked not in FACES:
        raise DsimError(f"--metrics-as is {asked}, expected one of {', '.join(FACES)}")
    name = asked or next((name for name in FACES if policy.startswith(name)), FACES[0])
    from .lmdeploy_metrics import LMDEPLOY
    from .sglang_metrics import SGLANG
    from .vllm_metrics import VLLM

    return {"vllm": VLLM, "sglang": SGLANG, "lmdeploy": LMDEPLOY}[name]


class Page:
    """The text of /metrics. Series that are as they were when last asked for get new values only."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model
        self._encoded: dict[tuple[str, str], Encoded] = {}  # by content type and name

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Text and content type, by the client's Accept header."""
        from prometheus_client.exposition import choose_encoder  # other commands do not need it

        encoder, kind = choose_encoder(accept)
        parts = []
        for shown in self._shown():
            encoded = self._encoded.get((kind, shown.name))
            if encoded is None or encoded.series != shown.series:
                encoded = self._encoded[kind, shown.name] = Encoded(encoder, shown.series, shown.family())
            parts.append(encoded.text(shown.values))
        return b"".join([*parts, encoder(Families(()))]), kind  # OpenMetrics has a last line

    def _shown(self) -> Iterator[_Shown]:
        """The face's metrics, those of this process, and three of dsim's own that show that time is simulated."""
        from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
        from prometheus_client.metrics_core import GaugeMetricFamily

        if self._fleet.face.one_process:
            for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
                yield from map(_shown_by, collector.collect())
        for metric in self._fleet.metrics:
            shown = self._metric(metric)
            # prometheus_client's page of several processes lacks metrics without a series.
            if shown.values or self._fleet.face.one_process:
                yield shown
        if self._fleet.simulates:
            labels = {"dsim_speed": f"{self._fleet.clock.speed:g}", "engine": self._fleet.face.release}
            info = GaugeMetricFamily(
                "dsim_simulated", "A twin without a GPU; its times are simulated.", labels=[*labels]
            )
            info.add_metric([*labels.values()], 1.0)
            yield _shown_by(info)
            yield _shown_by(GaugeMetricFamily(
                "dsim_simulated_time_seconds", "Simulated time since the start.",
                value=min(replica.time for replica in self._fleet.replicas),
            ))  # fmt: skip
            yield _shown_by(GaugeMetricFamily(
                "dsim_simulated_start_seconds", "When the simulated time was 0, in seconds since 1970.",
                value=self._fleet.clock.opened,
            ))  # fmt: skip

    def _metric(self, metric: Metric) -> _Shown:
        """A metric's values, in the order of its family's samples."""
        replicas, dated = self._fleet.replicas, self._fleet.face.dated and metric.kind != "gauge"
        groups = [[replica] for replica in replicas] if metric.scope in OWN else [list(replicas)]
        by_labels = [self._by_labels(metric, group) for group in groups]
        values: list[float] = []
        for group in by_labels:
            for shown in group.values():
                if isinstance(shown, Buckets):
                    counts = shown.cumulative
                    values += [*(counts if metric.kind == "histogram" else ()), counts[-1], shown.sum]
                else:
                    values.append(shown)
                if dated:
                    values.append(self._fleet.clock.opened)
        series = [[*group] for group in by_labels]
        return _Shown(metric.name, series, values, lambda: self._family(metric, by_labels, dated))

    def _family(self, metric: Metric, by_labels: Sequence[_ByLabels], dated: bool) -> Family:
        from prometheus_client import metrics_core

        count = len(self._fleet.replicas)
        each = [self._fleet.face.scopes[metric.scope](self._model, i, count) for i in range(count)]
        names = [*each[0], *metric.labels]
        made: Any = getattr(metrics_core, f"{metric.kind.capitalize()}MetricFamily")
        family = made(metric.name, metric.about, labels=names)
        for labels, group in zip(each, by_labels, strict=False):
            for own, shown in group.items():
                series = [*labels.values(), *own]
                if not isinstance(shown, Buckets):
                    family.add_metric(series, shown)
                elif metric.kind == "summary":
                    family.add_metric(series, shown.cumulative[-1], shown.sum)
                else:
                    family.add_metric(series, list(zip(_ends(shown.edges), shown.cumulative, strict=True)), shown.sum)
                if dated:
                    begun = dict(zip(names, series, strict=True))
                    family.add_sample(f"{family.name}_created", begun, self._fleet.clock.opened)
        found: Family = family
        return found

    def _by_labels(self, metric: Metric, group: Sequence[Replica]) -> _ByLabels:
        """A metric's values by labels, summed over replicas."""
        if isinstance(metric.value, str):
            tallies = [replica.watch.tallies for replica in group]
            if metric.scope not in OWN:
                tallies.append(self._fleet.tallies)
            return _sum(each.of(metric) for each in tallies)
        asked = [metric.value(self._fleet, replica) for replica in group]
        return _sum(shown if isinstance(shown, Mapping) else {(): shown} for shown in asked)


@dataclass(frozen=True)
class _Shown:
    """What a family shows now."""

    name: str
    series: list[Any]  # equal if the family has the same samples, with other values
    values: list[float]  # of its samples
    family: Callable[[], Family]


def _shown_by(family: Family) -> _Shown:
    series = [(sample.name, sample.labels) for sample in family.samples]
    return _Shown(family.name, series, [sample.value for sample in family.samples], lambda: family)


class Encoded:
    """A family's text as an encoder writes it, with places for the values of its samples."""

    def __init__(self, encoder: Callable[[Any], bytes], series: list[Any], family: Family) -> None:
        self.series = series
        self._before: list[str] = []  # text before each value
        self._order: list[int] = []  # of the values in the text
        self._values: list[float] | None = None
        self._text = b""
        # Encode the samples' indices as their values, to see where each value goes.
        family.samples = [sample._replace(value=float(i)) for i, sample in enumerate(family.samples)]
        text = encoder(Families((family,))).removesuffix(encoder(Families(()))).decode()
        self._after = ""  # text after the last value
        for line in text.removesuffix("\n").split("\n"):
            if line.startswith("#"):
                self._after += f"{line}\n"
                continue
            before, _, index = line.rpartition(" ")
            self._before.append(f"{self._after}{before} ")
            self._order.append(int(float(index)))
            self._after = "\n"

    def text(self, values: list[float]) -> bytes:
        """The text with these values."""
        from prometheus_client.utils import floatToGoString

        if values != self._values:
            shown = map(floatToGoString, (values[i] for i in self._order))
            pieces = (piece for pair in zip(self._before, shown, strict=True) for piece in pair)
            self._values, self._text = values, "".join([*pieces, self._after]).encode()
        return self._text


class Families(tuple[Any, ...]):
    """What prometheus_client's encoders read."""

    def collect(self) -> Iterator[Family]:
        return iter(self)


@cache
def _ends(edges: tuple[float, ...]) -> tuple[str, ...]:
    """The labels of a histogram's buckets."""
    from prometheus_client.utils import floatToGoString

    return (*map(floatToGoString, edges), "+Inf")


def _sum(parts: Iterable[_ByLabels]) -> dict[Values, float | Buckets]:
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
