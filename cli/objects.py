"""Names for the objects of `import dsim`: a frame, trace or profile becomes a file, a policy its SPEC.

Every process can read them. A file lasts as long as this process, and equal objects share one.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ..engine.errors import DsimError, PolicyError
from ..engine.spec import Policy, parse
from ..files.read import quoted
from ..files.write import write_whole
from ..profiler.profile import Profile, to_json
from ..profiler.profile import load as load_profile
from ..results.world import named_code
from ..traces import Trace, load

if TYPE_CHECKING:
    import pandas as pd

TraceLike: TypeAlias = Union[str, Path, "pd.DataFrame", Trace]
ProfileLike: TypeAlias = str | Path | Profile
PolicyLike: TypeAlias = str | Policy

READING = ("time_unit", "skip_bad", "columns", "only")  # options of load


def trace_name(trace: TraceLike, options: Mapping[str, Any]) -> str:
    """options: a frame is read with those of READING."""
    if isinstance(trace, str | Path):
        return str(trace)
    options = {name: options[name] for name in READING if options.get(name)}
    if not isinstance(trace, Trace):
        trace = load(trace, **options)
    elif options:
        name, value = next(iter(options.items()))
        raise DsimError(f"{name} is {quoted(value)} and the trace was read before: give it to load_trace")
    rows = trace.to_frame().to_dict("records")
    return str(_file("".join(json.dumps(row) + "\n" for row in rows), f"{_plain(trace.name)}.jsonl"))


def profile_name(profile: ProfileLike) -> str:
    if not isinstance(profile, Profile):
        return str(profile)
    return str(_file(json.dumps(to_json(profile)), f"{_plain(profile.name)}.json"))


def loaded(profile: ProfileLike) -> Profile:
    """A profile by name, or the object."""
    return profile if isinstance(profile, Profile) else load_profile(profile)


def spec_of(policy: PolicyLike) -> str:
    """PolicyError if the object was changed after parsing."""
    if isinstance(policy, str):
        return policy
    if repr(parse(policy.name, named_code([policy.name]))) != repr(policy):
        raise PolicyError(f"policy {policy.name} was changed after it was parsed, expected the SPEC of what it is now")
    return policy.name


def named_config(config: Any) -> Any:
    """A sweep's configuration with names in place of its objects."""
    if isinstance(config, Mapping):
        return {name: named_config(value) for name, value in config.items()}
    if isinstance(config, list):
        return list(map(named_config, config))
    if isinstance(config, str | int | float | None):
        return config
    names: dict[type, Callable[[Any], str]] = {Policy: spec_of, Profile: profile_name}
    return names.get(type(config), lambda trace: trace_name(trace, {}))(config)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _file(text: str, name: str) -> Path:
    path = Path(_folder().name) / hashlib.sha256(text.encode()).hexdigest()[:16] / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)
    return path


@cache
def _folder() -> "TemporaryDirectory[str]":
    """Removed at exit."""
    return TemporaryDirectory(prefix="dsim-")
