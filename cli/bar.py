"""Progress: a bar on a terminal; in a pipe a line every 30 s on standard error."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..files.duration import words_of

EVERY = 30.0  # s, in a pipe
LOG = logging.getLogger("dsim")


class Bar:
    """A bar with a note; it disappears at the end of the `with` block."""

    def __init__(self, screen: Console, name: str, unit: str = "", total: int | None = None, note: str = "") -> None:
        self._screen = screen
        self._share: float | None = None  # of all work, if not `done` of `total`
        self._end: float | None = None  # expected, on the monotonic clock, if whoever works knows it
        self._begin = time.monotonic()
        self._from: tuple[float, float] | None = None  # time and value of the first share
        self._over = threading.Event()
        self._hears = _Hears(self)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=screen,
            transient=True,
        )
        self._bar.add_task(name, total=total, note=note, unit=unit)
        self._task = self._bar.tasks[0]

    def __enter__(self) -> "Bar":
        LOG.addHandler(self._hears)
        LOG.setLevel(logging.INFO)
        if self._screen.is_terminal:
            self._bar.start()
        else:
            # Lines appear even if the work reports nothing, as during compilation.
            threading.Thread(target=self._speak, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        LOG.removeHandler(self._hears)
        if self._screen.is_terminal:
            self._bar.stop()

    def update(
        self,
        done: int,
        total: int | None = None,
        name: str | None = None,
        note: str | None = None,
        share: float | None = None,
        unit: str | None = None,
        eta: float | None = None,
    ) -> None:
        """Omitted arguments keep their value.

        share: of all work, 0 to 1, for the time left; by default done / total. eta: s to the end, instead.
        """
        self._bar.update(self._task.id, completed=done, total=total, description=name)
        self._end = None if eta is None else time.monotonic() + eta
        self._share = share
        if note is not None:
            self.note(note)
        if unit not in (None, self._task.fields["unit"]):  # other work begins
            self._task.fields["unit"], self._from = unit, None
        if self._from is None and self._part() > 0:
            self._from = time.monotonic(), self._part()

    def note(self, note: str) -> None:
        """Until the next update."""
        self._task.fields["note"] = note

    def line(self) -> str:
        """`optimus: 9,120 of 19,366 requests, 1,870 s simulated; 30 s, about 34 s left`.

        The time left is estimated since the first share, without compilation.
        """
        task = self._task
        total = "" if task.total is None else f" of {task.total:,}"
        done = f"{task.completed:,}{total} {task.fields['unit']}".rstrip()
        note = f", {task.fields['note']}" if task.fields["note"] else ""
        now, share, remaining = time.monotonic(), self._part(), None
        if self._end is not None:
            remaining = max(1.0, self._end - now)
        elif self._from is not None and share > self._from[1]:
            began, first = self._from
            remaining = (now - began) * (1 - share) / (share - first)
        eta = "" if remaining is None else f", about {words_of(remaining)} left"
        return f"{task.description}: {done}{note}; {words_of(now - self._begin)}{eta}"

    def _part(self) -> float:
        return self._task.percentage / 100 if self._share is None else self._share

    def _speak(self) -> None:
        while not self._over.wait(EVERY):
            with contextlib.suppress(OSError, ValueError):  # standard error was closed
                self._screen.print(self.line())


class _Hears(logging.Handler):
    """Shows that the engine compiles a policy."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(logging.INFO)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        self._bar.note(words[:1].lower() + words[1:].partition(":")[0])


def watch_runs(
    bar: Bar, num_runs: int, num_requests: int, begins: str, clock: str = ""
) -> Callable[[str], AbstractContextManager[Callable[[int, float], None]]]:
    """Show runs in turn: a function from a run's name to a context, whose value is called as requests end.

    begins: note until the first ends. clock: text after the time.
    """
    runs = count()

    @contextmanager
    def watch(name: str) -> Iterator[Callable[[int, float], None]]:
        index = next(runs)
        bar.update(0, num_requests, name, begins, index / num_runs)

        def told(ended: int, now: float) -> None:
            bar.update(ended, note=f"{now:,.0f} s{clock}", share=(index + ended / num_requests) / num_runs)

        yield told

    return watch
