"""What a profile leaves open: the yield that its step times assume, and unknown host terms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engine.cache_overhead import implementation_of
from ..engine.part import Policy
from .profile import Profile


@dataclass(frozen=True)
class Under:
    """The yield at which a profile's step times were calibrated."""

    tokens: float  # per denoise step; with drafts, per forward
    workload: str  # with drafts: their number and acceptance
    threshold: float | None  # None: a law of forwards, or drafts

    def __str__(self) -> str:
        threshold = "" if self.threshold is None else f", threshold {self.threshold:g}"
        return f"{self.tokens:.3g} ({self.workload}{threshold})"


def calibrated_under(profile: Profile) -> Under | None:
    """None for measured profiles and data sheets."""
    settings = profile.provenance.settings
    tokens, workload, threshold = (settings.get(f"calibrated_{name}") for name in ("yield", "workload", "threshold"))
    if not isinstance(tokens, int | float) or not isinstance(threshold, int | float | None) or workload is None:
        return None
    return Under(float(tokens), str(workload), None if threshold is None else float(threshold))


def default_said(profile: Profile) -> str:
    """Describe the default workload and the one that step times were calibrated at."""
    if not profile.workloads:
        return "no workload"
    default, under = profile.workloads[0], calibrated_under(profile)
    if under is not None:
        return f"workload {default}, " + (
            "as its step times" if under.workload == default else f"step times under {under}"
        )
    return f"workload {default}, step times under " + ("unknown ones" if profile.is_estimate else "those measured")


def drafted(acceptances: Sequence[float]) -> str:
    """Describe an autoregressive workload by its drafts' conditional acceptance."""
    drafts = acceptances[1:]
    if not drafts:
        return "a token at a time"
    chances = "/".join(f"{chance:.3g}" for chance in dict.fromkeys(drafts))
    return f"{len(drafts)} drafts, each accepted with probability {chances}"


def unpriced(profile: Profile, policies: Iterable[Policy]) -> list[str]:
    """Implementations named by these policies without costs in the profile, which uses its own."""
    names = dict.fromkeys(map(implementation_of, policies))
    return [name for name in names if name not in profile.implementation.lower()]


def unknown_host(profile: Profile) -> tuple[str, ...]:
    """Host-time terms that the calibration data cannot identify (stored as 0).

    A data sheet identifies neither. A fit can miss host_request; a missed host_step is part of its smallest step.
    """
    terms = {"host_request"}.intersection(profile.fit.unidentified)
    if profile.origin == "roofline":
        terms = {"host_request", "host_step"}
    return tuple(name for name in sorted(terms, reverse=True) if getattr(profile.latency, name) == 0.0)
