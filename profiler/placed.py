"""POLICY@PROFILE: a policy on a profile of its own."""

import os


def placed(policy: str) -> tuple[str, str | None]:
    """The SPEC or file, and the profile after its @, if any."""
    spec, separator, profile = policy.rpartition("@")
    # An @ in a path belongs to the path.
    if not separator or ".py:" in profile or os.path.exists(policy):
        return policy, None
    return spec, profile


def yield_files(text: str) -> list[str]:
    """The files that a `--yield` names: one, or two pages of metrics."""
    names = [text] if os.path.isfile(text) else text.split(",")
    return names if all(map(os.path.isfile, names)) else []
