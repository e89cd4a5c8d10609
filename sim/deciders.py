"""Deciders: which requests are prefilled in their own pool, by the tokens that no decoding replica has cached."""

import math

from ..engine.errors import PolicyError, quoted
from ..files.read import did_you_mean
from .by_name import values

# Fewest tokens in no decoding replica's prefix cache, as in llm-d's decider and BLIS's threshold (fleet.md 2.3). There
# the decoding replica is chosen first; here the one with the longest part of the prompt counts.
DECIDERS = {"always": 0.0, "never": math.inf, "uncached": 512.0}


def least_uncached(spec: str) -> float:
    """Uncached tokens of a SPEC from which on a prefill pool takes a prompt: always, never or uncached[,tokens=N]."""
    name, *settings = spec.split(",")
    if name not in DECIDERS:
        hint = did_you_mean(name, DECIDERS)
        raise PolicyError(f"decider is {quoted(name)}{hint}, expected one of {', '.join(DECIDERS)}")
    types = {"tokens": int}
    if name != "uncached":
        types = {}
    tokens = values(settings, types, f"decider {quoted(spec)}").get("tokens", DECIDERS[name])
    if not tokens >= 0:
        raise PolicyError(f"decider {quoted(spec)}: tokens is {tokens}, expected at least 0")
    return float(tokens)
