"""The loop that reads servers at an interval and publishes the follower's findings."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.errors import DsimError, cut
from ..files.place import FolderKind, check_folder
from ..files.read import FilePath, read_json, read_text
from ..files.schema import stored
from ..files.write import json_text, write_whole
from ..report.page import Page
from .follower import SCHEMA, VERSION, Followed, Follower, Tell
from .pages import line_of, page_of
from .sources.sample import Sample
from .sources.scrape import MissingError, Target
from .windows import SPEED, Scrape

FILES = ("follow.json", "report.html", "alerts.yml")
CONTENTS = (*FILES, "samples.jsonl", "windows.jsonl", "traffic.jsonl", "profiles")
FOLDER = FolderKind("a followed server", CONTENTS, "follow.json", SCHEMA, folders=("profiles",))


@dataclass(frozen=True)
class Following:
    """What following a server found: state, windows, page."""

    state: dict[str, Any]
    windows: list[dict[str, Any]]
    folder: Path
    page: Page

    def to_json(self) -> dict[str, Any]:
        return self.state


def open_folder(folder: FilePath, followed: Followed) -> Path:
    """Open or create a followed server's folder; DsimError if it has readings of another server, policy or profile."""
    path = check_folder(folder, FOLDER, force=False, add=True)
    path.mkdir(parents=True, exist_ok=True)
    if (path / "follow.json").exists() and (path / "samples.jsonl").exists():
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
    names = ("policy", "profile", "router", "yields")
    return {"urls": list(followed.urls)} | {name: getattr(followed.world, name) for name in names}


def write_state(folder: Path, followed: Followed, state: dict[str, Any] | None) -> None:
    """Write follow.json: what is followed, and the newest window."""
    values = {"schema": SCHEMA, "version": VERSION, "dsim": __version__}
    values |= {"followed": question_of(followed), "state": state}
    write_whole(folder / "follow.json", json_text(stored(values)) + "\n")


def state_of(follower: Follower) -> dict[str, Any]:
    """The newest findings, as `--json` prints them."""
    state: dict[str, Any] = {
        "version": follower.version,
        "windows": len(follower.windows),
        "alarms": {cause: asdict(alarm) for cause, alarm in follower.alarms.open.items()},
        "open": None,
        "last": None,
    }
    opened = follower.open_window
    if opened is not None:
        state["open"] = {"seconds": opened.duration, "requests": opened.num_arrivals}
    if follower.windows:
        state["last"] = follower.windows[-1]
    return state


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
        """Write the page and the state."""
        from ..report.html import to_html

        write_whole(self.folder / "report.html", to_html(page_of(self.follower, self.command)))
        write_state(self.folder, self.follower.followed, state_of(self.follower))

    def _time(self, samples: Sequence[Sample | None]) -> float:
        """The time of a reading (s since 1970), by a simulated server's clock if it has one."""
        for sample in samples:
            if sample is not None and SPEED in sample.settings:
                return sample.time
        return self.clock()

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
