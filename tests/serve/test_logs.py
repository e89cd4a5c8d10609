"""What a server writes while it runs: an access log."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dsim.serve.access import AccessLog
from dsim.serve.open import Behind
from dsim.traces import load

from .serving import Running, serving


def ask_many(server: Running, count: int = 24) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (count, 2)).tolist()
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda n: server.complete(prompt=[0] * n[0], max_tokens=n[1]), lengths)
        assert {reply.status for reply in replies} == {200}


def test_an_access_log_is_a_trace(twin: Callable[..., Behind], tmp_path: Path) -> None:
    behind = twin(speed=5.0)
    behind.fleet.access = AccessLog(tmp_path / "access.jsonl", behind.fleet.clock.opened)
    with serving(behind) as server:
        ask_many(server)
        gone = server.begin(prompt=[0], max_tokens=200, stream=True)
        assert gone.getresponse().readline().startswith(b"data: ")
        gone.close()
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    table = behind.columns()
    done = sorted((line for line in lines if line["status"] == "completed"), key=lambda line: int(line["id"]))
    assert [line["output_length"] for line in done] == table["num_tokens"][:24].tolist()
    for name, column in (("measured_ttft", "first_emission"), ("measured_e2el", "finish")):
        waited = table[column][:24] - table["arrival"][:24]
        assert [line[name] for line in done] == pytest.approx(waited.tolist())
    assert {line["status"] for line in lines} <= {"completed", "cancelled"}
    assert [line["arrival"] for line in done] == pytest.approx(
        (table["arrival"][:24] + behind.fleet.clock.opened).tolist()
    )
    trace = load(tmp_path / "access.jsonl")
    order = np.argsort([int(name) for name in trace.extras["id"]])
    assert trace.input_length[order].tolist() == table["input_length"].tolist()
    assert trace.arrival[order] == pytest.approx(table["arrival"] - table["arrival"][0], abs=1e-6)
    assert trace.extras["measured_ttft"][order[0]] == pytest.approx(table["first_emission"][0] - table["arrival"][0])
