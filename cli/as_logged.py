"""`dsim replay --as-logged`: policy, settings and profile of a step log."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from ..files.read import printable
from .options import is_given

if TYPE_CHECKING:
    import typer

# They would change the logged traffic.
OTHER = ("arrival", "rate", "cv", "lengths", "concurrency", "num_requests", "time_scale")


@dataclass(frozen=True)
class AsLogged:
    policies: list[str]
    profile: str  # name or file
    about: dict[str, Any]  # for the manifest
    lines: list[str] = field(default_factory=list)  # to print


def as_logged(context: "typer.Context", log: str, policies: Sequence[str] | None, profile: str) -> AsLogged:
    """A step log's settings, which options override."""
    from ..profiler.as_logged import policy_of
    from ..profiler.profile import load, save, to_json
    from ..profiler.steplog import profile_of_log, read_log

    for name in OTHER:
        if is_given(context, name):
            raise DsimError(f"--{name.replace('_', '-')} and --as-logged are given: expected one of them")
    held, name = read_log(log), printable(Path(log).stem)
    left_out: list[str] = []
    specs = list(policies or [])
    if not specs:
        spec, left_out = policy_of(held.header)
        specs = [spec]
    lines = [f"As logged: {', '.join(specs)}" + ("" if policies is None else " (given; not the log's own)")]
    if left_out:
        lines.append(f"Not in the policy: the log's {', '.join(left_out)}")
    if is_given(context, "profile"):
        origin, about = "given", {}
        lines.append(f"Profile: {load(profile).name}, given")
    else:
        fitted = profile_of_log(held, name, log)
        folder = context.with_resource(TemporaryDirectory())
        profile = str(Path(folder) / "fitted.json")
        save(fitted, profile)
        origin, about = "fitted to the same log", {"fitted_profile": to_json(fitted)}
        lines.append(f"Profile: fitted to the same log, so step prices are not a prediction ({name})")
        lines += [f"The fit may be wrong: {line}" for line in fitted.doubts]
    told = {"log": Path(log).name, "profile": origin, "not_in_policy": left_out}
    return AsLogged(specs, profile, {"as_logged": told, **about}, lines)
