"""Conversations as a checkpoint's chat template has them: it is data, runs in a sandbox, and reads nothing."""

import json
import os
from pathlib import Path
from typing import Any

from ..engine.errors import ModelError
from ..files.read import cut, read_lines, read_text
from .config_file import read_json


def chat_template(folder: Path) -> str | None:
    """The template of a tokenizer's folder: chat_template.jinja, or as tokenizer_config.json has it."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_text(path, kind=ModelError)
    found = (read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def render(template: str, messages: list[dict[str, Any]], folder: Path) -> str:
    """The text of a conversation, up to where the answer begins. ModelError where the template fails or refuses."""
    from jinja2.exceptions import TemplateError  # imported here: it comes with PyTorch, and only chats need it
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    special = {
        key: value if isinstance(value, str) else value.get("content", "")
        for key, value in (read_json(folder / "tokenizer_config.json") or {}).items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except Exception as error:  # a template is a program: it may fail as any does
        raise ModelError(f"{folder}: its chat template fails: {cut(error) or type(error).__name__}") from None


def read_conversations(path: str) -> list[list[dict[str, Any]]] | None:
    """A .jsonl of conversations, an object with "messages" a line; None where the first line is something else."""
    found: list[list[dict[str, Any]]] = []
    for number, line in read_lines(path, kind=ModelError) if path.endswith(".jsonl") else ():
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or "messages" not in said:
            if not found:
                return None
            raise ModelError(f'{path}:{number}: is {cut(line, 40)}, expected an object with "messages"')
        messages = said["messages"]
        fine = isinstance(messages, list) and messages
        if not fine or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
            raise ModelError(f"{path}:{number}: messages is {cut(messages)}, expected roles and contents")
        found.append(messages)
    return found or None
