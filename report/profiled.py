"""A profile and the data of its fit, as `dsim profile` returns it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..profiler.profile import Profile
from .page import Page
from .result import Result

if TYPE_CHECKING:
    import pandas as pd

    from ..profiler.commit_log import CommitLog
    from ..profiler.samples import Samples


@dataclass(frozen=True, repr=False)
class Profiled(Result):
    """A profile and the data of its fit."""

    profile: Profile
    steps: "Samples | None" = None  # None: derived
    logs: "Mapping[tuple[str, float], CommitLog]" = field(default_factory=dict)  # by workload and threshold
    served: "Samples | None" = None  # every second one judged the fit; None: part of `steps` did
    is_measured: bool = False  # here

    @property
    def doubts(self) -> list[str]:
        """Why not to trust the profile, a line each."""
        return self.profile.doubts

    def page(self, command: str = "") -> Page:
        from .profile_page import derived_page, profile_page

        if self.steps is None:
            return derived_page(self.profile)
        return profile_page(self.profile, self.steps, self.logs, command, self.served)

    def to_frame(self) -> "pd.DataFrame":
        """One row per measured step: features, latency, device time and the fitted latency (s); empty for a derived
        profile.

        served: whether serving measured the step; the fit has every second of these, and the others judged it.
        """
        import pandas as pd

        from ..profiler.fit import predict
        from ..profiler.samples import FEATURES, samples

        parts = []
        for steps, served in ((self.steps or samples([], []), False), (self.served, True)):
            if steps is not None:
                columns: dict[str, Any] = dict(zip(FEATURES, steps.features.T, strict=True))
                columns |= {"latency": steps.latency, "device": steps.device}
                parts.append(
                    pd.DataFrame({**columns, "fitted": predict(self.profile.latency, steps.features), "served": served})
                )
        return pd.concat(parts, ignore_index=True)

    def to_json(self) -> dict[str, Any]:
        """As in its file."""
        from ..profiler.profile import to_json

        found: dict[str, Any] = to_json(self.profile)  # type: ignore[assignment]
        return found
