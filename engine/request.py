"""A request as the engine sees it: what arrives, when, and how long it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `index` is its place in the trace: it keys the request's draws and breaks ties."""

    index: int
    arrival: float  # s since the start of the run
    input_length: int  # prompt tokens
    output_length: int  # max_new_tokens: exactly so many are returned unless the run stops at EOS
