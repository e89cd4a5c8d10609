"""Which step shapes to measure next: those whose latency the fit so far is least sure of."""

from collections.abc import Sequence

from ..engine.latency import Features
from .samples import Samples


def next_shapes(candidates: Sequence[Features], taken: Samples, num: int) -> list[int]:
    """Indices of `num` candidates to measure next, the most telling first; those measured already are left out."""
    raise NotImplementedError
