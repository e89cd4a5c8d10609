"""The journal: what every step planned and what came of it, as columns that either driver writes and any tool reads.

requests.parquet holds one row a request, steps.parquet one row a step. Times are seconds since the start of the run.
"""

from dataclasses import dataclass, field

import numpy as np

STATUSES = ("completed", "rejected", "unfinished")

# One row a request, in the trace's order. NaN where the event never happened, -1 where no replica was chosen.
REQUEST_COLUMNS: dict[str, str] = {
    "request": "int32",  # index in the trace
    "replica": "int16",
    "status": "uint8",  # index into STATUSES
    "arrival": "float64",
    "input_length": "int32",
    "output_length": "int32",  # tokens asked for
    "scheduled": "float64",  # start of its first prefill
    "first_commit": "float64",  # end of the step that first committed one of its positions
    "first_block": "float64",  # first whole block ready
    "first_emission": "float64",
    "last_emission": "float64",
    "finish": "float64",
    "num_first": "int32",  # tokens in the first emission
    "num_tokens": "int32",  # tokens returned
    "num_emissions": "int32",
    "num_forwards": "int32",  # decode forwards it took part in
    "num_committed": "int32",  # positions committed, prefill's and the trimmed tail's included
    "num_computed": "int64",  # token positions computed in decode steps
    "num_preemptions": "int32",
}
