"""What a server writes while it runs: step logs, access logs, message streams, and its settings."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from dsim.engine.errors import DsimError
from dsim.profiler.steplog import read_log
from dsim.serve.access import AccessLog
from dsim.serve.open import Behind, Outputs
from dsim.traces import load

from ..held_up import PATIENCE
from .gate import Gate
from .serving import Running, serving, until
from .twins import CHUNK, SLOW


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
    behind = twin(policy=policy, speed=5.0, outputs=Outputs(str(tmp_path / "steps.jsonl")))
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
        twin(replicas=2, outputs=Outputs(str(tmp_path / "a.jsonl")))
    behind = twin(replicas=2, outputs=Outputs(str(tmp_path / "{replica}.jsonl")))
    with serving(behind) as server:
        ask_many(server, 6)
        until(lambda: (tmp_path / "0.jsonl").read_text().count("finish") == 3)  # before the server ends
    numbers = [set(read_log(tmp_path / f"{r}.jsonl").rows.request.tolist()) for r in (0, 1)]
    assert [len(own) for own in numbers] == [3, 3]
    with pytest.raises(DsimError, match=r"0.jsonl exists: choose another name, or pass --force to replace it$"):
        twin(replicas=2, outputs=Outputs(str(tmp_path / "{replica}.jsonl")))


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


class Scheduled(msgspec.Struct, frozen=True):
    """As the field names of SGLang 0.5.23's forward_pass_metrics.py."""

    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float


class Queued(msgspec.Struct, frozen=True):
    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    worker_id: str
    dp_rank: int
    counter_id: int
    wall_time: float
    scheduled_requests: Scheduled
    queued_requests: Queued


class SglangStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """As SGLang 0.5.23's disaggregation/kv_events.py, without the fields that it omits at their defaults."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class SglangRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class BlockStored(SglangStored, tag="BlockStored", forbid_unknown_fields=True):
    """As vLLM 0.33.0's kv_events.py, whose first seven fields have no defaults."""

    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(SglangRemoved, tag="BlockRemoved", forbid_unknown_fields=True):
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class SglangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[SglangStored | SglangRemoved | AllBlocksCleared]
    attn_dp_rank: int


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int


def heard(address: str) -> Any:
    """A subscriber to all messages of an address."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    return socket


def messages(socket: Any, kind: Any, count: int) -> list[tuple[int, Any]]:
    """The number and the content of each of the next messages."""
    found = []
    for _ in range(count):
        assert socket.poll(1000 * PATIENCE)
        topic, number, payload = socket.recv_multipart()
        assert topic == b""
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=kind)))
    return found


@pytest.mark.parametrize("policy", ["sglang-fdfo,max_running_requests=4,block_length=4,num_pages=64", "ar:4"])
def test_a_forward_pass_is_a_message_as_sglangs(
    twin: Callable[..., Behind], gate: Gate, tmp_path: Path, policy: str
) -> None:
    gate.subscribers = 1
    base = f"ipc://{tmp_path}/fpm"
    behind = twin(policy=policy, outputs=Outputs(forward_pass_metrics=base))
    socket = heard(f"{base}.0")
    with serving(behind) as server:
        assert socket.poll(1000 * PATIENCE)  # an idle engine's, once a second
        ask_many(server)
    sent = messages(socket, Forward, gate.sent)
    socket.close(0)
    totals = server.totals
    assert totals is not None
    numbers = [number for number, _ in sent]
    assert numbers == list(range(numbers[0], numbers[0] + len(sent)))
    assert [m.counter_id for _, m in sent] == numbers
    busy = [m for _, m in sent if m.wall_time]
    assert len(busy) == totals.num_prefill_steps + totals.num_decode_steps
    assert sum(m.wall_time for m in busy) == pytest.approx(totals.prefill_time + totals.decode_time)
    rows = [m.scheduled_requests for m in busy]
    by_token = policy.startswith("ar")
    assert any(row.num_decode_requests for row in rows) is by_token
    if not by_token:
        assert sum(row.sum_prefill_tokens for row in rows) >= totals.tokens
    assert max(m.queued_requests.num_prefill_requests for m in busy) > 0


def test_kv_events_are_what_the_prefix_cache_holds(twin: Callable[..., Behind], gate: Gate, tmp_path: Path) -> None:
    gate.subscribers = 1
    base = f"ipc://{tmp_path}/kv"
    policy = "vllm-diffusion,canvas_length=8,max_num_seqs=2,num_pages=40,prefix_caching=true"
    behind = twin(policy=policy, outputs=Outputs(kv_events=base))
    socket = heard(f"{base}.0")
    page = behind.fleet.engines[0].policy.memory.page_size
    with serving(behind) as server:
        for i in range(24):  # 4 pages each, of which the first two are the same
            prompt = [1] * (2 * page) + [i] * (2 * page)
            assert server.complete(prompt=prompt, max_tokens=4).status == 200
        assert server.complete(prompt=prompt, max_tokens=4).status == 200
    sent = messages(socket, Batch, gate.sent)
    socket.close(0)
    assert [number for number, _ in sent] == list(range(len(sent)))
    assert behind.fleet.engines[0].limits.num_pages == 40
    held: dict[tuple[int, int | None], int] = {}
    parents = {}
    num_removed = 0
    for _, batch in sent:
        for event in batch.events:
            (key,) = event.block_hashes
            at = key, event.group_idx
            if isinstance(event, BlockStored):
                held[at] = held.get(at, 0) + 1
                parents[key] = event.parent_block_hash
                assert (event.block_size, event.token_ids) == (page, [])
            else:
                held[at] -= 1
                num_removed += 1
    assert num_removed > 0
    engine = behind.fleet.engines[0]
    cache = engine.prefix_cache
    assert cache is not None
    assert sum(held.values()) == engine.idle_pages  # nothing runs
    assert behind.fleet._prefixes is not None
    names = behind.fleet._prefixes.of(0).tolist()
    assert names[0] in parents
    assert [parents[name] for name in names] == [None, *names[:-1]]


def test_a_cache_is_emptied_as_the_release_does_unless_its_pages_are_held(
    twin: Callable[..., Behind], gate: Gate, tmp_path: Path
) -> None:
    gate.subscribers = 1
    base = f"ipc://{tmp_path}/kv"
    policy = "sglang-fdfo,max_running_requests=4,block_length=4,num_pages=64,prefix_caching=true"
    behind = twin(SLOW, policy=policy, outputs=Outputs(kv_events=base))
    socket = heard(f"{base}.0")
    engine = behind.fleet.engines[0]
    with serving(behind) as server:
        connection = server.begin(prompt=[1] * 64, max_tokens=48)
        until(lambda: engine.pages_held > 0)
        refused = server.ask("POST", "/flush_cache")
        assert (refused.status, refused.body) == (400, b"Flush cache failed.\n")
        assert connection.getresponse().status == 200
        until(lambda: engine.idle)
        assert engine.idle_pages > 0
        done = server.ask("GET", "/flush_cache")
        assert (done.status, done.body[:15]) == (200, b"Cache flushed.\n")
        assert engine.idle_pages == 0
        assert server.ask("POST", "/flush_cache", sec_fetch_site="cross-site").status == 403
        assert server.ask("POST", "/reset_prefix_cache").status == 404
    sent = [batch for _, batch in messages(socket, SglangBatch, gate.sent)]
    last = sent[-1]  # no step is awaited
    socket.close(0)
    assert (last.events, last.attn_dp_rank) == ([AllBlocksCleared()], 0)
    assert {type(event) for batch in sent[:-1] for event in batch.events} == {SglangStored}
    with serving(twin(metrics_as="vllm")) as server:  # it caches nothing
        assert server.ask("POST", "/reset_prefix_cache").json == {"success": True}
        assert server.ask("POST", "/reset_prefix_cache?reset_running_requests=true").status == 400


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"kv_events": "tcp://*:5557"}, r"^policy chunk:2,.* keeps no prefix cache for --kv-events, expected pref"),
        ({"forward_pass_metrics": "udp://x:1"}, r"^--forward-pass-metrics is udp://x:1, expected ipc://FILE or tcp://HOS"),
        ({"forward_pass_metrics": "tcp://127.0.0.1:0"}, r"^--forward-pass-metrics is tcp://127.0.0.1:0, expected ipc://FI"),
        ({"forward_pass_metrics": "ipc:///nowhere/x"}, r"^--forward-pass-metrics is ipc:///nowhere/x.0: No such file"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_one_line(twin: Callable[..., Behind], outputs: dict[str, str], message: str) -> None:
    with pytest.raises(DsimError, match=message):
        twin(outputs=Outputs(**outputs))


def test_the_settings_are_where_a_client_of_the_release_looks_for_them(twin: Callable[..., Behind]) -> None:
    found = {}
    for engine in ("vllm", "sglang", "lmdeploy"):
        with serving(twin(metrics_as=engine)) as server:
            found[engine] = server.ask("GET", "/server_info")
            (model,) = server.ask("GET", "/v1/models").json["data"]
        assert (model["owned_by"], model["max_model_len"]) == (engine, 32768)
    config = found["vllm"].json["vllm_config"]
    assert config["cache_config"] == {"block_size": 8, "num_gpu_blocks": 64, "enable_prefix_caching": False}
    assert config["scheduler_config"]["max_num_seqs"] == 4
    sglang = found["sglang"].json
    names = ("page_size", "max_running_requests", "max_total_num_tokens", "context_length", "version")
    assert [sglang[name] for name in names] == [8, 4, 512, 32768, "0.5.23"]
    assert found["lmdeploy"].status == 404
