"""The reference's pages, written from the code as the site is built (mkdocs.yml calls `on_files`)."""

import inspect
import posixpath
import re
import typing
from typing import Any

import typer

import dsim
from dsim.api import measured
from dsim.cli import app
from dsim.cli.lists import value_of
from dsim.engine.part import AXES, fields_of
from dsim.engine.policy import PRESETS, settings_of
from dsim.engine.view import RequestView, View
from dsim.planner import given
from dsim.profiler.hardware import GPUS
from dsim.profiler.profile import shipped
from dsim.results.metrics import METRICS
from dsim.traces.formats import FORMATS, OPTIONAL

ALIASES = {
    given.TraceLike: "TraceLike", given.ProfileLike: "ProfileLike", given.PolicyLike: "PolicyLike",
    measured.RunLike: "RunLike",
}  # fmt: skip
WIDTH = 110  # of a signature's lines


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of the folder."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the file in place of a link that leaves the folder of the site."""

    def named(link: "re.Match[str]") -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        if not path.startswith("../"):
            return link[0]
        text, path = link[1].strip("`"), path.removeprefix("../")
        return f"`{path}`" if text in path else f"{link[1]} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\((\.\./[\w./-]+)\)", named, markdown)


def pages() -> dict[str, str]:
    """Every generated page by its path within docs/."""
    return {
        "reference/commands.md": commands(),
        "reference/functions.md": functions(),
        "reference/fields.md": fields(),
        "reference/metrics.md": metrics(),
        "reference/formats.md": formats(),
        "reference/view.md": view(),
        "reference/profiles.md": profiles(),
        "reference/gpus.md": gpus(),
    }


def commands() -> str:
    """Every command with its arguments, options and defaults."""
    out = _head("Commands", "`dsim COMMAND --help` prints the same. Exit code 2 is yours to mend, 1 the machine's.")
    for name, command in _commands(typer.main.get_command(app), "dsim"):
        out += [f"## {name}", "", _words(command.help or ""), ""]
        rows = [row for parameter in command.params if (row := _parameter(parameter)) is not None]
        out += ["| option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(out)


def _commands(command: Any, name: str) -> list[tuple[str, Any]]:
    """The commands below one, in their order; a group gives way to its commands."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [found for key, part in command.commands.items() for found in _commands(part, f"{name} {key}")]


def _parameter(parameter: Any) -> str | None:
    """A row of the table of options; None for --help."""
    if parameter.name == "help":
        return None
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else []
    takes = f" {parameter.metavar}" if parameter.metavar and is_option and not parameter.is_flag else ""
    told = ", ".join(f"`{name}{takes}`" for name in names) or f"`{parameter.metavar or parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default is None or default is False or callable(default) or default == [] else f"`{default}`"
    if parameter.required:
        shown = "required"
    return f"| {told} | {_cell(_words(getattr(parameter, 'help', None) or ''))} | {_cell(shown)} |"


def functions() -> str:
    """Every function of `import dsim` with its signature."""
    about = (
        "[From Python](../python.md) has an example, what goes in and comes out, and the "
        "[shared arguments](../python.md#shared-arguments) that `**traffic` stands for."
    )
    out = _head("Functions of `import dsim`", about)
    for name in (name for name in dsim.__all__ if not name.startswith("_")):
        text = inspect.getdoc(getattr(dsim, name)) or ""
        out += [f"## `{name}`", "", text, "", "```text", signature(name), "```", ""]
    return "\n".join(out)


def signature(name: str) -> str:
    """A function's signature in lines of WIDTH; the shared arguments are `**traffic`."""
    own = inspect.signature(getattr(dsim, name).__wrapped__)
    words, keyword = [], False
    for p in own.parameters.values():
        if p.name.startswith("_"):
            continue
        if p.kind is p.VAR_KEYWORD:
            words.append("**traffic")
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword:
            words.append("*")
            keyword = True
        words.append(f"{p.name}: {_kind(p.annotation)}" + ("" if p.default is p.empty else f" = {p.default!r}"))
    lines, line = [], f"dsim.{name}("
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else f") -> {_kind(own.return_annotation)}")
        if len(line) + len(piece) > WIDTH:
            lines.append(line.rstrip())
            line = "    "
        line += piece + " "
    return "\n".join([*lines, line.rstrip()])


def _kind(annotation: Any) -> str:
    """A type in short names, and what may stand for a name under one."""
    for alias, name in ALIASES.items():
        if annotation == alias:
            return name
        rest = [a for a in typing.get_args(annotation) if a not in typing.get_args(alias)]
        if set(typing.get_args(alias)) < set(typing.get_args(annotation)):
            return " | ".join([name, *map(_kind, rest)])
    if annotation is type(None):
        return "None"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for alias, name in ALIASES.items():
        text = text.replace(str(alias), name)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def fields() -> str:
    """Every field of every policy: what it may be, what it means, and the presets that have it, with their values."""
    found: dict[tuple[str, str], tuple[Any, dict[str, str]]] = {}
    for name, preset in PRESETS.items():
        for axis in AXES:
            for field in fields_of(getattr(preset.policy, axis)):
                held = found.setdefault((axis, field.name), (field, {}))
                held[1][name] = value_of(settings_of(preset.policy)[field.name])
    out = _head(
        "Policy fields", "A SPEC is `name[:value][,field=value...]`; [Policies](../policies.md) says how they act."
    )
    out += ["## Presets", "", "| preset | what | `:value` sets | source |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        main = f"`{preset.main}`" if preset.main else ""
        source = re.sub(r"\b([a-z-]+\.md)\b", r"[\1](../../research/specs/\1)", _cell(preset.citation))
        out.append(f"| `{name}` | {_cell(preset.summary)} | {main} | {source} |")
    for axis in AXES:
        rows = [(name, *held) for (on, name), held in found.items() if on == axis]
        if rows:
            out += ["", f"## {axis.replace('_', ' ').capitalize()}", ""]
            out += ["| field | may be | meaning | in the presets |", "|---|---|---|---|"]
            out += [
                f"| `{name}` | {_cell(field.bounds)} | {_cell(field.meaning)} | {_by_value(values)} |"
                for name, field, values in rows
            ]
    return "\n".join([*out, ""])


def _by_value(values: dict[str, str]) -> str:
    """`16` in these presets, `1` in those."""
    order = list(dict.fromkeys(values.values()))
    if len(order) == 1:
        return f"`{order[0]}`"
    return "; ".join(f"`{value}`: {', '.join(n for n, v in values.items() if v == value)}" for value in order)


def metrics() -> str:
    """Every metric's unit, formula and note."""
    out = _head("Every metric", "`dsim metrics` prints the same; [Metrics](../metrics.md) says which to bound.")
    out += ["| metric | unit | formula | note |", "|---|---|---|---|"]
    out += [f"| `{n}` | {m.unit} | {_cell(m.formula)} | {_cell(m.note)} |" for n, m in METRICS.items()]
    return "\n".join([*out, ""])


def formats() -> str:
    """Every trace format's keys."""
    out = _head("Trace formats", "Recognised by their keys, in this order; [Your traffic](../traces.md) says more.")
    out += ["| format | time | unit | input | output | kept besides |", "|---|---|---|---|---|---|"]
    for form in FORMATS.values():
        inputs = f"`{form.input}`" + (f" or `{form.text}`" if form.text else "")
        unit = "date and time" if form.unit == "datetime" else form.unit
        kept = ", ".join(f"`{key}`" for key in form.extras)
        out.append(f"| `{form.name}` | `{form.time}` | {unit} | {inputs} | `{form.output}` | {kept} |")
    out += ["", "dsim writes `timestamp` (ms), `input_length` and `output_length`, and of these what a trace has: "]
    return "\n".join([*out, ", ".join(f"`{key}`" for key in OPTIONAL) + ".", ""])


def view() -> str:
    """What a policy of one's own sees of a replica and its requests."""
    out = _head("What a policy sees", "The fields that a [policy of your own](../policy-of-your-own.md) may read.")
    for where, kind in (("view", View), ("view.waiting(i), view.running(i)", RequestView)):
        out += [f"## `{where}`", "", _cell(kind.__doc__ or ""), "", "| field | meaning |", "|---|---|"]
        meanings = re.findall(r"^    ([a-z]\w*): \w+(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE)
        out += [f"| `{name}` | {_cell(meaning)} |" for name, meaning in meanings]
        if kind is View:
            out.append(f"| `oldest` | {_cell(inspect.getdoc(View.oldest) or '')} |")
        out.append("")
    return "\n".join(out)


def profiles() -> str:
    """The shipped profiles."""
    out = _head("Profiles shipped", "[Your GPU and model](../profiles.md) says what their origins mean.")
    out += ["| profile | what |", "|---|---|", *(f"| `{name}` | {_cell(text)} |" for name, text in shipped().items())]
    return "\n".join([*out, ""])


def gpus() -> str:
    """Every GPU's figures, with their source."""
    out = _head("Known GPUs", "`--gpu` and `--roofline` take them by name, or as `nvidia-smi` prints it.")
    out += [
        "| GPU | `nvidia-smi` | bf16 TFLOP/s | memory, GB | GB/s | link, GB/s | compute capability | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS.values():
        figures = (gpu.peak / 1e12, gpu.memory_bytes / 1e9, gpu.bandwidth / 1e9, gpu.link / 1e9)
        shown = (f"`{gpu.name}`", gpu.driver_name, *(f"{x:,.4g}" for x in figures), gpu.compute_capability, gpu.source)
        out.append(f"| {' | '.join(map(_cell, shown))} |")
    return "\n".join([*out, ""])


def _head(title: str, about: str) -> list[str]:
    return [f"# {title}", "", about, ""]


def _words(text: str) -> str:
    """A help text as one paragraph, and its example as code."""
    text = re.sub(r"\\\[", "[", text)
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(f"`{part}`" if part.startswith("dsim ") else part for part in parts)


def _cell(text: str) -> str:
    """Text in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
