"""Warnings: settings of a policy or its requests that the profile does not know."""

import dataclasses
from typing import Any

from ..traces import Trace
from ..traces.trace import READ_ONLY
from .setting import Setting


def warnings_of(setting: Setting, requests: Trace | None) -> list[str]:
    """One line for each such setting. requests: None if they are not known yet."""
    policy, profile, law, commits = setting.policy, setting.profile, setting.law, setting.commits
    found, unmasking = [], policy.unmasking
    if commits is not None and commits.threshold != unmasking.threshold:
        found.append(
            f"{policy.name}: its threshold is {unmasking.threshold:g}, the engine's own, and {profile.name} holds "
            f"yields for {commits.workload} at {commits.threshold:g}: blocks commit as they do there"
        )
    if law is not None and unmasking.own_threshold is not None:
        asked = [f"{name} {given:g}" for name, given, own in _thresholds(unmasking) if given != own]
        if asked:
            found.append(
                f"{policy.name}: {' and '.join(asked)} change nothing here: the law of {profile.name} for "
                f"{law.workload} says how many forwards a block takes"
            )
    if law is not None and (counted := profile.counted_length(law.workload, law.canvas_length)) != law.canvas_length:
        times = law.canvas_length / counted
        more = f"{times:g} times as many" if times > 1 else "as many"
        found.append(
            f"{policy.name}: the forwards of canvases of {law.canvas_length} were not counted; they take {more} here "
            f"as those of {counted}, by which {profile.name} knows {law.workload}"
        )
    if requests is None:
        return found
    reads = int(requests.numbers(READ_ONLY).sum())
    if reads and not policy.batching.narrows_canvases:
        found.append(
            f"{policy.name}: {reads} of {len(requests)} requests read a canvas (diffusion_read_only): this policy "
            "commits them as all others"
        )
    narrow = requests.canvas_length
    narrow = narrow[(narrow > 0) & (narrow < policy.block_length)]
    if len(narrow) and law is not None and not policy.granularity.on_a_grid:
        if policy.batching.narrows_canvases:
            does = f"take as many steps as those of {policy.block_length}: no law of narrower ones is known"
        else:
            does = f"are as wide as all others, {policy.block_length}: this policy narrows none"
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
