"""Run a chat template in its own process (started by chat.py): it is untrusted and may never end.

In: a line of template, special tokens and limits, then a conversation a line. Out: a line `{"text": ...}` or `{"error":
...}` each. The kernel ends a process beyond its time, even in C code.
"""

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


def renderer(template: str, special: dict[str, str]) -> Callable[[Messages], str]:
    """From a conversation to its text up to the answer; may raise anything."""
    from jinja2.exceptions import TemplateError  # only chats need it
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    compiled = environment.from_string(template)
    return lambda messages: compiled.render(messages=messages, add_generation_prompt=True, **special)


def main() -> None:
    """Answer each line within `seconds` of CPU time, all within `memory` bytes."""
    import resource  # Windows lacks it, and imports live/, too

    settings = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory"],) * 2)
    render: Callable[[Messages], str] | None = None
    room = settings["characters"]
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        room += 10 * len(line)
        try:
            render = render or renderer(settings["template"], settings["special"])
            text = render(json.loads(line))
            room -= len(text)
            answer = {"text": text} if room >= 0 else {"error": f"it makes {len(text)} characters of {len(line)}"}
        except Exception as error:  # a template may raise anything
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)
        if "error" in answer:
            return


if __name__ == "__main__":
    main()
