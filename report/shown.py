"""Results as a notebook and a prompt show them: their page's answer, facts and tables, without its figures."""

import io
from abc import ABC, abstractmethod
from html import escape

from .page import Page, Table, Words


class Showable(ABC):
    """A result that shows itself."""

    @abstractmethod
    def page(self) -> Page:
        """The page of the result."""

    def __str__(self) -> str:
        from rich.console import Console  # imported here: a script that shows nothing need not load it

        from .text import render

        out = io.StringIO()
        render(self.page(), Console(file=out))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = self.page()
        lines = [*page.alarms, page.answer, *(f"{name}: {value}" for name, value in page.facts)]
        parts = [f"<p>{escape(line)}</p>" for line in lines if line]
        for block in (block for section in page.sections for block in section.blocks):
            if isinstance(block, Words):
                parts += [f"<p>{escape(line)}</p>" for line in block.lines]
            elif isinstance(block, Table) and not block.fold:
                parts.append(_html(block))
        return "".join([*parts, *(f"<p>Note: {escape(note)}</p>" for note in page.notes)])


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
