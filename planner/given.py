"""What `import dsim` takes instead of names: frames, traces, profiles, policies."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from .plan_replays import Posed

TraceLike: TypeAlias = str | Path | pd.DataFrame | Trace
ProfileLike: TypeAlias = str | Path | Profile
PolicyLike: TypeAlias = str | Policy

READING = ("time_unit", "skip_bad", "columns", "only")  # options of load


def read_of(trace: pd.DataFrame | Trace, options: Mapping[str, Any]) -> Trace:
    """A frame, read with options of READING, or the object."""
    options_given = {name: options[name] for name in READING if options.get(name)}
    if isinstance(trace, pd.DataFrame):
        return load(trace, **options_given)
    if options_given:
        name, value = next(iter(options_given.items()))
        raise DsimError(f"{name} is {quoted(value)} and the trace was read before: give it to load_trace")
    return trace


def trace_of(trace: TraceLike, options: Mapping[str, Any]) -> Trace | None:
    """None for a name or path."""
    return read_of(trace, options) if isinstance(trace, pd.DataFrame | Trace) else None


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


def named_config(config: Any, field: str = "") -> Any:
    """A sweep's configuration, its frames and objects named."""
    if isinstance(config, Mapping):
        return {name: named_config(value, str(name)) for name, value in config.items()}
    if isinstance(config, list):
        return [named_config(value, field) for value in config]
    if isinstance(config, Profile):
        return name_of_profile(config)
    if isinstance(config, Policy):
        return spec_of(config)
    trace = None if isinstance(config, str | Path) else trace_of(config, {})
    if trace is not None:
        return name_of_trace(trace)
    return str(config) if isinstance(config, Path) else config


@dataclass(frozen=True)
class GivenScenario(Posed):
    """With objects in place of names."""

    given_trace: Trace | None = None
    given_policies: tuple[Policy, ...] = ()

    def source(self) -> Trace:
        return super().source() if self.given_trace is None else self.given_trace

    def parsed_policy(self) -> Policy:
        return next((p for p in self.given_policies if p.name == self.policy), None) or super().parsed_policy()


def objects(
    trace: TraceLike, options: Mapping[str, Any], policies: Sequence[PolicyLike], profile: ProfileLike
) -> dict[str, Any]:
    """A GivenScenario's own fields, and its trace's name."""
    read = trace_of(trace, options)
    return {
        "trace": str(trace) if read is None else read.name,
        "given_trace": read,
        "given_policies": tuple(p for p in policies if isinstance(p, Policy)),
        "given_profile": profile if isinstance(profile, Profile) else None,
    }


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
