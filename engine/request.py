"""A request as the engine sees it: what arrives, when, and how long it is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """`index` is its place in the trace: it keys the draws and breaks ties."""

    index: int
    arrival: float  # s since the run's start
    input_length: int  # prompt tokens
    output_length: int  # tokens of the answer, EOS included
    max_tokens: int = 0  # the request's limit; 0: none
    canvas_length: int = 0  # requested length, if allowed; 0 or more than the policy's: the policy's
    estimate: int = 0  # tokens of the answer; 0: its limit
    priority: int = 0  # lower is sooner, as in vLLM
    deadline: float = math.inf  # s after arrival, for the whole answer
    slo_class: str = ""
    read_only: bool = False  # reads one uncommitted denoising step of a canvas (vLLM's /v1/decisions)
    arrived: int = 0  # tokens with KV from a link, on reserved pages (`Engine.reserve`)

    @property
    def limit(self) -> int:
        """Most tokens of its answer, for which engines reserve memory."""
        return max(self.output_length, self.max_tokens)

    @property
    def expected(self) -> int:
        """Tokens of its answer that a router or a policy by length expects."""
        return self.estimate or self.limit


def requests_of(columns: Mapping[str, Any], order: Any) -> Iterator[Request]:
    """The requests of a journal's rows `order`.

    A journal keeps no slo_class.
    """
    limits, widths, deadline = (columns[name] for name in ("max_tokens", "canvas_length", "deadline"))
    wishes = columns["priority"], np.where(np.isnan(deadline), math.inf, deadline)
    names = ("request", "arrival", "input_length", "output_length")
    fields = [*(columns[name] for name in names), np.where(columns["limited"], limits, 0), np.abs(widths)]
    fields += [columns["estimate"], *wishes]
    arrived = columns.get("arrived", np.zeros(len(limits), np.int32))
    extras = zip((widths < 0)[order].tolist(), arrived[order].tolist(), strict=True)
    rows = zip(*(column[order].tolist() for column in fields), strict=True)
    for values, (read_only, tokens) in zip(rows, extras, strict=True):
        request = Request(*values)
        if read_only or tokens:
            request = replace(request, read_only=read_only, arrived=tokens)
        yield request
