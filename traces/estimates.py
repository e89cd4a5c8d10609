"""Estimated answer lengths, for routers and policies that use them."""

from dataclasses import replace

import numpy as np

from ..engine import chance
from .trace import ESTIMATE, Trace

# Of log(estimate / truth): two thirds of the estimates are within a factor of 1.65.
SPREAD = 0.5


def with_estimates(trace: Trace, seed: int) -> Trace:
    """Estimate each answer's length: by the file, the request's limit, or a guess keyed by seed and row."""
    limit, stated = trace.max_tokens, trace.numbers(ESTIMATE)
    if ESTIMATE not in trace.extras and (limit > 0).all():
        return trace  # the limit is the estimate
    u = chance.uniform(chance.key(seed, chance.ESTIMATE, np.arange(2)[:, None], np.arange(len(trace))))
    normal = np.sqrt(-2.0 * np.log(u[0])) * np.cos(2.0 * np.pi * u[1])  # Box and Muller
    guess = np.maximum(1, np.rint(trace.output_length * np.exp(SPREAD * normal))).astype(np.int64)
    guess = np.where(limit > 0, limit, guess)
    stated = np.where(limit > 0, np.minimum(stated, limit), stated)
    return replace(trace, extras={**trace.extras, ESTIMATE: np.where(stated > 0, stated, guess).tolist()})
