"""The follower: takes scrapes, judges windows, refits the profile, and stores everything in its folder."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import DsimError, MachineError
from ..files.read import parsing, read_json
from ..files.write import json_text, write_whole
from ..profiler.placed import placed
from ..profiler.profile import from_json, save
from ..results.metrics import no_nan
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..sim.setting import Setting
from ..traces import Trace
from . import refit
from .alarms import MEMORY, Alarm, Alarms, learnt_band, widened
from .background import Background, Inline
from .outlook import Headroom, WhatIf, advice, contradicted, growth, search_headroom, what_ifs
from .predicted import GRADES, Prediction, Seen, bands_of, predict
from .residuals import (
    DISTRIBUTIONS,
    LOAD,
    PRICES,
    RULE,
    TRAFFIC,
    YIELD,
    Residuals,
    of_traffic,
    share_within,
)
from .sources.growing import GrowingLogs
from .sources.sample import Buckets, Sample
from .store import Lines
from .windows import REQUESTS, SECONDS, Arrivals, Cutter, Scrape, Window, with_open

SCHEMA, VERSION = "dsim-follow", 1
HELD = 2000  # records in memory, about a week
KEPT = 12  # windows in memory, enough for a refit's evidence
HOUR = 3600.0  # s
CANDIDATE = "candidate.json"  # the newest candidate
BASELINE = 6  # windows that stand for a plan's traffic if no trace is given
DAY = 86400.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Followed:
    """The servers to follow, and how to follow them."""

    scenario: Scenario
    urls: tuple[str, ...]
    interval: float = 5.0  # s
    seconds: float = SECONDS  # of a window
    requests: int = REQUESTS  # of a window
    plan: Trace | None = None  # the traffic that the fleet was planned for
    attainment: float = 0.99  # share of requests that are to meet the SLOs
    most_bytes: int = 256 << 20  # of the samples on disk
    outlook: bool = True  # replay what-ifs, and search the capacity


class Follower:
    """Everything that is known about a followed server. `add` takes the next scrape."""

    def __init__(
        self, followed: Followed, folder: Path, logs: GrowingLogs | None = None, tell: Tell = lambda line: None,
        background: Callable[[], Background | Inline] = Inline,
    ) -> None:  # fmt: skip
        """background: makes the two workers, one for capacities and one for fits."""
        self.followed, self.folder, self.tell = followed, folder, tell
        self.logs = logs or GrowingLogs()
        self._scrapes = Lines(folder / "samples", followed.most_bytes)
        self._windows = Lines(folder / "windows", max(1 << 20, followed.most_bytes // 8))
        self._versions = Lines(folder / "versions", 64 << 20)
        self._cutter = Cutter(followed.interval, followed.seconds, followed.requests)
        self.alarms = Alarms()
        self.versions: list[refit.Version] = []
        self.windows: deque[dict[str, Any]] = deque(maxlen=HELD)  # as they are stored
        self.last: Scrape | None = None
        self.room: Headroom | None = None
        self._contradicted = False  # by the newest window
        self._searches, self._fits = background(), background()
        self._searched = -math.inf  # s since 1970, when the capacity was last searched
        self._scenario, self._setting = followed.scenario, followed.scenario.setting().check()
        self._seen: deque[tuple[Seen, Residuals]] = deque(maxlen=KEPT)
        self._before: Seen | None = None
        self._bands: dict[str, float] | None = None
        self._usual: dict[str, float] = {}  # the plan's traffic
        self._usual_bands: dict[str, float] = {}  # if windows stand for the plan: for their own error
        self._known: dict[str, float] = {}  # standard errors of quantities that windows have measured
        self._since = 0  # windows judged since the current version
        self._since_alarm = 0  # ... since an alarm that asks for a refit
        self._fit: refit.Version | None = None  # a candidate that is being fitted
        self._trial: _Trial | None = None
        if followed.plan is not None:
            plan = followed.plan
            rate = followed.scenario.rate or plan.rate
            self._usual = {
                "rate": rate, "input_length": float(plan.input_length.mean()),
                "output_length": float(plan.output_length.mean()),
            }  # fmt: skip
        self._resume()

    @property
    def scenario(self) -> Scenario:
        """The scenario on the current profile."""
        return self._scenario

    @property
    def version(self) -> int:
        return self.versions[-1].number if self.versions else 0

    @property
    def grade(self) -> str:
        """Of the newest window."""
        return str(self.windows[-1]["grade"]) if self.windows else GRADES[0]

    @property
    def open_window(self) -> Window | None:
        """The window that is still filling."""
        return self._cutter.open

    def add(self, scrape: Scrape) -> dict[str, Any] | None:
        """Store a scrape; return the record of the window that it completes, if any."""
        self.logs.read(scrape.time)
        samples = [s and vars(s) for s in scrape.samples]
        self._scrapes.append({"time": scrape.time, "samples": samples})
        return self._take(scrape)

    def _take(self, scrape: Scrape) -> dict[str, Any] | None:
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
                return self._weigh(window)
        except MachineError:
            raise
        except DsimError as error:  # of what a page or a log holds
            self.tell(f"Not judged: {error}")
            return None

    def _weigh(self, window: Window) -> dict[str, Any] | None:
        if self.windows and window.end <= self.windows[-1]["end"]:  # judged before a restart
            self._before = self._see(window)
            known = [_residuals_of(record) for record in self.windows if record["end"] == window.end]
            self._seen.extend((self._before, residuals) for residuals in known)
            if self._fit is not None and window.end == self.windows[-1]["end"]:
                self._fit_again(self._fit)
            return None
        return self._judge(window)

    def _see(self, window: Window) -> Seen:
        before = None if self._before is None else self._before.window.run_in
        known = None if before is None else Seen(before, self._arrivals(before))
        return Seen(window, self._arrivals(window), self.logs.steps(window.begin, window.end), known)

    def _arrivals(self, window: Window) -> Arrivals | None:
        found = self.logs.arrivals(window.begin, window.end)
        return None if found is None else with_open(found, window, self.followed.scenario.seed)

    def _judge(self, window: Window) -> dict[str, Any] | None:
        """Compare a window with its replays; None for the first window of a stretch: it is the run-in of the next."""
        seen = self._see(window)
        follows_on, self._before = self._before is not None, seen
        if not follows_on:
            return None
        shape = self.followed.plan
        prediction = predict(self._scenario, self._setting, seen, shape)
        if self._bands is None:
            self._bands = bands_of(self._scenario, seen, shape, self._known)
        residuals, bands = dict(prediction.residuals), self._bands | self._usual_bands
        if self._usual:
            residuals |= of_traffic(window, self._usual)
        waiting = {PRICES} if prediction.extrapolating or self.unmeasured is not None else set()
        explained = self.alarms.explain(residuals)
        measured = {name: of for name, of in explained.items() if of is not None}
        if measured.keys() != explained.keys():
            waiting.add(RULE)
        elif measured:
            others, errors = refit.at_measured(self._scenario, self._setting, seen, shape, prediction, measured)
            residuals |= others
            bands |= {name: widened(RULE, bands.get(name, 0.0), error) for name, error in errors.items()}
        raised = self.alarms.add(window.end, residuals, bands, waiting)
        settled = self.alarms.settle(bands)
        self._seen.append((seen, residuals))
        self._since += 1
        record = self._record(window, prediction, residuals, seen)
        record["raised"], record["settled"] = [alarm.to_json() for alarm in raised], settled
        for alarm in raised:
            self.tell(f"ALARM {alarm.words}")
        for cause in settled:
            self.tell(f"Over: {cause}")
        self._learn_traffic(record)
        record["usual"], record["usual_bands"] = dict(self._usual), dict(self._usual_bands)
        self._refit(window, seen, prediction, record)
        if self.followed.outlook:
            self._look_ahead(window, record)
        record["version"], record["known"] = self.version, self._known
        record["alarms"] = {cause: alarm.to_json() for cause, alarm in self.alarms.open.items()}
        record["unmeasured"] = self.unmeasured
        record["state"] = self._state()
        clean: dict[str, Any] = no_nan(record)
        self._windows.append(clean)
        self.windows.append(clean)
        return clean

    def _record(
        self, window: Window, prediction: Prediction, residuals: Mapping[str, tuple[float, float]], seen: Seen
    ) -> dict[str, Any]:  # fmt: skip
        last = window.samples[-1].histograms
        measured = {name: b for name in DISTRIBUTIONS if name in last and (b := window.histogram(name)) is not None}
        twin = {name: _pooled(prediction, name) for name in measured}
        slos = {}
        for text in self.followed.scenario.slos:
            slo = Slo.parse(text)
            if slo.metric in measured and slo.slo_class is None:
                slos[text] = [share_within(of, slo.bound) for of in (measured[slo.metric], twin[slo.metric])]
        return {
            "begin": window.begin, "end": window.end, "replicas": window.replicas, "requests": window.num_arrivals,
            "grade": seen.grade, "drawn": seen.arrivals is None, "extrapolating": prediction.extrapolating,
            "residuals": {name: list(of) for name, of in residuals.items()},
            "smooth": {name: chart.mean for name, chart in self.alarms.charts.items() if chart.seen},
            "deviations": {name: chart.deviation() for name, chart in self.alarms.charts.items() if chart.seen},
            "bands": (self._bands or {}) | self._usual_bands,
            "traffic": {name: getattr(window, name) for name in LOAD},
            "gauges": {name: float(window.gauge(name)[1:].mean()) for name in ("running", "waiting", "kv_usage")},
            "most_running": _most_running(window),
            "measured": {name: of.mean for name, of in measured.items()},
            "predicted": {name: of.mean for name, of in twin.items()},
            "slos": slos,
        }  # fmt: skip

    def _learn_traffic(self, record: dict[str, Any]) -> None:
        """Learn the plan's traffic, if no trace is given, from the first windows, or those after a traffic alarm."""
        since: list[dict[str, Any]] = []
        for own in (*self.windows, record):
            since = [own] if TRAFFIC in {alarm["cause"] for alarm in own["raised"]} else [*since, own]
        if self.followed.plan is not None or len(since) != BASELINE:
            return
        means = {name: np.mean([own["traffic"][name] for own in since]) for name in LOAD}
        self._usual = {name: float(mean) for name, mean in means.items() if math.isfinite(mean)}
        self._usual_bands = dict.fromkeys(self._usual, learnt_band(sum(own["requests"] for own in since)))
        if TRAFFIC in self.alarms.open:
            self.tell("The plan is for the traffic of now")
            self._ask_anew()
        self.alarms.close((TRAFFIC,))

    def _refit(self, window: Window, seen: Seen, prediction: Prediction, record: dict[str, Any]) -> None:
        """Fit a candidate when there is evidence, try it on the next windows, and adopt it if it predicts better."""
        if self._trial is not None:
            self._try(window, seen, prediction, record)
            return
        if self._fit is not None or self._fits.busy:
            return
        reasons = [alarm.words for cause, alarm in self.alarms.open.items() if cause in (PRICES, YIELD)]
        self._since_alarm = self._since_alarm + 1 if reasons else 0
        unsettled = not self.versions and not self._known and self._since <= refit.MOST_EVIDENCE
        count = self._since_alarm if reasons else self._since if unsettled else 0
        if count < refit.EVIDENCE:
            return
        evidence = list(self._seen)[-count:]
        known = [residuals for _, residuals in evidence]
        causes = self.alarms.open if reasons else (PRICES, YIELD)
        if count < refit.MOST_EVIDENCE and not refit.precise(known, causes, self.alarms.deviations):
            return
        self._since_alarm = 0
        begin, end = evidence[0][0].window.begin, evidence[-1][0].window.end
        reason, number = "; ".join(reasons) or "the first windows", self.version + 1
        path = self.folder / "profiles" / f"v{number}.json"
        self._start_fit(refit.Version(
            number, window.end, begin, end, len(evidence), evidence[-1][0].grade, reason, refit.Factors(), {}, 0.0,
            str(path),
        ))  # fmt: skip
        self._take_fit()

    def _start_fit(self, version: refit.Version) -> None:
        """Have the background fit a candidate to the windows of `version`."""
        evidence = [(seen, of) for seen, of in self._seen if version.begin < seen.window.end <= version.end]
        self._fit = replace(version, windows=len(evidence))
        windows, known = [seen for seen, _ in evidence], [residuals for _, residuals in evidence]
        self._fits.start(refit.candidate, self._scenario, windows, known, self.followed.plan)

    def _fit_again(self, version: refit.Version) -> None:
        """After a restart, begin the trial of the stored candidate, or repeat the fit if there is none."""
        path = self.folder / CANDIDATE
        if path.exists() and (found := refit.Version.from_json(read_json(path))).time == version.time:
            self._fit = None
            self._begin_trial(found)
        else:
            self._start_fit(version)
            self._take_fit()

    def _take_fit(self) -> bool:
        """Take the candidate that the background has fitted, if any. Its trial begins with the next window."""
        fitted = self._fits.poll()
        if fitted is None or self._fit is None:
            return False
        version, self._fit = self._fit, None
        if "error" in fitted:
            self.tell(f"No candidate profile: {fitted['error']}")
            return True
        version = replace(version, factors=refit.Factors(**fitted["factors"]), errors=fitted["errors"])
        if version.factors != refit.Factors():
            path = Path(version.profile)
            path.parent.mkdir(exist_ok=True)
            name = f"{self.followed.scenario.loaded_profile().name}-v{version.number}"
            save(replace(from_json(fitted["profile"], str(path)), name=name), path, force=True)
        # The next window's record will hold the trial. A restart before that finds the candidate here.
        write_whole(self.folder / CANDIDATE, json_text(asdict(version)) + "\n")
        self._begin_trial(version)
        if self._trial is not None:
            self.tell(f"A candidate profile is on trial: {version.factors.words}")
        return True

    def _begin_trial(self, version: refit.Version) -> None:
        if version.factors == refit.Factors():
            self._confirm(version.errors)
            return
        own = self._on(version.profile)
        self._trial = _Trial(version, own, own.setting())

    def _try(self, window: Window, seen: Seen, prediction: Prediction, record: dict[str, Any]) -> None:
        trial = self._trial
        assert trial is not None
        other = predict(trial.scenario, trial.setting, seen, self.followed.plan)
        deviations = self.alarms.deviations
        trial.gains.append(refit.score(other, deviations) - refit.score(prediction, deviations))
        record["candidate"] = {"number": trial.version.number, "gain": trial.gains[-1]}
        if len(trial.gains) < refit.TRIAL:
            return
        self._trial = None
        if not refit.better(trial.gains):
            self.tell(f"The candidate predicts no better: {trial.version.factors.words} is not adopted")
            self._confirm(trial.version.errors)
            return
        version = replace(trial.version, time=window.end, gain=float(np.mean(trial.gains)))
        self._versions.append(asdict(version))
        self.versions.append(version)
        self._known = version.errors
        self._use(trial.scenario, trial.setting)
        self.alarms.close((PRICES, YIELD))
        self.tell(f"Profile version {version.number} is in force: {version.factors.words} ({version.reason})")

    def _confirm(self, errors: Mapping[str, float]) -> None:
        """Record that windows confirmed the current profile: its uncertainty no longer widens the charts' allowance."""
        self._known = dict(errors)
        self._bands = None

    def _use(self, scenario: Scenario, setting: Setting) -> None:
        self._scenario, self._setting = scenario, setting
        self._bands = None
        self._since = 0
        self._ask_anew()

    def _ask_anew(self) -> None:
        """Forget the capacity, since the profile or the traffic has changed."""
        self.room = None
        self._searched = -math.inf
        self._searches.close()

    def _look_ahead(self, window: Window, record: dict[str, Any]) -> None:
        """Add what-ifs and one recommendation to the record; search the capacity anew if it is old."""
        outcomes = what_ifs(self._scenario, self.recent(), window.replicas)
        earlier = [w for w in self.windows if w["end"] > window.end - HOUR]
        grows = growth(
            [*(w["end"] for w in earlier), window.end], [*(w["traffic"]["rate"] for w in earlier), window.rate]
        )
        record |= {"what_if": [vars(outcome) for outcome in outcomes], "growth": grows}
        self._advise(record)
        if window.end - self._searched > HOUR and not self._searches.busy:
            self._searched = window.end
            fleet = replace(self._scenario, replicas=window.replicas)
            self._searches.start(
                search_headroom, fleet, self.followed.attainment, self.folder, window.end, self.version, self.traffic()
            )
            self._take_headroom(record)

    def look(self) -> bool:
        """Take the background's answers; return whether there were any."""
        fitted = self._take_fit()
        return (bool(self.windows) and self._take_headroom(self.windows[-1])) or fitted

    @property
    def busy(self) -> bool:
        """Whether the background is busy."""
        return self._searches.busy or self._fits.busy

    def close(self) -> None:
        """Stop the background."""
        self._searches.close()
        self._fits.close()

    def _take_headroom(self, record: dict[str, Any]) -> bool:
        answer = self._searches.poll()
        if answer is None:
            return False
        if "error" in answer:
            self.tell(f"No capacity: {answer['error']}")
        room = answer.get("headroom")
        if room is not None and room["version"] == self.version:  # not of a profile that was replaced
            self.room = Headroom(**room)
        self._advise(record)
        return True

    @property
    def headroom(self) -> Headroom | None:
        """The server's; None while the twin is not the server."""
        return None if self._contradicted or self.alarms.open.keys() - {TRAFFIC} else self.room

    def _advise(self, record: dict[str, Any]) -> None:
        """Add the window's recommendation to its record, from its what-ifs and the newest capacity."""
        self._contradicted = record["contradicted"] = contradicted(record["slos"])
        room, words = self.headroom, {cause: alarm.words for cause, alarm in self.alarms.open.items()}
        measured = min((high for (_, high), _ in record["slos"].values() if high == high), default=1.0)
        ran, allowed = record["most_running"], self._setting.limits.max_batch
        advised = advice(
            [WhatIf(**w) for w in record["what_if"]], room, record["traffic"]["rate"], record["growth"],
            self.followed.attainment, words, measured, (ran, allowed) if ran is not None and ran < allowed else None,
            self._contradicted,
        )  # fmt: skip
        why = "no SLO is given" if not record["slos"] else "not searched"
        if self.room is not None:
            why = "" if room else "the twin is not the server"
        record |= {"headroom": room and vars(room), "no_headroom": why, "advice": vars(advised)}

    def recent(self) -> Trace:
        """The requests of the last two windows, as a trace."""
        return self._seen[-1][0].trace(self._scenario.seed, self.followed.plan)[0]

    def traffic(self) -> Trace:
        """The arrivals of the windows in memory, as one trace."""
        parts, zero = [], None
        for seen, _ in self._seen:
            zero = seen.window.begin if zero is None else zero
            own = seen.arrivals_of(self._scenario.seed, self.followed.plan)
            parts.append((own.time + seen.window.begin - zero, own.input_length, own.output_length))
        time, *lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Trace("followed traffic", time - time[:1], lengths[0].astype(np.int64), lengths[1].astype(np.int64))

    @property
    def unmeasured(self) -> str | None:
        """Why the profile is not valid, until a refit has measured the server: prices wait. None: they do not wait."""
        doubts = self._setting.profile.fit.doubts
        return doubts[0] if doubts and not self._known else None

    def _state(self) -> dict[str, Any]:
        """The state for a restart that the other parts of a record lack."""
        trial = self._trial
        return {
            "charts": {name: chart.state() for name, chart in self.alarms.charts.items()}, "bands": self._bands,
            "since": self._since, "since_alarm": self._since_alarm,
            "fit": None if self._fit is None else asdict(self._fit),
            "trial": None if trial is None else {"version": asdict(trial.version), "gains": trial.gains},
        }  # fmt: skip

    def _resume(self) -> None:
        """Continue from the folder after an interruption."""
        for line in self._versions:
            self.versions.append(refit.Version.from_json(line))
        if self.versions:
            self._scenario = self._on(self.versions[-1].profile)
            self._setting = self._scenario.setting()
        self.windows.extend(reversed(list(islice(self._windows.newest(), HELD))))
        if self.windows:
            self._restore(self.windows[-1])
        # Cut the windows in memory again: they are a refit's evidence, and the run-in of the next window.
        begin = self.windows[-min(len(self.windows), KEPT + 1)]["begin"] if self.windows else 0.0
        for line in reversed(list(takewhile(lambda line: line["time"] >= begin, self._scrapes.newest()))):
            samples = tuple(None if s is None else Sample.from_json(s) for s in line["samples"])
            if len(samples) == len(self.followed.urls):
                self._take(Scrape(float(line["time"]), samples))
        if not self._fits.busy:  # the windows of an interrupted fit are no longer stored
            self._fit = None

    def _restore(self, last: dict[str, Any]) -> None:
        """Restore the state after the newest window, from its record."""
        state, known = last["state"], [_residuals_of(record) for record in list(self.windows)[-MEMORY:]]
        for name, chart in self.alarms.charts.items():
            chart.restore(state["charts"][name], [of[name] for of in known if name in of])
        self.alarms.open = {cause: Alarm.from_json(of) for cause, of in last["alarms"].items()}
        self._usual, self._known = self._usual or dict(last["usual"]), dict(last["known"])
        self._usual_bands = dict(last["usual_bands"])
        self._bands, self._since, self._since_alarm = state["bands"], state["since"], state["since_alarm"]
        if last["version"] != self.version:  # a kill came after the adoption and before the window's record
            self._known = dict(self.versions[-1].errors)
            self._bands, self._since = None, 0
            self.alarms.close((PRICES, YIELD))
            return
        if state["fit"] is not None:
            self._fit = refit.Version.from_json(state["fit"])
        if state["trial"] is not None:
            version = refit.Version.from_json(state["trial"]["version"])
            own = self._on(version.profile)
            self._trial = _Trial(version, own, own.setting(), state["trial"]["gains"])
        self.room = Headroom(**last["headroom"]) if last.get("headroom") else None
        self._contradicted = last.get("contradicted", False)
        self._searched = self.room.time if self.room is not None else -math.inf

    def _on(self, profile: str) -> Scenario:
        """The scenario on a profile file, which includes the yields and the front end."""
        policy = placed(self._scenario.policy)[0]
        return replace(self._scenario, profile=profile, policy=policy, yields=None, frontend=None)


@dataclass
class _Trial:
    """A candidate, and how much better it predicted each window."""

    version: refit.Version
    scenario: Scenario
    setting: Setting
    gains: list[float] = field(default_factory=list)


def _residuals_of(record: Mapping[str, Any]) -> Residuals:
    return {name: (float(r), float(s)) for name, (r, s) in record["residuals"].items() if r is not None}


def _most_running(window: Window) -> float | None:
    """Most requests that ran at once on a replica while others waited; None if none waited."""
    crowded = window.gauge("running")[window.gauge("waiting") > 0]
    return float(crowded.max()) / window.replicas if len(crowded) else None


def _pooled(prediction: Prediction, name: str) -> Buckets:
    known = (replay.window.histogram(name) for replay in prediction.replays)
    first, *others = (of for of in known if of is not None)
    for other in others:
        first = first.plus(other)
    return first
