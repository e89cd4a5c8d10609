"""What the files that a scenario names hold: a replay that was kept answers for the same contents only."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from ..engine.policy import file_of
from ..profiler.placed import placed
from ..profiler.profile import SHIPPED as PROFILES
from ..results.scenario import Scenario
from ..traces.lengths import without_limit
from ..traces.load import locate
from ..traces.shipped import SHIPPED

FILES = ("trace", "profile", "yields", "fit", "lengths")  # fields that may name a file


def contents_of(scenario: Scenario) -> dict[str, str]:
    """The SHA-256 of each file that a scenario names, by what it is used for.

    Files that a policy's own code imports are not followed.
    """
    policy, profile = placed(scenario.policy)
    named = {name: getattr(scenario, name) for name in FILES} | ({} if profile is None else {"profile": profile})
    found = {name: digest_of(path) for name, value in named.items() if (path := _file_of(name, value)) is not None}
    if policy.endswith(".toml"):
        found["policy"] = digest_of(Path(policy))
    if (code := file_of(policy)) is not None:
        found["policy file"] = digest_of(code)
    return found


def _file_of(field: str, name: str | None) -> Path | None:
    if name is None:
        return None
    if field == "trace":
        return locate(name)[0]
    if field == "lengths":
        name, _ = without_limit(name)
    path = Path(name)
    if field in ("lengths", "fit") and not os.path.isfile(path):
        return SHIPPED.get(name)
    if field == "profile" and not os.path.isfile(path):
        path = PROFILES / f"{name}.json"
    return path if os.path.isfile(path) else None


def digest_of(path: Path) -> str:
    """A file's SHA-256, read again where its size or its time has changed."""
    stat = path.stat()
    return _digest_of(str(path), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest_of(path: str, _size: int, _changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
