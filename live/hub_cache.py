"""Hugging Face models by name, in the local cache; nothing is fetched."""

import os
import re
from pathlib import Path

from ..engine.errors import ModelError
from ..files.read import cut

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/model


def in_cache(name: str) -> str:
    """The snapshot of owner/model in the cache; other names unchanged. ModelError if the cache has none."""
    if os.path.lexists(name) or not NAME.fullmatch(name):
        return name
    from huggingface_hub import try_to_load_from_cache  # paths do not need it

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a repository
        config = None
    if not isinstance(config, str):
        raise ModelError(
            f"{cut(name)} is no path, and the Hugging Face cache has no config.json of it: expected a folder, or "
            "`hf download` first"
        )
    return str(Path(config).parent)


def model_name(folder: Path) -> str:
    """A folder's name, or a snapshot's model."""
    folder = folder.resolve()
    repository = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    return repository.rpartition("--")[2] if repository.startswith("models--") else folder.name
