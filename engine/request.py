"""A request as the engine sees it: what arrives, when, and how long it is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    estimate: int = 0  # tokens of the answer; 0: its limit
    priority: int = 0  # lower is sooner, as in vLLM
    deadline: float = math.inf  # s after arrival, for the whole answer
    slo_class: str = ""
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
    names = ("request", "arrival", "input_length", "output_length", "max_tokens", "estimate", "priority", "deadline")
    fields = {name: columns[name] for name in names}
    fields["max_tokens"] = np.where(columns["limited"], columns["max_tokens"], 0)
    fields["deadline"] = np.where(np.isnan(columns["deadline"]), math.inf, columns["deadline"])
    fields["arrived"] = columns.get("arrived", np.zeros(len(columns["request"]), np.int32))
    fields["index"] = fields.pop("request")
    for values in zip(*(column[order].tolist() for column in fields.values()), strict=True):
        yield Request(**dict(zip(fields, values, strict=True)))
