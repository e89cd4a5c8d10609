"""Warnings: settings of a policy, or a model of the requests, that the profile does not know."""

from collections.abc import Iterable, Iterator

from ..files.read import cut
from ..profiler.models import known_model
from ..profiler.profile import Profile, shipped_for
from .setting import Setting


def warnings_of(setting: Setting, named: Iterable[object] = ()) -> list[str]:
    """One line for each. named: the models in the requests' log."""
    return [*_unknown(setting), *_of_another_model(setting.profile, dict.fromkeys(str(name) for name in named if name))]


def _of_another_model(profile: Profile, names: Iterable[str]) -> Iterator[str]:
    models = {shape.name for shape in map(known_model, names) if shape is not None}
    if models and profile.model.name not in models:
        shipped = ", ".join(name for model in sorted(models) for name in shipped_for(model))
        yield (
            f"the requests are of {cut(', '.join(names))} in the log, and {profile.name} is of {profile.model.name}: "
            f"expected a profile of their model (shipped: {shipped or 'none'})"
        )


def _unknown(setting: Setting) -> Iterator[str]:
    policy, profile, law, commits = setting.policy, setting.profile, setting.law, setting.commits
    unmasking = policy.unmasking
    if policy.rows.commits == "tokens" and profile.family == "canvas":
        yield f"{policy.name}: {profile.model.name} decodes canvases: an autoregressive model of its costs is meant"
    if policy.granularity.caution:
        yield f"{policy.name}: {policy.granularity.caution}"
    if policy.granularity.drafts_blocks and not profile.latency.draft_token:
        yield f"{policy.name}: {profile.name} holds no time of a draft forward (draft_token is 0): drafts are free"
    if commits is not None and commits.threshold != unmasking.threshold:
        yield (
            f"{policy.name}: threshold is {unmasking.threshold:g}, the engine's own, but {profile.name} holds yields "
            f"for {commits.workload} at {commits.threshold:g}: these are used"
        )
    if law is None:
        return
    if law.source.startswith("borrowed from "):
        source = law.source.partition(":")[0]
        yield f"{policy.name}: forwards a block of {profile.model.name} are not published: {source}"
    counted = profile.counted_length(law.workload, law.canvas_length)
    if counted != law.canvas_length:
        times = max(1.0, law.canvas_length / counted)
        yield (
            f"{policy.name}: forwards of canvases of {law.canvas_length} are not known: assumed {times:g} times those "
            f"of {counted}, counted by {profile.name} for {law.workload}"
        )
