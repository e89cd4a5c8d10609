"""A request as the engine sees it: what arrives, when, and how long it is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `index` is its place in the trace: it keys the request's draws and breaks ties."""

    index: int
    arrival: float  # s since the start of the run
    input_length: int  # prompt tokens
    output_length: int  # tokens of the answer, its EOS included
    max_tokens: int = 0  # limit that the request sets; 0: none
    canvas_length: int = 0  # requested length, if the policy allows one; 0, or above the policy's: the policy's
    estimate: int = 0  # estimated tokens of its answer; 0: its limit
    priority: int = 0  # as vLLM has it: the lower, the sooner
    deadline: float = math.inf  # s after its arrival by which its answer is wanted whole
    slo_class: str = ""
    read_only: bool = False  # it reads one denoising step of one canvas, which is not committed (/v1/decisions of vLLM)
    arrived: int = 0  # tokens with KV from a link; pages are reserved for them (`Engine.reserve`)
    upto: int = 0  # tokens of its answer after which it goes on elsewhere, all but the last block done; 0: it stays

    @property
    def limit(self) -> int:
        """Most tokens of its answer; an engine reserves memory for them."""
        return max(self.output_length, self.max_tokens)

    @property
    def expected(self) -> int:
        """Tokens of its answer that a router, or a policy that goes by length, expects."""
        return self.estimate or self.limit


def requests_of(columns: Mapping[str, Any], order: Any) -> Iterator[Request]:
    """The requests of a journal's columns, those of the rows `order`.

    A journal keeps no slo_class. Older ones lack max_tokens, `limited` and what stands after it. Without `limited`,
    limits were known if one exceeds its answer.
    """
    most = columns.get("max_tokens", columns["output_length"])
    limited = columns.get("limited", np.full(len(most), (most > columns["output_length"]).any()))
    widths = columns.get("canvas_length", np.zeros(len(most), np.int32))
    estimates = columns.get("estimate", most)
    deadline = columns.get("deadline", np.full(len(most), math.nan))
    wishes = columns.get("priority", np.zeros(len(most), np.int32)), np.where(np.isnan(deadline), math.inf, deadline)
    names = ("request", "arrival", "input_length", "output_length")
    held = [*(columns[name] for name in names), np.where(limited, most, 0), np.abs(widths), estimates, *wishes]
    none = np.zeros(len(most), np.int32)
    arrived, upto = (columns.get(name, none)[order].tolist() for name in ("arrived", "upto"))
    more = zip((widths < 0)[order].tolist(), arrived, upto, strict=True)
    rows = zip(*(column[order].tolist() for column in held), strict=True)
    for values, (read_only, tokens, end) in zip(rows, more, strict=True):
        request = Request(*values)
        if read_only or tokens or end:
            request = replace(request, read_only=read_only, arrived=tokens, upto=end)
        yield request
