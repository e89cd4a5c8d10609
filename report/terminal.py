"""A console that texts of strangers' files cannot control."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..files.read import printable


class Terminal(Console):
    """Escapes the control characters of texts; rich's own codes stay."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls it where it caught the error, and would end with 1

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
