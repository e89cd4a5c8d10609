"""A chosen policy in its engine's own words: the command that serves a model so, and what it cannot say."""

from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.policy import name_of, parse, preset_of, settings_of

IN_FILE = "config:"  # of a flag's name: a line of the engine's own configuration file


def flags_of(spec: str, gpus: int, allow_code: AllowedCode = NO_CODE) -> dict[str, Any]:
    """The command for a SPEC with so many GPUs a replica; empty where no engine is known to serve it.

    `command` with its flags; `config`: lines of the file that the command names; `unsaid`: fields that differ from the
    preset and have no flag. A field that is none is left to the engine's default, as in the twin.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    if not preset.serve:
        return {}
    chosen, usual = settings_of(parse(spec, allow_code)), settings_of(preset.policy)
    words, lines = [preset.serve], []
    for name, flag in preset.flags.items():
        value = chosen.get(name)
        if name == "gpus":
            words += [f"{flag} {gpus}"] if gpus > 1 else []
        elif value is None:
            continue
        elif flag.startswith(IN_FILE):
            lines.append(f"{flag.removeprefix(IN_FILE)}: {_shown(value)}")
        elif isinstance(value, bool):
            yes, _, no = flag.partition("/")
            words += [yes if value else no] if (yes if value else no) else []
        else:
            words.append(f"{flag} {_shown(value)}")
    unsaid = [f"{n}={_shown(v)}" for n, v in chosen.items() if n not in preset.flags and v != usual[n]]
    return {"command": " ".join(words), "config": lines, "unsaid": unsaid}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
