"""Warnings: settings of a policy or its requests that the profile does not know."""

import dataclasses
from collections.abc import Iterator

from ..files.read import cut
from ..profiler.models import known_model
from ..profiler.profile import shipped_for
from ..traces import Trace
from .setting import Setting


def warnings_of(setting: Setting, requests: Trace | None) -> list[str]:
    """One line for each such setting. requests: None if they are not known yet."""
    return [*_of_setting(setting), *(() if requests is None else _of_requests(setting, requests))]


def _of_setting(setting: Setting) -> Iterator[str]:
    policy, profile, law, commits = setting.policy, setting.profile, setting.law, setting.commits
    unmasking = policy.unmasking
    if commits is not None and commits.threshold != unmasking.threshold:
        yield (
            f"{policy.name}: threshold is {unmasking.threshold:g}, the engine's own, but {profile.name} holds yields "
            f"for {commits.workload} at {commits.threshold:g}: these are used"
        )
    if law is None:
        return
    if unmasking.own_threshold is not None:
        # Of a policy that edits, the second threshold too.
        defaults = {field.name: field.default for field in dataclasses.fields(unmasking)}
        engine = {"threshold": unmasking.own_threshold, "edit_threshold": defaults.get("edit_threshold")}
        changed = [name for name, default in engine.items() if default not in (None, getattr(unmasking, name, None))]
        if changed:
            settings = " and ".join(f"{name} {getattr(unmasking, name):g}" for name in changed)
            yield (
                f"{policy.name}: {settings} have no effect: the law of {profile.name} for {law.workload} sets the "
                "forwards of a block"
            )
    counted = profile.counted_length(law.workload, law.canvas_length)
    if counted != law.canvas_length:
        times = max(1.0, law.canvas_length / counted)
        yield (
            f"{policy.name}: forwards of canvases of {law.canvas_length} are not known: assumed {times:g} times those "
            f"of {counted}, counted by {profile.name} for {law.workload}"
        )


def _of_requests(setting: Setting, requests: Trace) -> Iterator[str]:
    profile = setting.profile
    names = dict.fromkeys(str(name) for name in requests.extras.get("model", ()) if name)
    models = {shape.name for name in names if (shape := known_model(name)) is not None}
    if models and profile.model.name not in models:
        shipped = ", ".join(name for model in sorted(models) for name in shipped_for(model))
        yield (
            f"the requests are of {cut(', '.join(names))} in the log, and {profile.name} is of "
            f"{profile.model.name}: expected a profile of their model (shipped: {shipped or 'none'})"
        )
