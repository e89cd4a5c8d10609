"""Input and output lengths, drawn from a trace or from moments."""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..engine import chance
from ..engine.errors import TraceError
from ..files.read import cut, float_of
from .trace import MAX_LENGTH, Floats, Ints, Trace

Extras: TypeAlias = dict[str, list[Any]]

INPUT, OUTPUT, PAIR = range(3)


# Mean and standard deviation (tokens) of inputs, then of outputs, drawn independently.
Moments: TypeAlias = Sequence[float]

# Optimus, Table 2: workloads of papers on block diffusion, as log-normals.
LENGTHS: dict[str, Moments] = {
    "sharegpt": (213, 508, 321, 214),
    "lmsys": (89, 133, 183, 163),
    "longbench": (4015, 2057, 116, 138),
    "gsm8k": (89, 22, 175, 67),
    "humaneval": (172, 65, 103, 62),
    "mbpp": (155, 77, 49, 28),
    "ifeval": (58, 24, 281, 264),
}

FORMS = "fixed:IN,OUT, normal:MEAN,STD[,MEAN,STD], lognormal:MEAN,STD[,MEAN,STD]"
LIMIT = ",max_tokens="  # after any form: every request's limit


def draw_lengths(
    lengths: str | Trace, num_requests: int, seed: int, max_tokens: int | None = None
) -> tuple[Ints, Ints, Extras]:
    """Input and output lengths (at least 1), and limits if known; request i's depend on seed and i only.

    lengths: a trace to sample from with replacement, a name in LENGTHS, or one of FORMS. max_tokens: every
    request's limit, which cuts answers; by default a trace's requests keep theirs.
    """
    extras: Extras = {}
    if isinstance(lengths, Trace):
        u = chance.uniform(chance.key(seed, chance.LENGTH, PAIR, np.arange(num_requests)))
        drawn = lengths.take((u * len(lengths)).astype(np.int64), np.zeros(num_requests))  # with replacement
        num_input, num_output = drawn.input_length, drawn.output_length
        extras = {name: column for name, column in drawn.extras.items() if name == "max_tokens"}
    else:
        num_input, num_output = draw_pairs(lengths, num_requests, seed)
    if max_tokens is not None:
        return num_input, np.minimum(num_output, max_tokens), {"max_tokens": [max_tokens] * num_requests}
    return num_input, num_output, extras


def without_limit(text: str) -> tuple[str, int | None]:
    """Split `,max_tokens=N` off."""
    head, separator, limit = text.rpartition(LIMIT)
    if not separator:
        return text, None
    if not re.fullmatch("[0-9]{1,8}", limit) or not 1 <= int(limit) <= MAX_LENGTH:
        raise TraceError(f"lengths are {cut(text)}: max_tokens is {cut(limit)}, expected 1 to {MAX_LENGTH}")
    return head, int(limit)


def draw_pairs(lengths: str, num_requests: int, seed: int) -> tuple[Ints, Ints]:
    kind, moments = parse_lengths(lengths)
    draw = {"lognormal": lognormal}.get(kind, normal)
    columns = []
    for side, mean, std in ((INPUT, *moments[:2]), (OUTPUT, *moments[2:])):
        u = chance.uniform(chance.key(seed, chance.LENGTH, side, np.arange(num_requests)))
        columns.append(np.clip(np.rint(draw(u, mean, std)), 1, MAX_LENGTH).astype(np.int64))
    return columns[0], columns[1]


def parse_lengths(text: str) -> tuple[str, Moments]:
    """Of a name or form; `normal:512,256` is for inputs and outputs."""
    if text in LENGTHS:
        return "lognormal", LENGTHS[text]
    kind, _, values = text.partition(":")
    numbers = [float_of(value) for value in values.split(",")]
    if len(numbers) == 2 and kind in ("normal", "lognormal"):
        numbers *= 2
    if len(numbers) == 2 and kind == "fixed" and all(number % 1 == 0 for number in numbers):
        numbers = [numbers[0], 0.0, numbers[1], 0.0]
    elif len(numbers) != 4 or kind not in ("normal", "lognormal"):
        raise TraceError(
            f"lengths are {cut(text)}, expected one of: {', '.join(LENGTHS)}, {FORMS}; each may end in {LIMIT}N"
        )
    for mean, std in (numbers[:2], numbers[2:]):
        if not (1 <= mean <= MAX_LENGTH and 0 <= std <= MAX_LENGTH):
            problem = f"mean {mean:g} and std {std:g}"
            raise TraceError(f"lengths are {cut(text)}: {problem}, expected 1 to {MAX_LENGTH} and 0 to {MAX_LENGTH}")
    return kind, numbers


def normal(u: Floats, mean: float, std: float) -> Floats:
    """Possibly below 1."""
    from scipy.special import ndtri

    return mean + std * np.asarray(ndtri(u), np.float64)


def lognormal(u: Floats, mean: float, std: float) -> Floats:
    """Of this mean and standard deviation."""
    variance = math.log1p((std / mean) ** 2)
    return np.exp(normal(u, math.log(mean) - variance / 2, math.sqrt(variance)))
