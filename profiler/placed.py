"""POLICY@PROFILE: a policy on a profile of its own, for a research script and a server are two profiles."""

import os


def placed(policy: str) -> tuple[str, str | None]:
    """A policy's SPEC or file, and the profile that it names behind an @; None where it names none."""
    spec, at, profile = policy.rpartition("@")
    # An @ of a path is no such sign.
    if not at or ".py:" in profile or os.path.exists(policy):
        return policy, None
    return spec, profile
