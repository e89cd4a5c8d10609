"""The follower: takes scrapes, judges windows, refits the profile, and stores everything in its folder."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import DsimError, MachineError
from ..files.read import parsing
from ..planner.record import doubts_of
from ..profiler.placed import placed
from ..profiler.profile import save
from ..results.metrics import no_nan
from ..results.slo import Slo
from ..results.world import World
from ..traces import Trace
from ..traces.write import write
from . import refit
from .alarms import MEMORY, Alarm, Alarms, learnt_band, widened
from .outlook import advice, capacity, what_ifs
from .predicted import Observed, Prediction, bands_of, predict
from .residuals import DISTRIBUTIONS, LOAD, PRICES, RULE, TRAFFIC, Residuals, of_traffic, share_within
from .sources.growing import AccessLog
from .sources.sample import Buckets, Sample
from .store import Lines
from .windows import REQUESTS, SECONDS, Arrivals, Cutter, Scrape, Window, trace_of, with_open

SCHEMA, VERSION = "dsim-follow", 1
RECORDS = 2000  # in memory, about a week
WINDOWS = 12  # in memory, an hour
HOUR = 3600.0  # s
BASELINE = 6  # windows that tell the usual traffic
DAY = 86400.0
Tell = Callable[[str], None]
Record = dict[str, Any]  # of a window, as it is stored


@dataclass(frozen=True)
class Followed:
    """The servers to follow, and how to follow them."""

    world: World
    urls: tuple[str, ...]
    interval: float = 5.0  # s
    seconds: float = SECONDS  # of a window
    requests: int = REQUESTS  # of a window
    attainment: float = 0.99  # share of requests that are to meet the SLOs
    most_bytes: int = 256 << 20  # of the samples on disk
    outlook: bool = True  # replay what-ifs, and search the capacity


class Follower:
    """Everything that is known about a followed server. `add` takes the next scrape."""

    def __init__(
        self, followed: Followed, folder: Path, log: AccessLog | None = None, tell: Tell = lambda line: None
    ) -> None:  # fmt: skip
        self.followed, self.folder, self.tell = followed, folder, tell
        self.log = log
        self._now = math.inf  # s since 1970, of the newest scrape since the start
        self._scrapes = Lines(folder / "samples", followed.most_bytes)
        self._windows = Lines(folder / "windows", max(1 << 20, followed.most_bytes // 8))
        self._versions = Lines(folder / "versions", 64 << 20)
        self._cutter = Cutter(followed.interval, followed.seconds, followed.requests)
        self.alarms = Alarms()
        self.versions: list[refit.Version] = []
        self.windows: deque[Record] = deque(maxlen=RECORDS)
        self.last: Scrape | None = None
        self._capacity: float | None = None  # req/s, of the twin
        self._searched = -math.inf  # s since 1970, when the capacity was last searched
        self._world, self._setting = followed.world, followed.world.setting().check()
        self._observed: deque[Observed] = deque(maxlen=WINDOWS)
        self._before: Observed | None = None  # the window before the open one, in the same stretch
        self._bands: dict[str, float] | None = None
        self._usual: dict[str, float] = {}  # traffic
        self._usual_bands: dict[str, float] = {}  # for its own error
        self._errors: dict[str, float] = {}  # standard errors of quantities that windows have measured
        self._fitted = -math.inf  # s since 1970, the end of the windows of the last fit
        self._resume()

    @property
    def world(self) -> World:
        """The world on the current profile."""
        return self._world

    @property
    def version(self) -> int:
        return self.versions[-1].number if self.versions else 0

    @property
    def open_window(self) -> Window | None:
        """The window that is still filling."""
        return self._cutter.open

    def add(self, scrape: Scrape) -> Record | None:
        """Store a scrape; return the record of the window that it completes, if any."""
        self._now = scrape.time
        if self.log is not None:
            self.log.read()
        samples = [sample and vars(sample) for sample in scrape.samples]
        self._scrapes.append({"time": scrape.time, "samples": samples})
        return self._take(scrape)

    def _take(self, scrape: Scrape) -> Record | None:
        stretches = self._cutter.stretches
        self.last = scrape
        window = self._cutter.add(scrape)
        if self._cutter.stretches != stretches:
            self.tell(f"A new stretch begins: {self._cutter.broken}")
            self._before = None
        if window is None:
            return None
        try:
            with parsing("a window", "traffic"):
                return self._judge(window)
        except MachineError:
            raise
        except DsimError as error:  # of what a page or a log holds
            self.tell(f"Not judged: {error}")
            return None

    def _observe(self, window: Window) -> Observed:
        before = None
        if self._before is not None:
            run_in = self._before.window.run_in
            before = Observed(run_in, self._arrivals(run_in))
        return Observed(window, self._arrivals(window), before)

    def _arrivals(self, window: Window) -> Arrivals | None:
        if self.log is None:
            return None
        logged = self.log.arrivals(window.begin, window.end, self._now)
        return None if logged is None else with_open(logged, window, self.followed.world.seed)

    def _judge(self, window: Window) -> Record | None:
        """Compare a window with its replays; None for the first window of a stretch: it is the run-in of the next."""
        observed = self._observe(window)
        follows, self._before = self._before is not None, observed
        self._observed.append(observed)
        if not follows or (self.windows and window.end <= self.windows[-1]["end"]):  # judged before a restart
            return None
        prediction = predict(self._world, self._setting, observed)
        if self._bands is None:
            self._bands = bands_of(self._world, observed, self._errors)
        residuals, bands = dict(prediction.residuals), self._bands | self._usual_bands
        if self._usual:
            residuals |= of_traffic(window, self._usual)
        waiting = set()
        if prediction.extrapolating or self.unmeasured is not None:
            waiting.add(PRICES)
        explained = self.alarms.explain(residuals)
        measured = {name: factor for name, factor in explained.items() if factor is not None}
        if measured.keys() != explained.keys():
            waiting.add(RULE)
        elif measured:
            moved, errors = refit.at_measured(self._world, self._setting, observed, prediction, measured)
            residuals |= moved
            bands |= {name: widened(RULE, bands.get(name, 0.0), error) for name, error in errors.items()}
        raised = self.alarms.add(window.end, residuals, bands, waiting)
        settled = self.alarms.settle(bands)
        record = self._record(window, prediction, residuals, observed)
        record["raised"], record["settled"] = [alarm.to_json() for alarm in raised], settled
        for alarm in raised:
            self.tell(f"ALARM {alarm.words}")
        for cause in settled:
            self.tell(f"Over: {cause}")
        self._learn_traffic(record)
        record["usual"], record["usual_bands"] = dict(self._usual), dict(self._usual_bands)
        self._refit(record)
        if self.followed.outlook:
            self._look_ahead(window, record)
        record["version"], record["errors"], record["fitted"] = self.version, self._errors, self._fitted
        record["alarms"] = {cause: alarm.to_json() for cause, alarm in self.alarms.open.items()}
        record["unmeasured"] = self.unmeasured
        record["charts"] = {name: chart.state() for name, chart in self.alarms.charts.items()}
        clean: Record = no_nan(record)
        self._windows.append(clean)
        self.windows.append(clean)
        return clean

    def _record(
        self, window: Window, prediction: Prediction, residuals: Mapping[str, tuple[float, float]], observed: Observed
    ) -> Record:  # fmt: skip
        last = window.samples[-1].histograms
        measured = {name: b for name in DISTRIBUTIONS if name in last and (b := window.histogram(name)) is not None}
        twin = {}
        for name in measured:
            replayed = (replay.window.histogram(name) for replay in prediction.replays)
            twin[name] = reduce(Buckets.plus, filter(None, replayed))
        slos = {}
        for text in self.followed.world.slos:
            slo = Slo.parse(text)
            if slo.metric in measured and slo.slo_class is None:
                pair = (measured[slo.metric], twin[slo.metric])
                slos[text] = [share_within(buckets, slo.bound) for buckets in pair]
        charts = {name: chart for name, chart in self.alarms.charts.items() if chart.num_windows}
        crowded = window.gauge("running")[window.gauge("waiting") > 0]  # while requests waited
        return {
            "begin": window.begin, "end": window.end, "replicas": window.replicas, "requests": window.num_arrivals,
            "drawn": observed.arrivals is None, "extrapolating": prediction.extrapolating,
            "residuals": {name: list(residual) for name, residual in residuals.items()},
            "smooth": {name: chart.mean for name, chart in charts.items()},
            "deviations": {name: chart.deviation() for name, chart in charts.items()},
            "bands": self._bands,
            "traffic": {name: getattr(window, name) for name in LOAD},
            "gauges": {name: float(window.gauge(name)[1:].mean()) for name in ("running", "waiting", "kv_usage")},
            "most_running": float(crowded.max()) / window.replicas if len(crowded) else None,
            "measured": {name: buckets.mean for name, buckets in measured.items()},
            "predicted": {name: buckets.mean for name, buckets in twin.items()},
            "slos": slos,
        }  # fmt: skip

    def _learn_traffic(self, record: Record) -> None:
        """Learn the usual traffic from the first windows, or those after a traffic alarm."""
        since: list[Record] = []
        for earlier in (*self.windows, record):
            if TRAFFIC in {alarm["cause"] for alarm in earlier["raised"]}:
                since = []
            since.append(earlier)
        if len(since) != BASELINE:
            return
        means = {name: np.mean([earlier["traffic"][name] for earlier in since]) for name in LOAD}
        self._usual = {name: float(mean) for name, mean in means.items() if math.isfinite(mean)}
        self._usual_bands = dict.fromkeys(self._usual, learnt_band(sum(earlier["requests"] for earlier in since)))
        if TRAFFIC in self.alarms.open:
            self.tell("The traffic of now is the usual one")
            self._forget_capacity()
        self.alarms.close((TRAFFIC,))

    def _refit(self, record: Record) -> None:
        """Fit the profile to the windows since an alarm about prices or yield, or to the first ones; then use it.

        The first windows of a profile that is not valid only measure how precisely windows tell the factors.
        """
        alarms = {cause: alarm for cause, alarm in self.alarms.open.items() if cause in refit.FITTED_CAUSES}
        if not alarms and (self.versions or self._errors):
            return
        first = min((alarm.since for alarm in alarms.values()), default=-math.inf)
        windows = [w for w in (*self.windows, record) if w["end"] >= first and w["end"] > self._fitted]
        windows = windows[-refit.MOST_EVIDENCE :]
        evidence = [(w["gauges"]["running"], _residuals_of(w)) for w in windows]
        if len(windows) < refit.EVIDENCE:
            return
        causes = alarms or refit.FITTED_CAUSES
        if len(windows) < refit.MOST_EVIDENCE and not refit.precise(evidence, causes, self.alarms.deviations):
            return
        factors, self._errors = refit.fit(evidence)
        self._fitted = record["end"]
        self._bands = None  # windows have measured the profile: its uncertainty widens no allowance
        if factors == refit.Factors() or (not alarms and self._setting.profile.fit.doubts):
            return
        number = self.version + 1
        path = self.folder / "profiles" / f"v{number}.json"
        path.parent.mkdir(exist_ok=True)
        name = f"{self.followed.world.loaded_profile().name}-v{number}"
        save(replace(refit.scaled(self._setting, factors), name=name), path, force=True)
        reason = "; ".join(alarm.words for alarm in alarms.values()) or "the first windows"
        version = refit.Version(
            number=number, time=record["end"], begin=windows[0]["begin"], windows=len(windows),
            reason=reason, factors=factors, errors=self._errors, profile=str(path),
        )  # fmt: skip
        self._versions.append(asdict(version))
        self.versions.append(version)
        self._use(version)
        self._forget_capacity()
        self.alarms.close(refit.FITTED_CAUSES)
        self.tell(f"Profile version {number} is in force: {factors.words} ({reason})")

    def _use(self, version: refit.Version) -> None:
        """Put a version's profile in force, whose file includes the yields and the front end."""
        policy = placed(self._world.policy)[0]
        self._world = replace(self._world, profile=version.profile, policy=policy, yields=None, frontend=None)
        self._setting = self._world.setting()

    def _forget_capacity(self) -> None:
        """Search the capacity anew, since the profile or the traffic has changed."""
        self._capacity, self._searched = None, -math.inf

    def _look_ahead(self, window: Window, record: Record) -> None:
        """Add what-ifs, the capacity and one recommendation to the record; search the capacity anew if it is old."""
        target, recent = self.followed.attainment, self.recent()
        fleet = replace(self._world, replicas=window.replicas)
        outcomes = what_ifs(self._world, recent, window.replicas)
        if window.end - self._searched > HOUR:
            self._searched = window.end
            self._capacity = capacity(fleet, recent, window.rate, target)
            write(self.traffic(), self.folder / "traffic.jsonl", force=True)
        words = {cause: alarm.words for cause, alarm in self.alarms.open.items()}
        shares = [high for (_, high), _ in record["slos"].values() if high == high]
        running, allowed = record["most_running"], self._setting.limits.max_batch
        rows = (running, allowed) if running is not None and running < allowed else None
        advised = advice(outcomes, self.capacity, window.rate, target, words, min(shares, default=1.0), rows)
        if doubts := doubts_of(fleet, recent):
            advised = replace(advised, why="; ".join((advised.why.removesuffix("."), *doubts)))
        record |= {
            "what_if": [vars(outcome) for outcome in outcomes], "capacity": self._capacity, "searched": self._searched,
            "advice": vars(advised),
        }  # fmt: skip

    @property
    def capacity(self) -> float | None:
        """The server's (req/s); None while the twin is not the server."""
        return None if self.alarms.open.keys() - {TRAFFIC} else self._capacity

    def recent(self) -> Trace:
        """The requests of the last two windows, as a trace."""
        return self._observed[-1].trace(self._world.seed)[0]

    def traffic(self) -> Trace:
        """The arrivals of the windows in memory, as one trace."""
        parts = [observed.arrivals_of(self._world.seed).copy() for observed in self._observed]
        for arrivals, observed in zip(parts, self._observed, strict=True):
            arrivals.time += observed.window.begin
        return trace_of(np.concatenate(parts), "followed traffic")

    @property
    def unmeasured(self) -> str | None:
        """Why the profile is not valid, until a refit has measured the server: prices wait. None: they do not wait."""
        doubts = self._setting.profile.fit.doubts
        return doubts[0] if doubts and not self._errors else None

    def _resume(self) -> None:
        """Continue from the folder after an interruption."""
        self.versions = [refit.Version.from_json(line) for line in self._versions]
        if self.versions:
            self._use(self.versions[-1])
        self.windows.extend(reversed(list(islice(self._windows.newest(), RECORDS))))
        if self.windows:
            self._restore(self.windows[-1])
        # Cut the windows in memory again: they are the traffic of a search, and the run-in of the next window.
        begin = self.windows[-min(len(self.windows), WINDOWS + 1)]["begin"] if self.windows else 0.0
        for line in reversed(list(takewhile(lambda line: line["time"] >= begin, self._scrapes.newest()))):
            samples = tuple(None if sample is None else Sample.from_json(sample) for sample in line["samples"])
            if len(samples) == len(self.followed.urls):
                self._take(Scrape(float(line["time"]), samples))

    def _restore(self, last: Record) -> None:
        """Restore the state after the newest window, from its record."""
        residuals = [_residuals_of(record) for record in list(self.windows)[-MEMORY:]]
        for name, chart in self.alarms.charts.items():
            chart.restore(last["charts"][name], [window[name] for window in residuals if name in window])
        self.alarms.open = {cause: Alarm.from_json(alarm) for cause, alarm in last["alarms"].items()}
        self._usual, self._usual_bands = dict(last["usual"]), dict(last["usual_bands"])
        self._errors, self._bands = dict(last["errors"]), last["bands"]
        self._fitted = -math.inf if last["fitted"] is None else last["fitted"]
        if last["version"] != self.version or last["fitted"] == last["end"]:
            self._bands = None
        if last["version"] != self.version:  # a kill came after the adoption and before the window's record
            self._errors, self._fitted = dict(self.versions[-1].errors), self.versions[-1].time
            self.alarms.close(refit.FITTED_CAUSES)
            return
        self._capacity, self._searched = last.get("capacity"), last.get("searched", -math.inf)


def _residuals_of(record: Mapping[str, Any]) -> Residuals:
    pairs = record["residuals"].items()
    return {name: (float(residual), float(spread)) for name, (residual, spread) in pairs if residual is not None}
