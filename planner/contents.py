"""A replay's inputs: a scenario's fields, with files' contents for names."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine.policy import file_of, named_file, with_file
from ..profiler.placed import placed, yield_files
from ..profiler.profile import located
from ..results.scenario import Scenario
from ..traces import Trace
from ..traces.lengths import without_limit
from ..traces.load import locate
from ..traces.shipped import SHIPPED

Json = dict[str, Any]

FILES = ("trace", "profile", "yields", "lengths")  # may name a file
NOT_ASKED = ("allow_code", "check_rules")
PROFILE = ("profile", "given_profile", "machine")  # which make a profile
NAMING = (*FILES, "policy", "router", "scaler", "decider", "pools")  # may name files
Found = dict[Any, tuple[dict[str, str], Json]]
# Files of scenarios, by fields that name them; None: not remembered.
_FOUND: ContextVar[Found | None] = ContextVar("_FOUND", default=None)


def asked_of(scenario: Scenario, **more: Any) -> Json:
    """A replay's inputs as plain values, and `more`. Files count by contents and suffixes (formats)."""
    contents, named = _files_of(scenario)
    asked = {f.name: getattr(scenario, f.name) for f in fields(scenario) if f.name not in (*NOT_ASKED, *PROFILE)}
    found = dict(contents)
    if any(getattr(scenario, name, None) is not None for name in PROFILE[1:]):
        found["profile"] = hashlib.sha256(repr(scenario.base_profile()).encode()).hexdigest()
    return {"dsim": __version__, **(asked | named), "files": found, **more}


@contextmanager
def looked_at_once(found: Found) -> Iterator[None]:
    """Look at each file once in all blocks that share `found`."""
    token = _FOUND.set(found)
    try:
        yield
    finally:
        _FOUND.reset(token)


def _files_of(scenario: Scenario) -> tuple[dict[str, str], Json]:
    """Files' contents, and fields that name files, without paths."""
    known = _FOUND.get()
    if known is None:
        return _contents(scenario), _named(scenario)
    key = (*(getattr(scenario, name) for name in NAMING), getattr(scenario, "given_profile", None) is None)
    if key not in known:
        known[key] = _contents(scenario), _named(scenario)
    return known[key]


def _named(scenario: Scenario) -> Json:
    named: Json = {}
    for name in FILES:
        value = getattr(scenario, name)
        if name != "profile" and _file_of(name, value) is not None:
            path, limit = without_limit(value) if name == "lengths" else (value, None)
            named[name] = ["".join(Path(path).suffixes[-2:]), limit]
    short = scenario.with_files(lambda path: Path(path).name)  # contents identify a file, not its folder
    policy, _ = placed(scenario.policy)
    own = ".toml" if policy.endswith(".toml") else with_file(policy, lambda path: Path(path).name)
    return named | {name: getattr(short, name) for name in ("router", "scaler", "decider", "pools")} | {"policy": own}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def contents_of(scenario: Scenario) -> dict[str, str]:
    """SHA-256 of each file that a scenario names, by use. Imports in a policy's code are not followed."""
    return dict(_files_of(scenario)[0])


def _contents(scenario: Scenario) -> dict[str, str]:
    policy, profile = placed(scenario.policy)
    named = {name: getattr(scenario, name) for name in FILES} | ({} if profile is None else {"profile": profile})
    if getattr(scenario, "given_profile", None) is not None:  # `asked_of` then hashes the profile
        named["profile"] = None
    found = {name: digest_of(path) for name, value in named.items() if (path := _file_of(name, value)) is not None}
    if named["profile"] is not None and (implementation := located(str(named["profile"]))[1]):
        found["implementation"] = implementation
    pages = yield_files(scenario.yields or "")
    if len(pages) > 1:
        found |= {f"yields {i}": digest_of(Path(page)) for i, page in enumerate(pages)}
    if policy.endswith(".toml"):
        found["policy"] = digest_of(Path(policy))
    if (code := file_of(policy)) is not None:
        found["policy file"] = digest_of(code)
    for name in ("router", "scaler", "decider"):
        if (file := named_file(getattr(scenario, name))) is not None and os.path.isfile(file):
            found[f"{name} file"] = digest_of(Path(file))
    for i, (_, alone) in enumerate(scenario._by_pool() if scenario.pools else ()):
        found |= {f"pool {i + 1}, {name}": content for name, content in contents_of(alone).items()}
    return found


def _file_of(field: str, name: str | None) -> Path | None:
    if name is None:
        return None
    if field == "trace":
        return locate(name)[0]
    if field == "lengths":
        name, _ = without_limit(name)
    path = Path(name)
    if field == "lengths" and not os.path.isfile(path):
        return SHIPPED.get(name)
    if field == "profile":
        return located(name)[0]
    return path if os.path.isfile(path) else None


def digest_of(path: Path) -> str:
    """SHA-256, taken again when size or time changes."""
    stat = path.stat()
    return _digest_of(str(path), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest_of(path: str, _size: int, _changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents_of_requests(requests: Trace) -> str:
    """SHA-256 of all columns."""
    columns = [requests.arrival, requests.input_length, requests.output_length]
    found = hashlib.sha256(b"".join(column.tobytes() for column in columns))
    found.update(repr(sorted(requests.extras.items())).encode())
    return found.hexdigest()
