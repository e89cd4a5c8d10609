"""The digest of a question: its plain values, with the contents of files in place of their names."""

import hashlib
import json
import os
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.spec import files_of
from ..profiler.placed import placed
from ..profiler.profile import located
from ..results.world import World
from ..results.world import digest as digest_of_trace
from ..traces import Trace

Json = dict[str, Any]

NOT_ASKED = ("allow_code", "check_rules", "profile_object")


def digest(question: Any) -> str:
    """SHA-256 of plain values, in 32 hex digits."""
    return hashlib.sha256(
        json.dumps(
            question,
            sort_keys=True,
            default=lambda value: digest_of_trace(value) if isinstance(value, Trace) else repr(value),
        ).encode()
    ).hexdigest()[:32]


def asked_of(world: World, **extra: Any) -> Json:
    """A replay's inputs as plain values, and `extra`.

    A file counts by its contents and suffixes (its format), wherever it lies; imports of a policy's code do not.
    """
    stamped = world.with_files(_stamp)
    values = {f.name: getattr(stamped, f.name) for f in fields(stamped) if f.name not in NOT_ASKED}
    values["profile"] = [_profile(pool_world) for pool_world in world.of_each_pool()]
    return {"dsim": __version__, **values, **extra}


def _profile(world: World) -> str:
    if world.profile_object is not None:
        return digest(repr(world.base_profile()))
    path, implementation = located(placed(world.policy)[1] or world.profile)
    return f"{_stamp(str(path))}/{implementation}"


def _stamp(name: str) -> str:
    """A file's content and suffixes; a policy's TOML file has those of the code it names, too."""
    if not os.path.isfile(name):
        return name
    path = Path(name)
    code = map(Path, files_of(name) if path.suffix == ".toml" else ())
    stamps = [_digest_of(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in (path, *code)]
    return "+".join(stamps) + "".join(path.suffixes[-2:])


@lru_cache(maxsize=256)
def _digest_of(path: str, _size: int, _changed: int) -> str:
    """Computed again if a file's size or time changes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
