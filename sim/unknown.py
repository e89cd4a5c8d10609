"""Warnings: settings of a policy that the profile does not know."""

from collections.abc import Iterator

from .setting import Setting


def warnings_of(setting: Setting) -> list[str]:
    """One line for each such setting."""
    return list(_unknown(setting))


def _unknown(setting: Setting) -> Iterator[str]:
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
