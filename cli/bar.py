"""A progress bar on a terminal, nothing in a pipe."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """So much of something done, and a note beside it. Used as a context, it is gone when the work is over."""

    def __init__(self, screen: Console, name: str, unit: str = "", total: int | None = None, note: str = "") -> None:
        self._screen = screen
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=screen,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=total, note=note)

    def __enter__(self) -> "Bar":
        if self._screen.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen.is_terminal:
            self._bar.stop()

    def update(self, done: int, total: int | None = None, name: str | None = None, note: str | None = None) -> None:
        """So much is done; what is not given stays as it is."""
        if note is None:
            self._bar.update(self._task, completed=done, total=total, description=name)
        else:
            self._bar.update(self._task, completed=done, total=total, description=name, note=note)
