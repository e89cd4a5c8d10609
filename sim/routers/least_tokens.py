"""Least tokens: the replica with the least work left."""

from .router import Router


class LeastTokens(Router):
    """The fewest tokens to prefill or expected to be returned; the first of equals."""

    least = ("expected_tokens",)
    goes_by_length = True
