"""What a question's answer shows, and how its command ends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from ..report.page import Page

R = TypeVar("R")
INTERRUPTED, MISSED = 130, 1  # exit codes


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[R]):
    """value: for Python. lines: for a terminal, after the page.

    json, page: of a value that is no Result.
    """

    value: "R | Callable[[], R]"
    json: Any = None
    page: "Callable[[], Page] | None" = None
    lines: Sequence[str] = ()
    explained: str = ""  # where findings come from
    out: Path | None = None
    files: Iterable[str] = ()  # of `out`, if they were written
    missed: Sequence[str] = ()  # why the command ends with MISSED
    interrupted: str = ""  # or with INTERRUPTED
    code: int = 0
    failure: Exception | None = None  # raised at the end

    def to_json(self) -> Any:
        """What `--json` prints."""
        return self.value.to_json() if self.json is None and hasattr(self.value, "to_json") else self.json

    def to_page(self) -> "Page | None":
        """What a terminal shows."""
        page = self.page
        if page is None and self.json is None:
            page = getattr(self.value, "page", None)
        return None if page is None else page()

    def to_python(self) -> R:
        if self.failure is not None:
            raise self.failure
        return self.value() if callable(self.value) else self.value


class Stopped(KeyboardInterrupt):
    """An interrupt, with a line about the kept results."""
