"""Progress: a bar on a terminal; in a pipe a line every 30 s on standard error."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..files.duration import words_of

EVERY = 30.0  # s, in a pipe
LOG = logging.getLogger("dsim")


class Bar(logging.Handler):
    """A bar with a note, such as a logged message that a policy is compiled; it disappears after the `with` block."""

    def __init__(self, screen: Console, name: str, unit: str = "", total: int | None = None, note: str = "") -> None:
        super().__init__(logging.INFO)
        self._screen = screen
        self._over = threading.Event()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
        )
        self._id = self._bar.add_task(name, total=total, note=note, unit=unit)

    def __enter__(self) -> Self:
        LOG.addHandler(self)
        LOG.setLevel(logging.INFO)
        self._bar.start()
        if not self._screen.is_terminal:
            # Lines appear even if the work reports nothing, as during compilation.
            threading.Thread(target=self._speak, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        LOG.removeHandler(self)
        self._bar.stop()

    def update(self, done: int, total: int | None = None, name: str | None = None, **fields: Any) -> None:
        """Omitted arguments keep their value; fields: note, unit."""
        self._bar.update(self._id, completed=done, total=total, description=name, **fields)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message until the next update."""
        words = record.getMessage()
        self._bar.update(self._id, note=words[:1].lower() + words[1:].partition(":")[0])

    def line(self) -> str:
        """`optimus: 9,120 of 19,366 requests, 1,870 s simulated; 30 s, about 34 s left`."""
        task = self._bar.tasks[0]
        parts = [f"{task.completed:,}"]
        if task.total is not None:
            parts.append(f"of {task.total:,}")
        done = " ".join(filter(None, [*parts, task.fields["unit"]]))
        times = [words_of(task.elapsed or 0.0)]
        if task.time_remaining is not None:
            times.append(f"about {words_of(task.time_remaining)} left")
        return f"{task.description}: {', '.join(filter(None, [done, task.fields['note']]))}; {', '.join(times)}"

    def _speak(self) -> None:
        while not self._over.wait(EVERY):
            with contextlib.suppress(OSError, ValueError):  # standard error was closed
                self._screen.print(self.line())


def watch_runs(
    bar: Bar, num_runs: int, num_requests: int, begins: str, clock: str = ""
) -> Callable[[str], AbstractContextManager[Callable[[int, float], None]]]:
    """Show runs in turn: returns a function from a run's name to a context; call the context's value as requests end.

    begins: note until the first ends. clock: text after the time.
    """
    runs = count()

    @contextmanager
    def watch(name: str) -> Iterator[Callable[[int, float], None]]:
        before = num_requests * next(runs)
        bar.update(before, num_requests * num_runs, name, note=begins)
        yield lambda ended, now: bar.update(before + ended, note=f"{now:,.0f} s{clock}")

    return watch
