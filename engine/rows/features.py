"""A step's rows, and the features they add up to."""

from typing import NamedTuple

from ..jit import rule
from ..state import PREFILL, Replica, Sequence


class Sums(NamedTuple):
    tokens: int
    prompt_tokens: int  # of rows that prefill
    qk_pairs: int
    keys: int
    head_rows: int  # through the LM head
    sampled_rows: int  # ... through soft-max and sampling


@rule
def no_rows() -> Sums:
    return Sums(tokens=0, prompt_tokens=0, qk_pairs=0, keys=0, head_rows=0, sampled_rows=0)


@rule
def note_row(sequence: Sequence, phase: int, tokens: int, keys: int) -> None:
    sequence.phase = phase
    sequence.num_tokens = tokens
    sequence.num_keys = keys
    sequence.num_retained = tokens


@rule
def add_row(sums: Sums, sequence: Sequence, qk_pairs: int, head_rows: int, sampled_rows: int) -> Sums:
    tokens = int(sequence.num_tokens)
    return Sums(
        tokens=sums.tokens + tokens,
        prompt_tokens=sums.prompt_tokens + (tokens if sequence.phase == PREFILL else 0),
        qk_pairs=sums.qk_pairs + qk_pairs,
        keys=sums.keys + int(sequence.num_keys),
        head_rows=sums.head_rows + head_rows,
        sampled_rows=sums.sampled_rows + sampled_rows,
    )


@rule
def set_features(replica: Replica, sums: Sums, chunk: int) -> None:
    """Set the step's features: one forward, no eviction, unless changed later."""
    counters = replica.counters
    counters.tokens = sums.tokens
    counters.prefill_tokens = sums.prompt_tokens
    counters.sum_q_kv = sums.qk_pairs
    counters.sum_kv = sums.keys
    counters.head_rows = sums.head_rows
    counters.sampled_rows = sums.sampled_rows
    counters.chunk = chunk
    counters.batch = counters.num_rows
    counters.num_forwards = 1
    counters.continues = False
    counters.first_tokens = 0
    counters.evicting = False
