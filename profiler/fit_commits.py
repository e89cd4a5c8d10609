"""Fit a commit model to commit logs, and judge it on requests that it was not fitted to."""

from ..engine.commits import CommitModel
from .commit_log import CommitLog
from .profile import CommitFit


def fit_commits(
    log: CommitLog,
    *,
    workload: str,
    threshold: float,
    temperature: float | None = None,
    source: str = "",
    held_out: float = 0.25,
) -> tuple[CommitModel, CommitFit]:
    """The commit model of greatest likelihood, and its errors on the share `held_out` of requests kept from it."""
    raise NotImplementedError
