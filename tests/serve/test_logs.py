"""What a server writes while it runs: step logs and access logs."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.errors import DsimError
from dsim.profiler.steplog import read_log
from dsim.serve.access import AccessLog
from dsim.serve.open import Behind
from dsim.traces import load

from .serving import Running, serving, until
from .twins import CHUNK


def ask_many(server: Running, count: int = 24) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (count, 2)).tolist()
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda n: server.complete(prompt=[0] * n[0], max_tokens=n[1]), lengths)
        assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize(
    "policy",
    [
        CHUNK,
        "sglang-fdfo,max_running_requests=4,block_length=4,num_pages=64",
        "lmdeploy-bd32,max_batch=4,page_size=8,block_length=4,num_pages=64",
    ],
)
def test_a_step_log_holds_the_journals_steps_and_requests(
    twin: Callable[..., Behind], tmp_path: Path, policy: str
) -> None:
    behind = twin(policy=policy, speed=5.0, step_log=str(tmp_path / "steps.jsonl"))
    with serving(behind) as server:
        ask_many(server)
    log, table, totals = read_log(tmp_path / "steps.jsonl"), behind.columns(), server.totals
    assert totals is not None
    assert log.header.preset == policy.split(",")[0].split(":")[0]
    assert log.header.num_pages == 64
    assert len(log.rows) == totals.num_decode_steps + totals.num_prefill_steps
    assert log.steps.latency.sum() == pytest.approx(totals.prefill_time + totals.decode_time)
    assert np.bincount(log.rows.request, log.rows.emitted).astype(int).tolist() == table["num_tokens"].tolist()
    assert len(log.commits.request) > 0
    trace = load(tmp_path / "steps.jsonl")
    assert sorted(trace.output_length.tolist()) == sorted(table["output_length"].tolist())


def test_each_replica_has_a_step_log_of_its_own(twin: Callable[..., Behind], tmp_path: Path) -> None:
    with pytest.raises(
        DsimError, match=r"^--step-log is .*/a.jsonl and --replicas is 2, expected {replica} in the name"
    ):
        twin(replicas=2, step_log=str(tmp_path / "a.jsonl"))
    behind = twin(replicas=2, step_log=str(tmp_path / "{replica}.jsonl"))
    with serving(behind) as server:
        ask_many(server, 6)
        until(lambda: (tmp_path / "0.jsonl").read_text().count("finish") == 3)  # before the server ends
    numbers = [set(read_log(tmp_path / f"{r}.jsonl").rows.request.tolist()) for r in (0, 1)]
    assert [len(own) for own in numbers] == [3, 3]
    with pytest.raises(DsimError, match=r"0.jsonl exists: choose another name, or pass --force to replace it$"):
        twin(replicas=2, step_log=str(tmp_path / "{replica}.jsonl"))


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
