"""The follower: takes scrapes, judges windows, refits the profile, and stores everything in its folder."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import DsimError, MachineError
from ..files.read import parsing
from ..files.schema import stored
from ..planner.record import doubts_of
from ..profiler.placed import placed
from ..profiler.profile import save
from ..results.slo import Slo
from ..results.world import World
from ..traces import Trace
from ..traces.canonical import write
from . import refit
from .alarms import MEMORY, Alarm, Alarms, learnt_band
from .lines import Lines
from .outlook import advice, capacity, what_ifs
from .predicted import Observed, Prediction, doubt_of, predict
from .residuals import DISTRIBUTIONS, LOAD, PRICES, RULE, TRAFFIC, YIELD, Residuals, of_traffic, share_within
from .sources.sample import Buckets, Sample
from .windows import REQUESTS, SECONDS, Cutter, Scrape, Window, drawn_arrivals, trace_of

SCHEMA, VERSION = "dsim-follow", 1
RECORDS = 2000  # in memory, about a week
SCRAPES = 5000  # on disk, twice at most; a window's end drops the older ones
WINDOWS = 12  # an hour: their requests are stored as a trace
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


class Follower:
    """Everything that is known about a followed server. `add` takes the next scrape."""

    def __init__(self, followed: Followed, folder: Path, tell: Tell = lambda line: None) -> None:
        self.followed, self.folder, self.tell = followed, folder, tell
        folder.mkdir(parents=True, exist_ok=True)
        self._scrapes = Lines(folder / "samples.jsonl", SCRAPES)
        self._windows = Lines(folder / "windows.jsonl", RECORDS)
        self._cutter = Cutter(followed.interval, followed.seconds, followed.requests)
        self.alarms = Alarms()
        self.windows: deque[Record] = deque(self._windows, maxlen=RECORDS)
        self.last: Scrape | None = None
        self.version = 0  # of the profile; 0 is the given one
        self._profile: str | None = None  # the file of a later version
        self._capacity: float | None = None  # req/s, of the twin
        self._searched = -math.inf  # s since 1970, when the capacity was last searched
        self.world, self._setting = followed.world, followed.world.setting().check()  # on the current profile
        self._observed: deque[Window] = deque(maxlen=WINDOWS)
        self._before: Window | None = None  # the window before the open one, in the same stretch
        self._usual: dict[str, float] = {}  # traffic
        self._usual_bands: dict[str, float] = {}  # for its own error
        self._fitted = -math.inf  # s since 1970, the end of the windows of the last fit
        if self.windows:
            self._restore(self.windows[-1])
        # The stored scrapes are those of the newest window, the run-in of the next, and of the open one.
        for line in list(self._scrapes):
            samples = tuple(sample and Sample.from_json(sample) for sample in line["samples"])
            if len(samples) == len(followed.urls):
                self._take(Scrape(float(line["time"]), samples))

    @property
    def open_window(self) -> Window | None:
        """The window that is still filling."""
        return self._cutter.open

    def add(self, scrape: Scrape) -> Record | None:
        """Store a scrape; return the record of the window that it completes, if any."""
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
        record = None
        try:
            with parsing("a window", "traffic"):
                record = self._judge(window)
        except MachineError:
            raise
        except DsimError as error:  # of the page's values
            self.tell(f"Not judged: {error}")
        self._scrapes.replace([line for line in self._scrapes if line["time"] >= window.begin])
        return record

    def _judge(self, window: Window) -> Record | None:
        """Compare a window with its replays; None for the first window of a stretch: it is the run-in of the next."""
        before, self._before = self._before, window
        self._observed.append(window)
        if before is None or (self.windows and window.end <= self.windows[-1]["end"]):  # judged before a restart
            return None
        observed = Observed(window, before.run_in)
        prediction = predict(self.world, self._setting, observed)
        residuals = prediction.residuals | of_traffic(window, self._usual)
        waiting = set()
        if self._fitted < 0:
            waiting |= {PRICES, YIELD}
        if prediction.extrapolating:
            waiting.add(PRICES)
        if self.alarms.explained(residuals):
            waiting.add(RULE)
        bands = self._usual_bands | {"step_time": doubt_of(self._setting.profile)}
        raised = self.alarms.add(window.end, residuals, bands, waiting)
        settled = self.alarms.settle(bands)
        record = self._record(window, prediction, residuals)
        record["raised"], record["settled"] = [asdict(alarm) for alarm in raised], settled
        for alarm in raised:
            self.tell(f"ALARM {alarm.words}")
        for cause in settled:
            self.tell(f"Over: {cause}")
        self._learn_traffic(record)
        self._refit(record)
        if self.followed.world.slos:
            self._look_ahead(observed, record)
        record |= {
            "version": self.version,
            "profile": self._profile,
            "fitted": self._fitted,
            "usual": self._usual,
            "usual_bands": self._usual_bands,
            "capacity": self._capacity,
            "searched": self._searched,
            "alarms": self.alarms.open,
            "charts": {name: chart.state() for name, chart in self.alarms.charts.items()},
        }
        clean: Record = stored(record)
        self._windows.append(clean)
        self.windows.append(clean)
        return clean

    def _record(self, window: Window, prediction: Prediction, residuals: Residuals) -> Record:
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
                slos[text] = [share_within(side[slo.metric], slo.bound) for side in (measured, twin)]
        charts = {name: chart for name, chart in self.alarms.charts.items() if chart.num_windows}
        return {
            "begin": window.begin,
            "end": window.end,
            "replicas": window.replicas,
            "requests": window.num_arrivals,
            "extrapolating": prediction.extrapolating,
            "residuals": {name: list(residual) for name, residual in residuals.items()},
            "smooth": {name: chart.mean for name, chart in charts.items()},
            "deviations": {name: chart.deviation() for name, chart in charts.items()},
            "traffic": {name: getattr(window, name) for name in LOAD},
            "gauges": {name: float(window.gauge(name)[1:].mean()) for name in ("running", "waiting", "kv_usage")},
            "measured": {name: buckets.mean for name, buckets in measured.items()},
            "predicted": {name: buckets.mean for name, buckets in twin.items()},
            "slos": slos,
        }

    def _learn_traffic(self, record: Record) -> None:
        """Learn the usual traffic from the first windows, or those after a traffic alarm."""
        since: list[Record] = []
        for window in (*self.windows, record):
            if TRAFFIC in {alarm["cause"] for alarm in window["raised"]}:
                since = []
            since.append(window)
        if len(since) != BASELINE:
            return
        means = {name: np.mean([window["traffic"][name] for window in since]) for name in LOAD}
        self._usual = {name: float(mean) for name, mean in means.items() if math.isfinite(mean)}
        self._usual_bands = dict.fromkeys(self._usual, learnt_band(sum(window["requests"] for window in since)))
        if TRAFFIC in self.alarms.open:
            self.tell("The traffic of now is the usual one")
            self._searched = -math.inf
        self.alarms.close((TRAFFIC,))

    def _refit(self, record: Record) -> None:
        """Fit the profile to the first windows, or those since an alarm about prices or yield; then use it.

        A profile that is not valid is kept until an alarm: its prices vary by themselves.
        """
        alarms = [alarm for cause, alarm in self.alarms.open.items() if cause in refit.FITTED_CAUSES]
        if not alarms and self._fitted > 0:
            return
        first = min((alarm.since for alarm in alarms), default=-math.inf)
        windows = [w for w in (*self.windows, record) if w["end"] >= first and w["end"] > self._fitted]
        windows = windows[-refit.MAX_EVIDENCE :]
        if len(windows) < refit.EVIDENCE:
            return
        factors, errors = refit.fit([_residuals_of(window) for window in windows])
        if len(windows) < refit.MAX_EVIDENCE and max(errors.values(), default=0.0) > refit.PRECISE:
            return
        self._fitted = record["end"]
        if factors == refit.Factors() or (not alarms and self._setting.profile.fit.doubts):
            return
        self.version += 1
        path = self.folder / "profiles" / f"v{self.version}.json"
        path.parent.mkdir(exist_ok=True)
        name = f"{self.followed.world.loaded_profile().name}-v{self.version}"
        save(replace(refit.scaled(self._setting, factors), name=name), path, force=True)
        reason = "; ".join(alarm.words for alarm in alarms) or "the first windows"
        record["adopted"] = {
            "version": self.version,
            "begin": windows[0]["begin"],
            "windows": len(windows),
            "words": factors.words,
            "factors": asdict(factors),
            "reason": reason,
        }
        self._use(str(path))
        self._searched = -math.inf
        self.alarms.close(refit.FITTED_CAUSES)
        self.tell(f"Profile version {self.version} is in force: {factors.words} ({reason})")

    def _use(self, profile: str) -> None:
        """Use a version's profile; its file includes the yields and the front end."""
        self._profile = profile
        policy = placed(self.world.policy)[0]
        self.world = replace(self.world, profile=profile, policy=policy, yields=None, frontend=None)
        self._setting = self.world.setting()

    def _look_ahead(self, observed: Observed, record: Record) -> None:
        """Add what-ifs and one recommendation to the record; search the capacity anew if it is old."""
        window, target = observed.window, self.followed.attainment
        recent = observed.trace(self.world.seed)[0]
        fleet = replace(self.world, replicas=window.replicas)
        outcomes = what_ifs(self.world, recent, window.replicas)
        if window.end - self._searched > HOUR:
            self._searched = window.end
            self._capacity = capacity(fleet, recent, window.rate, target)
            write(self.traffic(), self.folder / "traffic.jsonl", force=True)
        words = {cause: alarm.words for cause, alarm in self.alarms.open.items()}
        shares = [high for (_, high), _ in record["slos"].values() if high == high]
        advised = advice(outcomes, self.capacity, window.rate, target, words, min(shares, default=1.0))
        doubts = "".join(f"; {line}" for line in doubts_of(fleet, recent))
        record["what_if"] = outcomes
        record["advice"] = {"action": advised.action, "reason": advised.reason + doubts}

    @property
    def capacity(self) -> float | None:
        """The server's (req/s); None while the twin is not the server."""
        return None if self.alarms.open.keys() - {TRAFFIC} else self._capacity

    def traffic(self) -> Trace:
        """The arrivals of the windows in memory, as one trace."""
        parts = []
        for window in self._observed:
            arrivals = drawn_arrivals(window, self.world.seed)
            arrivals.time += window.begin
            parts.append(arrivals)
        return trace_of(np.concatenate(parts))

    def _restore(self, last: Record) -> None:
        """Restore the state after the newest window, from its record."""
        residuals = [_residuals_of(record) for record in list(self.windows)[-MEMORY:]]
        for name, chart in self.alarms.charts.items():
            chart.restore(last["charts"][name], [window[name] for window in residuals if name in window])
        self.alarms.open = {cause: Alarm(**alarm) for cause, alarm in last["alarms"].items()}
        self._usual, self._usual_bands = dict(last["usual"]), dict(last["usual_bands"])
        self._capacity, self._searched = last["capacity"], last["searched"] or -math.inf
        self._fitted = last["fitted"] or -math.inf
        self.version = last["version"]
        if last["profile"] is not None:
            self._use(last["profile"])


def _residuals_of(record: Mapping[str, Any]) -> Residuals:
    pairs = record["residuals"].items()
    return {name: (float(residual), float(spread)) for name, (residual, spread) in pairs if residual is not None}
