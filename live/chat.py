"""Render conversations with a checkpoint's chat template, in a sandbox with limits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ..engine.errors import ModelError
from ..files.read import cut, json_of, parsing, read_lines, read_text
from .config_file import read_json
from .template import Messages

SECONDS = 10  # CPU time a conversation; real ones take ms
MEMORY = 1 << 30  # bytes, of the template's process
CHARACTERS = 10_000_000  # of output, and ten more a character of a conversation


def chat_template(folder: Path) -> str | None:
    """The template in chat_template.jinja or tokenizer_config.json, or None."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_text(path, kind=ModelError)
    found = (read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def render(template: str, conversations: list[Messages], folder: Path) -> list[str]:
    """Each conversation's text up to the answer; ModelError if the template fails or exceeds limits."""
    settings = {
        "template": template, "special": _special(folder), "seconds": SECONDS, "memory": MEMORY,
        "characters": CHARACTERS,
    }  # fmt: skip
    # The child searches this interpreter's paths, not its folder.
    ended = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("template.py"))],
        input="".join(json.dumps(value) + "\n" for value in (settings, *conversations)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    texts: list[str] = []
    for line in ended.stdout.splitlines():
        with parsing(folder, "what its chat template says", ModelError):
            answer = json.loads(line)
        if "error" in answer:
            raise ModelError(f"{folder}: its chat template fails: {cut(answer['error'])}")
        texts.append(answer["text"])
    if ended.returncode == -signal.SIGPROF:
        raise ModelError(
            f"{folder}: its chat template takes more than {SECONDS} s of the CPU for conversation {len(texts)}"
        )
    if ended.returncode or len(texts) != len(conversations):
        why = (ended.stderr.splitlines() or [f"it ended with {ended.returncode}"])[-1]
        raise ModelError(f"{folder}: its chat template fails: {cut(why)}")
    return texts


def _special(folder: Path) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else value.get("content", "")
        for key, value in (read_json(folder / "tokenizer_config.json") or {}).items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }


def read_conversations(path: str) -> list[Messages] | None:
    """A .jsonl of objects with "messages"; None if its first line is none."""
    found: list[Messages] = []
    for number, line in read_lines(path, kind=ModelError) if path.endswith(".jsonl") else ():
        if not line.strip():
            continue
        try:
            conversation = json_of(line)
        except ValueError:
            conversation = None
        if not isinstance(conversation, dict) or "messages" not in conversation:
            if not found:
                return None
            raise ModelError(f'{path}:{number}: is {cut(line, 40)}, expected an object with "messages"')
        messages = conversation["messages"]
        fine = isinstance(messages, list) and messages
        if not fine or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
            raise ModelError(f"{path}:{number}: messages is {cut(messages)}, expected roles and contents")
        found.append(messages)
    return found or None
