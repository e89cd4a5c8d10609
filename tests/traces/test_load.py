"""Every loader against rows as the other tool writes them, and every kind of bad file."""

import numpy as np
import pytest

from dsim.traces import load

from ..checks import cases
from .files import refusal, rows_of, save

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951690,396,109\r\n"
    b"2023-11-16 18:15:51.2224670,879,55"
)
MOONCAKE = b"""\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""
AIPERF = b"""\
{"timestamp": 0, "input_length": 655, "output_length": 52, "session_id": "a"}
{"timestamp": 1000, "input_length": 3, "output_length": 26, "session_id": "b"}
"""
BURSTGPT_6 = b"""\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_8 = b"""\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log
"""
BASETEN = b"""\
timestamp_start_unix_ms,input_tokens,output_tokens,provided_session_id
1722400000000,100,20,s1
1722400000250,120,30,s2
"""


def row(timestamp: object = 0, input_length: object = 5, output_length: object = 7) -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": {output_length}}}\n'


@cases(
    "data format rows extras",
    (AZURE, "azure", [(0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)], {}),
    (MOONCAKE, "mooncake", [(0, 6955, 52), (3.053, 6472, 26)],
     {"hash_ids": [[46, 47, 2353, 2354], [46, 47, 2366]]}),
    (AIPERF, "mooncake", [(0, 655, 52), (1.0, 3, 26)], {"session_id": ["a", "b"]}),
    (BURSTGPT_6, "burstgpt", [(0, 472, 18), (40, 1087, 230), (113, 417, 276)],
     {"model": ["ChatGPT", "ChatGPT", "GPT-4"], "log_type": ["Conversation log"] * 3}),
    (BURSTGPT_8, "burstgpt", [(0, 906, 446), (51, 36, 29)],
     {"model": ["GPT-4", "ChatGPT"], "log_type": ["Conversation log"] * 2, "elapsed_time": ["43", "2"],
      "session_id": ["1722ac82-0a46-4bf0-aa08-89794e7a2b3f", "d5983bf9-4b48-497b-892b-a58995247443"]}),
    (BASETEN, "baseten", [(0, 100, 20), (0.25, 120, 30)], {"session_id": ["s1", "s2"]}),
)  # fmt: skip
def test_rows_of_other_tools_load_without_conversion(
    data: bytes, format: str, rows: list[tuple[float, int, int]], extras: dict[str, object]
) -> None:
    trace = load(save(data))
    assert trace.notes.format == format
    assert rows_of(trace) == rows
    assert trace.extras == extras
    assert trace.notes.num_rows == len(rows)


def test_a_doubtful_unit_is_doubted_unless_it_is_given() -> None:
    path = save(row(0.0, 256, 128) + row(0.4, 512, 64))
    in_ms = load(path)
    assert in_ms.arrival[1] == pytest.approx(0.0004)
    assert in_ms.notes.warnings == ("timestamp read as ms makes 2.5e+03 req/s: another --time-unit may be meant",)
    told = load(path, time_unit="s")
    assert (told.arrival[1], told.notes.warnings) == (0.4, ())
    slow = save(row(0) + row(999_000))
    assert load(slow).notes.warnings == ("timestamp read as ms makes 0.001 req/s: another --time-unit may be meant",)
    assert load(slow, time_unit="us").notes.warnings == ()


@cases(
    "second complaint",
    ('{"timestamp": 0, "input_length": 5', "malformed JSON (Expecting ',' delimiter at column 35)"),
    ("[1, 2]\n", "row is [1, 2], expected an object"),
    (row(output_length=-3), "output_length is -3, expected a whole number from 0 to 10000000"),
    (row(input_length=0), "input_length is 0, expected at least 1"),
    (row(input_length='"1_000"'), 'input_length is "1_000", expected a whole number from 0 to 10000000'),
    (row(input_length="true"), "input_length is true, expected a whole number from 0 to 10000000"),
    (row(input_length="NaN"), "input_length is missing, expected a whole number from 0 to 10000000"),
    (row(output_length=1.5), "output_length is 1.5, expected a whole number from 0 to 10000000"),
    (row(input_length=10_000_001), "input_length is 10000001, expected a whole number from 0 to 10000000"),
    (row(timestamp="1e20"), "timestamp is 1e+20, expected a number from 0 to 4611686018427387904"),
    (row(input_length="9" * 5000), "malformed JSON (Exceeds the limit"),
    ('{"timestamp": 0, "input_length": 5}\n', "output_length is missing, expected a whole number from 0 to 10000000"),
    (row()[:-2] + ', "hash_ids": 3}\n', "hash_ids is 3, expected a list"),
    ("[" * 100_000 + "\n", "malformed JSON (it is nested too deeply"),
)
def test_a_bad_line_is_named_and_can_be_skipped(second: str, complaint: str) -> None:
    path = save(row() + second.rstrip("\n") + "\n" + row(timestamp=9))
    assert refusal(path).startswith(f"{path}:2: {complaint}")
    trace = load(path, skip_bad=True)
    assert rows_of(trace) == [(0, 5, 7), (0.009, 5, 7)]
    assert (trace.notes.num_skipped, trace.notes.num_rows) == (1, 3)


@cases(
    "second complaint",
    ("45,ChatGPT,1087", "row has 3 fields, expected 6"),
    ('45,"ChatGPT"x,1087,230,1317,log', "malformed CSV (',' expected after '\"'), expected 6 fields"),
    ("45,ChatGPT,10.5,230,1317,log", 'Request tokens is "10.5", expected a whole number'),
)
def test_a_bad_csv_row_is_named_and_can_be_skipped(second: str, complaint: str) -> None:
    header, first, _, last = BURSTGPT_6.decode().splitlines()
    # A blank line does not count as a row, but does as a line.
    for rest, kept in (([second], [(0, 472, 18)]), ([second, last], [(0, 472, 18), (113, 417, 276)])):
        path = save("\n".join([header, first, "", *rest]))
        assert refusal(path).startswith(f"{path}:4: {complaint}")
        trace = load(path, skip_bad=True)
        assert (rows_of(trace), trace.notes.num_skipped) == (kept, 1)


@cases(
    "data complaint",
    (b" \n", " is empty, expected a trace"),
    (bytes(range(256)), " is a binary file, expected CSV"),
    (b"PAR1 and nothing more", ": cannot be read as Parquet: "),
    (b"TIMESTAMP,ContextTokens\n\xff\n", ":2: byte 0xff is no UTF-8"),
    (AZURE.split(b"\r\n")[0], " holds no rows"),
    (b"a,b\n1,2\n", ":1: keys a, b are of no known trace, expected one of: mooncake (timestamp, input_length, "),
    (row(output_length=0).encode(), ": none of 1 rows is a request (0 bad, 1 without output)"),
)
def test_a_file_that_is_no_trace_is_refused(data: bytes, complaint: str) -> None:
    path = save(data)
    assert refusal(path).startswith(f"{path}{complaint}")
    assert refusal(".") == ".: is a directory, expected a file"


def test_the_refusal_of_a_load_generators_results_names_the_command_that_reads_them() -> None:
    path = save(b'{"metadata": {"session_num": 0}, "metrics": {}}')
    assert refusal(path).endswith("`dsim import` reads a load generator's results")


@cases(
    "how complaint",
    ({"time_unit": "min"}, "time unit is min, expected one of: s, ms, us, ns"),
    ({"time_unit": "s"}, "is a date and time, expected no --time-unit"),
)
def test_unknown_units_formats_and_names_are_refused(how: dict[str, str], complaint: str) -> None:
    assert complaint in refusal(save(AZURE), **how)
    assert refusal("azure").startswith("no trace file azure (did you mean azure-conv?), expected a file or a shipped")


def test_unsorted_rows_are_sorted_stably_and_counted() -> None:
    times = [5, 1, 5, 1, 9]
    trace = load(save("".join(row(t, i + 1) for i, t in enumerate(times))))
    assert rows_of(trace) == [(0, 2, 7), (0, 4, 7), (0.004, 1, 7), (0.004, 3, 7), (0.008, 5, 7)]
    assert trace.notes.num_unsorted == 2
    assert trace.notes.warnings[-1] == "2 rows were out of order and have been sorted"


def test_quoted_fields_and_a_byte_order_mark_load() -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    data = f'\ufeff{header}\n5,"Chat\nGPT, v4",472,18,490,"a ""b"""\n'
    assert load(save(data)).extras == {"model": ["Chat\nGPT, v4"], "log_type": ['a "b"']}
    path = save(data + "9,x,-1,1,1,y\n")
    assert refusal(path).startswith(f"{path}:4: ")


def test_shipped_traces_have_the_published_figures() -> None:
    azure = load("azure-conv")
    assert (len(azure), azure.notes.format) == (19_366, "azure")
    assert azure.duration == pytest.approx(3501.721937, abs=1e-6)
    assert np.percentile(azure.input_length, (50, 90, 99)).round().tolist() == [1020, 2734, 4142]
    assert np.percentile(azure.output_length, (50, 90, 99)).round().tolist() == [129, 424, 601]
    mooncake = load("mooncake-conv")
    assert (len(mooncake), "hash_ids" in mooncake.extras) == (5_719, True)
    assert mooncake.input_length.mean() == pytest.approx(12_870, abs=1)
    assert mooncake.output_length.mean() == pytest.approx(346, abs=1)
    assert (mooncake.input_length > 4096).mean() == pytest.approx(0.68, abs=0.005)
    assert azure.notes.warnings == mooncake.notes.warnings == ()


def test_a_file_goes_before_a_shipped_name() -> None:
    save(BASETEN, "azure-conv")
    assert load("azure-conv").notes.format == "baseten"


def test_where_a_request_of_a_step_log_ended_early_lengths_that_were_asked_for_are_limits() -> None:
    asked = [{"kind": "request", "request": i, "input_length": 7, "output_length": 4, "arrival": 0.5} for i in (0, 1)]
    lines = [
        {"schema": "dsim-steplog", "version": 1}, *asked, {"kind": "step", "requests": [0, 1], "emitted": [3, 4]},
        *({"kind": "finish", "request": i, "time": 1.0} for i in (0, 1)),
    ]  # fmt: skip
    trace = load(save(lines))
    assert (trace.output_length.tolist(), trace.max_tokens.tolist()) == ([3, 4], [4, 4])
    full = [*lines[:3], {"kind": "step", "requests": [0, 1], "emitted": 4}, *lines[4:]]  # one value is of all rows
    assert "max_tokens" not in load(save(full)).extras


def test_a_step_log_is_the_trace_of_its_requests() -> None:
    lines: list[dict[str, object]] = [
        {"schema": "dsim-steplog", "version": 1},
        {"kind": "request", "request": 0, "id": "a", "input_length": 7, "output_length": 3, "arrival": 2.5},
        {"kind": "step", "step": 0, "latency": 0.1, "batch": 1, "tokens": 7, "sum_kv": 7},
        {"kind": "request", "request": 1, "id": "b", "input_length": 5, "output_length": 4, "arrival": 3.25,
         "diffusion_max_steps": 6},
    ]  # fmt: skip
    trace = load(save(lines))
    assert (rows_of(trace), trace.notes.format) == ([(0.0, 7, 3), (0.75, 5, 4)], "steplog")
    assert trace.extras["diffusion_max_steps"] == [None, 6]
    assert "none of 0 rows is a request" in refusal(save(lines[:1]))
    bad = save([lines[0], {"kind": "request", "input_length": 5}])
    assert refusal(bad).startswith(f"{bad}:2: arrival is missing")
