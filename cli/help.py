"""A command's help: purpose, examples, options in panels ."""

import inspect
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

INDENT = 4  # columns


def parts(text: str) -> tuple[list[str], list[str]]:
    """Paragraphs, and examples (lines that begin with `dsim`)."""
    lines = inspect.cleandoc(text).splitlines()
    examples = [line.strip() for line in lines if line.lstrip().startswith("dsim ")]
    prose = "\n".join(line for line in lines if not line.lstrip().startswith("dsim "))
    return [" ".join(paragraph.split()) for paragraph in prose.split("\n\n") if paragraph.strip()], examples


def panels(params: Iterable[Any], with_hidden: bool = True) -> dict[str, list[Any]]:
    """Options by panel, arguments first. with_hidden: with those that only `--help-all` shows."""
    by_panel: dict[str, list[Any]] = {"Arguments": []}
    for param in params:
        if param.param_type_name == "argument":
            by_panel["Arguments"].append(param)
        elif with_hidden or not param.hidden:
            by_panel.setdefault(param.rich_help_panel or "Output", []).append(param)  # Typer's own have no panel
    by_panel["Output"] = by_panel.pop("Output", [])
    return {panel: members for panel, members in by_panel.items() if members}


def names_of(param: Any) -> str:
    """An option's names, shortest first, with its value; or an argument's."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        return f"{names}/{param.secondary_opts[0]}"
    return names if param.is_flag else f"{names} {param.metavar or param.name.upper()}"


def text_of(param: Any) -> str:
    facts = []
    if (default := _default(param)) is not None:
        facts.append(f"default: {default}")
    if param.required:
        facts.append("required")
    return " ".join([param.help or "", *(f"[{fact}]" for fact in facts)])


def _default(param: Any) -> str | None:
    value = param.default
    if getattr(param, "is_flag", False):
        name = param.opts[0] if value else next(iter(param.secondary_opts), "")
        return name.removeprefix("--") if param.secondary_opts and value is not None else None
    if not isinstance(value, str | int | float | Path) or param.show_default is False:
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)


def help_all(ctx: typer.Context, value: bool) -> None:
    """The callback of `--help-all`."""
    if value:
        _print(ctx.command, ctx, None, with_hidden=True)
        raise typer.Exit


def _print(command: Any, ctx: Any, formatter: Any, with_hidden: bool = False) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from ..report.text import Terminal

    console = Terminal(highlight=False, width=max(40, shutil.get_terminal_size().columns))
    paragraphs, examples = parts(command.help or "")
    console.print(Text(command.get_usage(ctx) + "\n"))
    for paragraph in paragraphs:
        console.print(Text(paragraph + "\n"))
    if examples:
        console.print(Text("Examples:", style="bold"))
        for example in examples:
            console.print(Text(_wrapped(example, console.width), style="cyan"), soft_wrap=True)
        console.print()
    rows = {
        panel: [(names_of(param), text_of(param)) for param in members]
        for panel, members in panels(command.get_params(ctx), with_hidden).items()
    }
    if isinstance(command, TyperGroup):
        of_group = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
        rows["Commands"] = [(name, parts(child.help or "")[0][0]) for name, child in of_group if child is not None]
    widest = max(len(names) for members in rows.values() for names, _ in members)
    for panel, members in rows.items():
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=min(widest, (console.width - INDENT) * 2 // 5), overflow="fold", style="bold cyan")
        table.add_column(ratio=1, overflow="fold")
        for names, text in members:
            table.add_row(Text(names), Text(text))
        console.print(Panel(table, title=panel, title_align="left", border_style="dim"))


def _wrapped(example: str, width: int) -> str:
    """On lines joined by backslashes; an option stays with its value."""
    lines = [""]
    for words in re.split(r" (?=-)", example):
        if len(f"{lines[-1]} {words}") > width - INDENT - 2:
            lines.append("")
        lines[-1] = f"{lines[-1]} {words}".lstrip()
    return " \\\n".join(" " * (2 if i == 0 else INDENT) + line for i, line in enumerate(lines))


class Command(TyperCommand):
    """Typer's own help cuts long words."""

    format_help = _print


class Group(TyperGroup):
    """The same for a group."""

    format_help = _print
