"""The reference's pages, written from the code as the site is built (mkdocs.yml calls `on_files`)."""

import dataclasses
import inspect
import posixpath
import re
from typing import Any

from dsim.cli import QUESTIONS, TRACES, declared
from dsim.cli.declared import Option, options_of
from dsim.engine import part
from dsim.engine.part import AXES, Discipline, fields_of
from dsim.engine.spec import PRESETS, settings_of
from dsim.engine.view import RequestView, View
from dsim.planner.candidate import spelt
from dsim.profiler.hardware import GPUS
from dsim.profiler.profile import shipped
from dsim.results.metrics import METRICS
from dsim.traces.formats import FORMATS, OPTIONAL


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of the folder."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the file in place of a link that leaves the folder of the site."""

    def in_repository(link: "re.Match[str]") -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        if not path.startswith("../"):
            return link[0]
        text, path = link[1].strip("`"), path.removeprefix("../")
        return f"`{path}`" if text in path else f"{link[1]} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\((\.\./[\w./-]+)\)", in_repository, markdown)


def pages() -> dict[str, str]:
    """Every generated page by its path within docs/."""
    return {
        "reference/commands.md": commands(),
        "reference/fields.md": fields(),
        "reference/metrics.md": metrics(),
        "reference/formats.md": formats(),
        "reference/view.md": view(),
        "reference/profiles.md": profiles(),
        "reference/gpus.md": gpus(),
    }


def commands() -> str:
    """Every command with its arguments and options, which are also the keywords of `import dsim`."""
    about = (
        "`dsim COMMAND --help-all` prints the same. Exit code 2 is yours to mend, 1 the machine's. An option is the "
        "keyword of its name in [Python](../python.md), or the one in the last column; `--json` is in all commands."
    )
    out = _head("Commands", about)
    questions = {**QUESTIONS, **{f"trace {name}": question for name, question in TRACES.items()}}
    for name, question in questions.items():
        out += [f"## dsim {name}", "", _words(declared.about(question)), ""]
        rows = [_option(question, option) for option in options_of(question).values()]
        out += ["| option | meaning | default | keyword |", "|---|---|---|---|", *rows, ""] if rows else []
    return "\n".join(out)


def _option(question: Any, option: Option) -> str:
    """A row of the table of options."""
    default = question.__dataclass_fields__[option.field].default
    name = " ".join(filter(None, [option.name, option.metavar])) if option.names else option.metavar
    if default is dataclasses.MISSING:
        value = "required"
    else:
        value = "" if default in (None, False, ()) else f"`{option.text(default)}`"
    keyword = f"`{option.field}`" if option.name != f"--{option.field.replace('_', '-')}" else ""
    return f"| {_cell(f'`{name}`')} | {_cell(_words(option.help))} | {_cell(value)} | {keyword} |"


def fields() -> str:
    """Every field of every policy: what it may be, what it means, and the presets that have it, with their values."""
    values_by_field: dict[tuple[str, str, str], tuple[Any, dict[str, str]]] = {}  # by axis, name and bounds
    for name, preset in PRESETS.items():
        for axis in AXES:
            for field in fields_of(getattr(preset.policy, axis)):
                _, values = values_by_field.setdefault((axis, field.name, field.bounds), (field, {}))
                values[name] = spelt(settings_of(preset.policy)[field.name])
    out = _head(
        "Policy fields", "A SPEC is `name[:value][,field=value...]`; [Policies](../policies.md) says how they act."
    )
    out += ["## Presets", "", "| preset | what | `:value` sets | source |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        main = f"`{preset.main}`" if preset.main else ""
        source = re.sub(r"\b([a-z-]+\.md)\b", r"[\1](../../research/specs/\1)", _cell(preset.citation))
        out.append(f"| `{name}` | {_cell(preset.summary)} | {main} | {source} |")
    for axis in AXES:
        rows = [(key[1], *row) for key, row in values_by_field.items() if key[0] == axis]
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
    out = _head("Every metric", "[Metrics](../metrics.md) says which to bound.")
    out += ["| metric | unit | formula | note |", "|---|---|---|---|"]
    out += [f"| `{n}` | {m.unit} | {_cell(m.formula)} | {_cell(m.note)} |" for n, m in METRICS.items()]
    return "\n".join([*out, ""])


def formats() -> str:
    """Every trace format's keys."""
    out = _head("Trace formats", "Recognised by their keys, in this order; [Your traffic](../traces.md) says more.")
    out += ["| format | time | unit | input | output | kept besides |", "|---|---|---|---|---|---|"]
    for form in FORMATS.values():
        unit = "date and time" if form.unit == "datetime" else form.unit
        extras = ", ".join(f"`{key}`" for key in form.extras)
        out.append(f"| `{form.name}` | `{form.time}` | {unit} | `{form.input}` | `{form.output}` | {extras} |")
    out += ["", "dsim writes `timestamp` (ms), `input_length` and `output_length`, and of these what a trace has: "]
    return "\n".join([*out, ", ".join(f"`{key}`" for key in OPTIONAL) + ".", ""])


def view() -> str:
    """What a policy of one's own sees of a replica and its requests."""
    out = _head("What a policy sees", "The fields that a [policy of your own](../policy-of-your-own.md) may read.")
    for name, kind in (("view", View), ("view.waiting(i), view.running(i)", RequestView)):
        out += [f"## `{name}`", "", _cell(kind.__doc__ or ""), "", "| field | meaning |", "|---|---|"]
        meanings = re.findall(r"^    ([a-z]\w*): \w+(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE)
        out += [f"| `{field}` | {_cell(meaning)} |" for field, meaning in meanings if field != "engine"]
        out.append("")
    out += ["## What a discipline answers", "", _cell(Discipline.__doc__ or ""), "", "| method | answer |", "|---|---|"]
    out += [f"| `{name}(view)` | {_cell(getattr(Discipline, name).__doc__)} |" for name in part.QUESTIONS]
    return "\n".join([*out, ""])


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
        cells = (f"`{gpu.name}`", gpu.driver_name, *(f"{x:,.4g}" for x in figures), gpu.compute_capability, gpu.source)
        out.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([*out, ""])


def _head(title: str, about: str) -> list[str]:
    return [f"# {title}", "", about, ""]


def _words(text: str) -> str:
    """A help text as one paragraph, and its example as code."""
    text = re.sub(r"\\\[", "[", text)
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(f"`{text}`" if text.startswith("dsim ") else text for text in paragraphs)


def _cell(text: str) -> str:
    """Text in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
