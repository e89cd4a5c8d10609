"""What a question's answer shows, and how its command ends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from ..report.page import Page
    from ..report.result import Result

R = TypeVar("R")
INTERRUPTED, MISSED = 130, 1  # exit codes


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[R]):
    """value: for Python. page, lines: for a terminal. json: what `--json` prints. Both by default the value's."""

    value: R
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
        return cast("Result", self.value).to_json() if self.json is None else self.json

    def to_page(self) -> "Page | None":
        if self.page is not None:
            return self.page()
        return cast("Result", self.value).page() if self.json is None else None

    def to_python(self) -> R:
        if self.failure is not None:
            raise self.failure
        return self.value


class Stopped(KeyboardInterrupt):
    """An interrupt, with a line about the kept results."""


def stopped(out: "str | Path | None") -> Stopped:
    """An interrupt of a search, with the folder of its replays."""
    if not out:
        return Stopped("Interrupted: nothing was kept")
    return Stopped(f"Interrupted: the replays are kept in {out}/: the same command continues")
