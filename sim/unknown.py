"""Warnings: settings of a policy or its requests that the profile does not know."""

from collections.abc import Iterator

from ..traces import Trace
from ..traces.trace import READ_ONLY
from .setting import Setting


def warnings_of(setting: Setting, requests: Trace | None) -> list[str]:
    """One line for each such setting. requests: None if they are not known yet."""
    lines = list(_of_setting(setting))
    if requests is not None:
        lines += _of_requests(setting, requests)
    return lines


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
    counted = profile.counted_length(law.workload, law.canvas_length)
    if counted != law.canvas_length:
        times = max(1.0, law.canvas_length / counted)
        yield (
            f"{policy.name}: forwards of canvases of {law.canvas_length} are not known: assumed {times:g} times those "
            f"of {counted}, counted by {profile.name} for {law.workload}"
        )


def _of_requests(setting: Setting, requests: Trace) -> Iterator[str]:
    policy = setting.policy
    special = (requests.canvas_length > 0) | (requests.numbers(READ_ONLY) > 0)
    if special.any() and not policy.batching.narrows_canvases:
        yield (
            f"{policy.name}: {int(special.sum())} of {len(requests)} requests have a diffusion_canvas_length or "
            "diffusion_read_only: this policy commits them like others"
        )
