"""What `import dsim` takes instead of names: frames, traces, profiles, policies."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pandas as pd

from ..engine.errors import DsimError, PolicyError
from ..engine.policy import Policy, parse
from ..files.read import quoted
from ..files.write import write_whole
from ..profiler.profile import Profile, to_json
from ..results.scenario import named_code
from ..traces import Trace, load

TraceLike: TypeAlias = str | Path | pd.DataFrame | Trace
ProfileLike: TypeAlias = str | Path | Profile
PolicyLike: TypeAlias = str | Policy

READING = ("time_unit", "skip_bad", "columns", "only")  # options of load


def trace_of(trace: TraceLike, options: Mapping[str, Any]) -> Trace | None:
    """A frame, read with options of READING, or the object; None for a name or path."""
    asked = {name: options[name] for name in READING if options.get(name)}
    if isinstance(trace, pd.DataFrame):
        return load(trace, **asked)
    if isinstance(trace, Trace):
        if asked:
            name, value = next(iter(asked.items()))
            raise DsimError(f"{name} is {quoted(value)} and the trace was read before: give it to load_trace")
        return trace
    return None


def name_of_trace(trace: Trace | str | Path) -> str:
    """The name; an object becomes a file that lasts as long as the process."""
    if not isinstance(trace, Trace):
        return str(trace)
    columns = {
        "arrival": trace.arrival.tolist(),
        "input_length": trace.input_length.tolist(),
        "output_length": trace.output_length.tolist(),
        **trace.extras,
    }
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return str(_kept("".join(json.dumps(row) + "\n" for row in rows), f"{_plain(trace.name)}.jsonl"))


def name_of_profile(profile: ProfileLike) -> str:
    """Like `name_of_trace`."""
    if not isinstance(profile, Profile):
        return str(profile)
    return str(_kept(json.dumps(to_json(profile)), f"{_plain(profile.name)}.json"))


def spec_of(policy: PolicyLike) -> str:
    """PolicyError if the object was changed after parsing."""
    if isinstance(policy, str):
        return policy
    if repr(parse(policy.name, named_code([policy.name]))) != repr(policy):
        raise PolicyError(f"policy {policy.name} was changed after it was parsed, expected the SPEC of what it is now")
    return policy.name


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "_" for c in name)


def _kept(text: str, name: str) -> Path:
    """Equal texts share a file."""
    path = Path(_folder().name) / hashlib.sha256(text.encode()).hexdigest()[:16] / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)
    return path


@cache
def _folder() -> "TemporaryDirectory[str]":
    """Removed at exit."""
    return TemporaryDirectory(prefix="dsim-")
