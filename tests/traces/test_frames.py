"""Traces from pandas frames and into them."""

from typing import Any

import numpy as np
import pandas as pd

from dsim.traces import Trace, load

from ..checks import cases
from .files import refusal

OURS = {"arrival": [0.0, 0.25, 1.5], "input_length": [100, 200, 300], "output_length": [10, 20, 30]}


def test_a_trace_comes_back_from_its_frame_bit_for_bit() -> None:
    trace = load("mooncake-conv")
    frame = trace.to_frame()
    assert list(frame.columns) == ["arrival", "input_length", "output_length", *trace.extras]
    back = load(frame)
    for name in ("arrival", "input_length", "output_length"):
        assert np.array_equal(getattr(back, name), getattr(trace, name))
    assert (back.extras, back.name, back.notes.format) == (trace.extras, "frame", "dsim")
    extras = {"max_tokens": [None, 20, 40], "session_id": ["a", None, 3]}
    assert load(Trace("t", *(np.array(column) for column in OURS.values()), extras).to_frame()).extras == extras
    assert load(pd.DataFrame(OURS | {"max_tokens": [np.nan, 20.0, 40.0]})).extras == {"max_tokens": [None, 20, 40]}


@cases(
    "columns own",
    ({"timestamp": [0, 250, 1500], "input_length": [100, 200, 300], "output_length": [10, 20, 30]}, None),
    (OURS | {"arrival": pd.Timestamp("2026-01-01") + pd.to_timedelta([0, 0.25, 1.5], unit="s")}, None),
    (OURS | {"arrival": pd.to_datetime([10**9, 125 * 10**7, 25 * 10**8], utc=True)}, None),
    (OURS | {"arrival": pd.to_timedelta([5, 5.25, 6.5], unit="s")}, None),
    ({"t": pd.to_datetime([0, 25 * 10**7, 15 * 10**8]), "p": [100, 200, 300], "o": [10, 20, 30]},
     "arrival=t,input=p,output=o"),
    ({"created": [7.0, 7.25, 8.5], "usage.prompt_tokens": [100, 200, 300], "usage.completion_tokens": [10, 20, 30]},
     None),
)  # fmt: skip
def test_a_frame_is_of_any_known_format_or_of_columns_that_are_named(columns: dict[str, Any], own: str | None) -> None:
    # An index of the frame's own says nothing.
    trace = load(pd.DataFrame(columns).set_axis([9, 9, 4]), columns=own)
    assert (trace.arrival.tolist(), trace.input_length.tolist()) == ([0.0, 0.25, 1.5], [100, 200, 300])
    assert trace.output_length.tolist() == [10, 20, 30]


@cases(
    "change said",
    ({"input_length": [100, -3, 300]}, "frame.iloc[1]: input_length is -3, expected a whole number from 0 "),
    ({"output_length": [10, 20, None]}, "frame.iloc[2]: output_length is missing, expected a whole number from"),
    ({"arrival": pd.to_datetime(["2026-01-01", None, "2026-01-01"])}, "frame.iloc[1]: arrival is "),
    ({"max_tokens": [None, 5, None]}, "the frame: frame: max_tokens of row 1 is 5, expected 20 "),
    ({"policy": ["a", "b", "a"]}, "the frame holds the requests of 2 policies (a, b), expected those of one"),
)  # fmt: skip
def test_a_bad_value_or_frame_is_one_line(change: dict[str, Any], said: str) -> None:
    assert refusal(pd.DataFrame(OURS | change)).startswith(said)
    if "iloc" in said:
        trace = load(pd.DataFrame(OURS | change), skip_bad=True)
        assert (len(trace), trace.notes.num_skipped) == (2, 1)
    for frame, complaint in (
        (pd.DataFrame(OURS).head(0), "the frame has 0 rows of arrival, input_length, output_length, expected some"),
        (pd.DataFrame({"prompt": [1]}), "the frame: keys prompt are of no known trace, expected one of: "),
        (
            pd.DataFrame([[1, 2]], columns=["arrival", "arrival"]),
            "the frame has 1 rows of arrival, arrival, expected some, and each column once",
        ),
    ):
        assert refusal(frame).startswith(complaint)
