"""Warnings: settings of a policy or its requests that the profile does not know."""

import dataclasses
from typing import Any

from ..files.read import cut
from ..profiler.models import known_model
from ..profiler.profile import shipped_for
from ..traces import Trace
from ..traces.trace import READ_ONLY
from .setting import Setting


def warnings_of(setting: Setting, requests: Trace | None) -> list[str]:
    """One line for each such setting. requests: None if they are not known yet."""
    policy, profile, law, commits = setting.policy, setting.profile, setting.law, setting.commits
    found, unmasking = [], policy.unmasking
    if commits is not None and commits.threshold != unmasking.threshold:
        found.append(
            f"{policy.name}: threshold is {unmasking.threshold:g}, the engine's own, but {profile.name} holds yields "
            f"for {commits.workload} at {commits.threshold:g}: these are used"
        )
    if law is not None and unmasking.own_threshold is not None:
        asked = [f"{name} {given:g}" for name, given, own in _thresholds(unmasking) if given != own]
        if asked:
            found.append(
                f"{policy.name}: {' and '.join(asked)} have no effect: the law of {profile.name} for "
                f"{law.workload} sets the forwards of a block"
            )
    if law is not None and (counted := profile.counted_length(law.workload, law.canvas_length)) != law.canvas_length:
        times = max(1.0, law.canvas_length / counted)
        found.append(
            f"{policy.name}: forwards of canvases of {law.canvas_length} are not known: assumed {times:g} times those "
            f"of {counted}, counted by {profile.name} for {law.workload}"
        )
    if requests is None:
        return found
    names = dict.fromkeys(str(name) for name in requests.extras.get("model", ()) if name)
    models = {shape.name for name in names if (shape := known_model(name)) is not None}
    if models and profile.model.name not in models:
        shipped = ", ".join(name for model in sorted(models) for name in shipped_for(model))
        found.append(
            f"the requests are of {cut(', '.join(names))} in the log, and {profile.name} is of "
            f"{profile.model.name}: expected a profile of their model (shipped: {shipped or 'none'})"
        )
    reads = int(requests.numbers(READ_ONLY).sum())
    if reads and not policy.batching.narrows_canvases:
        found.append(
            f"{policy.name}: {reads} of {len(requests)} requests read a canvas (diffusion_read_only): this policy "
            "commits them like others"
        )
    narrow = requests.canvas_length
    narrow = narrow[(narrow > 0) & (narrow < policy.block_length)]
    if len(narrow) and law is not None and not policy.granularity.on_a_grid:
        if policy.batching.narrows_canvases:
            does = f"take the steps of {policy.block_length}: no law is known for narrower ones"
        else:
            does = f"are {policy.block_length} wide: this policy cannot narrow them"
        found.append(
            f"{policy.name}: canvases of {len(narrow)} of {len(requests)} requests (diffusion_canvas_length) {does}"
        )
    return found


def _thresholds(unmasking: Any) -> list[tuple[str, float, float]]:
    """The name, value and engine default of each threshold of an editing policy."""
    fields = {f.name: f.default for f in dataclasses.fields(unmasking)}
    return [
        ("threshold", unmasking.threshold, unmasking.own_threshold),
        *((name, getattr(unmasking, name), fields[name]) for name in ("edit_threshold",) if name in fields),
    ]
