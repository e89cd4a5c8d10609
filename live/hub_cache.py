"""Hugging Face models by name, in the local cache; nothing is fetched."""

import os
import re
from pathlib import Path

from ..engine.errors import ModelError
from ..files.read import cut, read_bytes

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/model
FOLDER = "models--"  # then owner--model; inside: refs/main, and snapshots/REVISION


def hub() -> Path:
    """The local cache's folder, where huggingface_hub puts it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def in_cache(name: str) -> str:
    """The snapshot of owner/model, by refs/main or the newest; other names unchanged.

    ModelError if the cache has none.
    """
    if os.path.lexists(name) or not NAME.fullmatch(name):
        return name
    folder = hub() / f"{FOLDER}{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    revision = read_bytes(str(main), kind=ModelError).decode("utf-8", "replace").strip() if main.is_file() else ""
    held = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    found = [path for path in held if path.name == revision] or held
    if not found:
        raise ModelError(f"{cut(name)} is no path, and {folder} has no snapshot: expected one, or hf download first")
    return str(found[-1])


def model_name(folder: Path) -> str:
    """A folder's name, or a snapshot's model."""
    folder = folder.resolve()
    of = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    return of.rpartition("--")[2] if of.startswith(FOLDER) else folder.name
