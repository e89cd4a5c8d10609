"""A profile's own limits: the yield behind its step times, and host terms that nobody knows."""

from collections.abc import Sequence
from dataclasses import dataclass

from .profile import Profile


@dataclass(frozen=True)
class Under:
    """The yield that a profile's step times were calibrated under: to what else commits they are carried over."""

    tokens: float  # a denoise step; of drafts, a forward
    workload: str  # of drafts, how many of them and how likely each is accepted
    threshold: float | None  # None: of a law of forwards, or of drafts

    def __str__(self) -> str:
        at = "" if self.threshold is None else f", threshold {self.threshold:g}"
        return f"{self.tokens:.3g} ({self.workload}{at})"


def calibrated_under(profile: Profile) -> Under | None:
    """The yield that a profile says it was calibrated under; None where it says none: measured ones, data sheets."""
    settings = profile.provenance.settings
    tokens, workload, threshold = (settings.get(f"calibrated_{name}") for name in ("yield", "workload", "threshold"))
    if not isinstance(tokens, int | float) or not isinstance(threshold, int | float | None) or workload is None:
        return None
    return Under(float(tokens), str(workload), None if threshold is None else float(threshold))


def default_said(profile: Profile) -> str:
    """What a run of the profile yields that names no workload, and whether its step times were taken so too."""
    if not profile.workloads:
        return "no workload"
    own, under = profile.workloads[0], calibrated_under(profile)
    if under is not None:
        return f"workload {own}, " + ("as its step times" if under.workload == own else f"step times under {under}")
    return f"workload {own}, step times under " + ("unknown ones" if profile.is_estimate else "those measured")


def drafted(acceptances: Sequence[float]) -> str:
    """The workload of an autoregressive run: how likely each token of a step is, those before it being."""
    drafts = acceptances[1:]
    return f"{len(drafts)} drafts, each accepted with probability {drafts[0]:g}" if drafts else "a token at a time"


def unknown_host(profile: Profile) -> tuple[str, ...]:
    """Host terms of a profile that are 0 because nobody could tell them, and that no other constant holds.

    Both of a data sheet's estimate; of a fit host_request, where steps did not tell it. A host_step that a fit could
    not tell is in the time of its smallest step: every measured latency has it. A calibrated profile's steps were read
    off whole forwards or runs: they have what the host took.
    """
    zero = [name for name in ("host_step", "host_request") if getattr(profile.latency, name) == 0.0]
    return tuple(
        name for name in zero
        if profile.origin == "roofline" or (name == "host_request" and name in profile.fit.unidentified)
    )  # fmt: skip
