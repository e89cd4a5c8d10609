"""Files of public tools, made small: each is read right, or refused for the right reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsim.comparison.clients.client_file import read_client
from dsim.files.metrics_text import read_samples
from dsim.following.sources.engines import sample_of
from dsim.traces import describe, load

from ..checks import cases, refused
from .files import refusal, rows_of, save, spend

MINE = "arrival=t,input=p,output=c"
LANGFUSE = "id,type,t,u\n1,SPAN,2026-03-01T10:00:00Z,{}\n" + "".join(
    f'{i},GENERATION,2026-03-01T10:00:0{i}Z,"{{""in"": 10{i}, ""out"": 2{i}}}"\n' for i in (2, 5)
)
STATUS = ("200.0", "succeeded", "stop", "200 OK", "STATUS_CODE_OK", "odd", "abort", "499", "timed_out")
KINDS = ("chat", "arerank", "image_generation", "_arealtime")
CELLS = [f"5,3,{word}," for word in STATUS] + [f"5,3,ok,{kind}" for kind in KINDS] + [",,429,"]
LOG = "t,p,c,s,k\n" + "".join(f"{i},{cells}\n" for i, cells in enumerate(CELLS))
EPOCH = [{"timestamp": 1772359200 + 2 * i, "input_length": 7, "output_length": 5} for i in range(3)]
IN_MS = "t,p,c\n1772359200000,7,5\n1772359200050,7,5\n1772359200100,7,5\n"
TICKS = {"request_received_ts": 5.0, "request_finished_ts": 6.5, "first_token_latency": 0.5}
SGLANG = TICKS | {"prompt_tokens": 7, "completion_tokens": 3, "finish_reason": {"type": "stop"}}
TIMES = {"timestamp_start_unix_ms": 1772359200000, "timestamp_end_unix_ms": 1772359202300}
BASETEN = TIMES | {"timestamp_ttft_unix_ms": None, "input_tokens": 7, "output_tokens": 5, "request_canceled": 0}
MOONCAKE = {"timestamp": 5, "input_length": 7, "output_length": 5}
MEASURED = {"measured_ttft": 0.2, "measured_e2el": 0.5}
OPENAI = {"id": "a", "created": 1772359200, "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


@cases(
    "data how rows failed says",
    (EPOCH, {"time_unit": "s"}, [(0, 7, 5), (2, 7, 5), (4, 7, 5)], 0, ""),
    (IN_MS, {"columns": MINE, "time_unit": "ms"}, [(0, 7, 5), (0.05, 7, 5), (0.1, 7, 5)], 0, ""),
    ("t;p;c\n2026-03-01T10:00:00Z;7;5\n2026-03-01T10:00:02;7;5\n", {"columns": MINE}, [(0, 7, 5), (2, 7, 5)], 0,
     ""),
    (LOG, {"columns": f"{MINE},status=s,kind=k"}, [(i, 5, 3) for i in (0, 1, 2, 3, 4, 5, 9)], 4,
     "3 of 14 rows are no requests for text"),
    (LOG, {"columns": f"{MINE},kind=k", "only": "s=odd"}, [(0, 5, 3)], 0, "3 of 14 rows are no requests for text"),
    ([SGLANG, SGLANG | {"finish_reason": {"type": "abort"}}], {}, [(0, 7, 3)], 1, ""),
    ([BASETEN, BASETEN | {"request_canceled": 1}], {}, [(0, 7, 5)], 1, ""),
    ([OPENAI | {"choices": [{"finish_reason": word}]} | {"id": word} for word in ("stop", "abort")], {},
     [(0, 7, 5)], 1, ""),
    ([MOONCAKE | MEASURED, MOONCAKE | MEASURED | {"measured_e2el": 0.1}], {"skip_bad": True}, [(0, 7, 5)], 0, ""),
    (IN_MS, {"columns": MINE, "time_unit": "s"}, [(0, 7, 5), (50, 7, 5), (100, 7, 5)], 0, ""),
    ([spend("00", "01", "02", status=None, metadata={"status": word}) for word in ("success", "failure")], {},
     [(0, 20, 11)], 1, ""),
    (LANGFUSE, {"columns": "arrival=t,input=u.in,output=u.out", "only": "type=GENERATION"},
     [(0, 102, 22), (3, 105, 25)], 0, ""),
    ('t,path,p,c\n1,/v1,7,5\n3,/v1,7,5\n9,/health,-,-\n', {"columns": MINE, "only": "path=/v1"},
     [(0, 7, 5), (2, 7, 5)], 0, ""),
    ("t,p,c\n,7,5\n2026-03-01T10:00:01Z,7,5\n", {"columns": MINE, "skip_bad": True}, [(0, 7, 5)], 0, ""),
    ('{"t": 1, "p": 7, "c": {"x": {"y": 5}}}\n', {"columns": "arrival=t,input=p,output=c.x.y"},
     [(0, 7, 5)], 0, ""),
)  # fmt: skip
def test_a_file_of_another_tool_is_the_requests_that_it_holds(
    data: Any, how: dict[str, Any], rows: list[tuple[float, int, int]], failed: int, says: str
) -> None:
    trace = load(save(data), **how)
    assert (rows_of(trace), trace.notes.failed_in_trace) == (rows, failed)
    assert (says in "; ".join(trace.notes.warnings)) if says else trace.notes.warnings == ()
    assert describe(trace)["cv"] in (0, None) or len(rows) > 3


def test_a_page_of_one_engine_counts_its_ranks_once_and_one_of_two_models_is_refused() -> None:
    ranks = [f'sglang:num_running_reqs{{model_name="m",tp_rank="{rank}"}} 4.0\n' for rank in (0, 1)]
    page = sample_of("".join(ranks), 0.0, "page")
    assert (page.gauges["running"], page.num_engines) == (4.0, 1)
    path = save('vllm:x{model_name="a"} 1 # {trace_id="c"} 0.6 17.1\n')
    assert read_samples(path) == {"vllm:x": 1.0}
    with refused(r"the metrics of 2 models \(a, b\), expected one"):
        read_samples(save(path.read_text() + 'vllm:x{model_name="b"} 1\n'))


def test_the_requests_of_a_run_are_a_trace() -> None:
    run = {"policy": list("aab"), "arrival": [0.0, 1.5, 0.0], "input_length": [7, 8, 9], "output_length": [5, 6, 7],
           "max_tokens": [5, 6, 9], "limited": [False, False, True], "deadline": [None, 2.0, None]}  # fmt: skip
    pd.DataFrame(run).to_parquet(Path("requests.parquet"))
    assert "expected those of one: --only policy=NAME" in refusal(Path("requests.parquet"))
    trace = load("requests.parquet", only="policy=a")
    assert (rows_of(trace), trace.extras) == ([(0, 7, 5), (1.5, 8, 6)], {"deadline": [None, 2.0]})
    table = pa.table(dict.fromkeys(("arrival", "input_length", "output_length"), np.ones(7_000_000, np.int8)))
    pq.write_table(table, Path("r.parquet"))
    assert "holds 21000000 values, expected at most 20000000" in refusal(Path("r.parquet"))


FIGURES = {
    "request_latency": 4000.0, "time_to_first_token": 600.0, "inter_chunk_latency": [1700.0, 1700.0],
    "usage_prompt_tokens": 550, "usage_completion_tokens": 768, "input_sequence_length": 540,
    "output_sequence_length": 760,
}  # fmt: skip
BENCH = {
    "completed": 2, "total_output_tokens": 6, "input_lens": [10, 30], "output_lens": [3, 3], "ttfts": [0.2, 0.5],
    "itls": [[0.1, 0.1], [0.25, 0.25]], "errors": ["", ""],
}  # fmt: skip
TIMINGS = {"request_start": 9.0, "first_token_iteration": 9.2, "last_token_iteration": 9.6, "token_iterations": 3}
GUIDE = {"prompt_tokens": 10, "output_tokens": 3, "request_latency": 0.65, "info": {"timings": TIMINGS}}
OLD_GUIDE = GUIDE | {"start_time": 9.0, "first_token_time": 9.2, "last_token_time": 9.6, "info": {}}
WHOLE = GUIDE | {"prompt_tokens": None, "info": {"timings": {"request_start": 9.5}}}


def aiperf(*without: str) -> dict[str, Any]:
    metrics = {name: {"value": value} for name, value in FIGURES.items() if name not in without}
    return {"metadata": {"request_start_ns": 10**12}, "metrics": metrics}


def guide(*each: dict[str, Any]) -> dict[str, Any]:
    return {"benchmarks": [{"requests": {"successful": [row]}} for row in each]}


@cases(
    "data rows says",
    ([aiperf()], [(0.6, 4.0, 550, 768)], ""),
    ([aiperf("usage_prompt_tokens", "usage_completion_tokens")], [(0.6, 4.0, 540, 760)],
     "1 of 1 requests have no usage: their token counts are the client's"),
    ([aiperf(), aiperf("time_to_first_token", "inter_chunk_latency")],
     [(0.6, 4.0, 550, 768), (None, 4.0, 550, 768)], "1 of 2 answers have no time of their first token"),
    ([BENCH | {"start_times": [1.0, 2.0]}], [(0.2, 0.4, 10, 3), (0.5, 1.0, 30, 3)], ""),
    ([BENCH], [(0.2, 0.4, 10, 3), (0.5, 1.0, 30, 3)], ""),
    ([guide(GUIDE)], [(0.2, 0.6, 10, 3)], ""),
    ([guide(OLD_GUIDE)], [(0.2, 0.6, 10, 3)], ""),
    ([guide(WHOLE)], [(None, 0.65, 0, 3)], "1 of 1 requests have no count of prompt tokens"),
    ([SGLANG], [(0.5, 1.5, 7, 3)], ""),
)  # fmt: skip
def test_a_load_generators_requests_have_the_times_that_the_file_has(
    data: list[Any], rows: list[tuple[Any, ...]], says: str
) -> None:
    log = read_client(save(data))
    found = [(s.first - s.sent, s.last - s.sent, s.input_length, s.output_length) for s in log.requests]
    expected = [(float("nan") if value is None else value for value in row) for row in rows]
    assert [pytest.approx(tuple(row), nan_ok=True) for row in expected] == found
    assert (says in "; ".join(log.warnings)) if says else log.warnings == ()


@cases(
    "data says",
    ([BENCH, BENCH], "holds 2 benchmarks, expected 1: a file for each"),
    ([guide(GUIDE, GUIDE)], "holds 2 benchmarks, expected 1: a file for each"),
    ([BENCH | {"ttfts": [-1.0, 0.5]}], "request 0: ttfts is -1.0, expected a number from 0"),
    ([BENCH | {"output_lens": [True, 3]}], "request 0: output_lens is true, expected a whole number from 0"),
    ([SGLANG | {"first_token_latency": 4.0}], "first_token_latency is 4 s and request_finished_ts 1.5 s after"),
    ([BENCH | {"itls": [[0.1], [-0.25]]}], "request 1: itls[0] is -0.25, expected a number from 0"),
    ([BENCH | {"start_times": [1.0, 1.0], "latencies": [0.1, 2.0]}],
     "request 0: ttfts is 0.2 s and latencies 0.1 s after start_times, expected the first token from there on"),
)  # fmt: skip
def test_a_file_that_cannot_be_a_run_is_named(data: Any, says: str) -> None:
    with refused(says=says):
        read_client(save(data))
