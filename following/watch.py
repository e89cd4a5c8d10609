"""The loop that reads servers at an interval and publishes the follower's findings."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.errors import DsimError, cut
from ..files.place import FolderKind, check_folder
from ..files.read import read_json, read_text
from ..files.write import json_text, write_whole
from ..report.page import Page
from ..results.metrics import no_nan
from .exported import exposition
from .follower import SCHEMA, VERSION, Followed, Follower, Tell
from .pages import page_of, shift
from .sources.sample import Sample
from .sources.scrape import MissingError, Target
from .windows import SPEED, Scrape

FILES = ("follow.json", "report.html", "alerts.yml")
FOLDER = FolderKind(
    "a followed server",
    (*FILES, "samples", "windows", "versions", "profiles", "traffic.jsonl"), "follow.json",
    SCHEMA, folders=("samples", "windows", "versions", "profiles"),
)  # fmt: skip


@dataclass(frozen=True)
class Following:
    """What following a server found: state, windows, page."""

    state: dict[str, Any]
    windows: list[dict[str, Any]]
    folder: Path
    page: Page

    def to_json(self) -> dict[str, Any]:
        return self.state


def open_folder(folder: str | Path, followed: Followed) -> Path:
    """Open or create a followed server's folder; DsimError if it has readings of another server, policy or profile."""
    path = check_folder(folder, FOLDER, force=False, add=True)
    path.mkdir(parents=True, exist_ok=True)
    if (path / "follow.json").exists() and any((path / "samples").glob("*.jsonl")):
        before = read_json(path / "follow.json")["followed"]
        for name, value in question_of(followed).items():
            if before.get(name) != value:
                raise DsimError(
                    f"{path} follows {name} {cut(before.get(name))}, expected {cut(value)}: choose another folder"
                )
    else:
        write_state(path, followed, None)
    write_whole(path / "alerts.yml", read_text(Path(__file__).with_name("alerts.yml")))
    return path


def question_of(followed: Followed) -> dict[str, Any]:
    """The values that identify a folder's server."""
    world = followed.world
    return {
        "urls": list(followed.urls), "policy": world.policy, "profile": world.profile, "router": world.router,
        "yields": world.yields,
    }  # fmt: skip


def write_state(folder: Path, followed: Followed, follower: Follower | None) -> None:
    """Write follow.json: what is followed, and the newest window."""
    state = {
        "schema": SCHEMA, "version": VERSION, "dsim": __version__, "followed": question_of(followed),
        "state": None if follower is None else state_of(follower),
    }  # fmt: skip
    write_whole(folder / "follow.json", json_text(no_nan(state)) + "\n")


def state_of(follower: Follower) -> dict[str, Any]:
    """The newest findings, as `--json` prints them."""
    opened = follower.open_window
    return {
        "version": follower.version, "windows": len(follower.windows),
        "alarms": {cause: alarm.to_json() for cause, alarm in follower.alarms.open.items()},
        "open": None if opened is None else {"seconds": opened.duration, "requests": opened.num_arrivals},
        "last": follower.windows[-1] if follower.windows else None,
    }  # fmt: skip


@dataclass(eq=False)
class Watcher:
    """Reads the servers and publishes the findings."""

    follower: Follower
    targets: Sequence[Target]
    folder: Path
    tell: Tell
    command: str = ""
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._missing: set[str] = set()
        self.page, self.metrics = "", ""  # what the port serves
        self.publish()

    def once(self) -> dict[str, Any] | None:
        """Read every server once; return the record of the window that this completes, if any."""
        with ThreadPoolExecutor(min(16, len(self.targets))) as pool:
            samples = tuple(pool.map(self._sample, self.targets))
        if not any(samples) and self.follower.last is None:
            raise DsimError(f"{self.targets[0].url}: does not answer, expected the metrics of a server")
        record = self.follower.add(Scrape(self._time(samples), samples))
        if record is not None:
            self.publish()
        self.metrics = exposition(self.follower, self.clock())
        return record

    def run(self, until: Callable[[], bool] = lambda: False, sleep: Callable[[float], None] = time.sleep) -> None:
        """Read and judge until Ctrl-C, which leaves all files readable."""
        due = self.clock()
        while True:
            record = self.once()
            if record is not None:
                self.tell(line_of(record))
            if until():
                return
            due = max(due + self.follower.followed.interval, self.clock())
            sleep(max(0.0, due - self.clock()))

    def publish(self) -> None:
        """Write the folder's files, and renew what the port serves."""
        from ..report.html import to_html

        self.page = to_html(page_of(self.follower, self.command))
        write_whole(self.folder / "report.html", self.page)
        write_state(self.folder, self.follower.followed, self.follower)
        self.metrics = exposition(self.follower, self.clock())

    def _time(self, samples: Sequence[Sample | None]) -> float:
        """The time of a reading (s since 1970), by a simulated server's clock if it has one."""
        simulated = [sample.time for sample in samples if sample is not None and SPEED in sample.settings]
        return simulated[0] if simulated else self.clock()

    def _sample(self, target: Target) -> Sample | None:
        try:
            sample = target.sample()
        except DsimError as error:
            if not isinstance(error, MissingError) and self.follower.last is None:
                raise
            if target.url not in self._missing and self.follower.last is not None:
                self.tell(str(error))
            self._missing.add(target.url)
            return None
        self._missing.discard(target.url)
        return sample


def line_of(record: Mapping[str, Any]) -> str:
    """One line of text about a window."""
    rate, requests = record["traffic"]["rate"], record["requests"]
    parts = [f"{requests} requests at {rate:.3g} req/s"]
    for name in ("step_time", "steps_per_token", "e2el"):
        if name in record["smooth"]:
            parts.append(f"{name} {shift(record, name)}")
    parts.append(", ".join(record["alarms"]) or "no alarm")
    if "advice" in record:
        parts.append(record["advice"]["do"])
    return "; ".join(parts)
