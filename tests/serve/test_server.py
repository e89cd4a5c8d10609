"""dsim serve, asked by plain HTTP clients: what is answered, refused, journalled and kept. Nothing here is timed."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable, StepTotals
from dsim.engine.latency import LatencyModel
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.state import CANCELLED, COMPLETED, MASKED, UNFINISHED
from dsim.engine.step import StepOutcome, StepPlan
from dsim.files.interrupt import as_ctrl_c
from dsim.results.run import read_run
from dsim.results.world import World
from dsim.serve.open import open_live, open_twin
from dsim.serve.real_time import Clock
from dsim.serve.replica_thread import Replica
from dsim.serve.served import AccessLog
from dsim.serve.server import Server, ServerOptions
from dsim.traces import load

from ..checks import cases
from ..held_up import PATIENCE
from ..worlds import Collector
from .serving import CHUNK, FAST, JSON, SLOW, Twin, serving, until
from .test_faults import begun, ended


def test_a_stream_is_a_chunk_an_emission_then_the_usage_then_done(twin: Twin) -> None:
    with serving(twin()) as server:
        reply = server.complete(prompt="12345678", max_tokens=10, stream=True)
        plain = server.complete(prompt="1", max_tokens=2, stream=True, stream_options={"include_usage": False})
    assert ["usage" in chunk for chunk in plain.chunks] == [False]
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert reply.headers["x-dsim"] == "twin; the text is filler"
    *chunks, usage = reply.chunks
    choices = [chunk["choices"][0] for chunk in chunks]
    # Two tokens of prompt lie in the first block of four.
    assert [len(choice["text"].split()) for choice in choices] == [2, 4, 4]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


def test_a_chats_stream_names_its_role_once(twin: Twin) -> None:
    asked = [{"role": "system", "content": "1234567"}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]
    body = {"messages": asked, "max_completion_tokens": 6, "stream": True, "model": "a model"}
    with serving(twin()) as server:
        *chunks, usage = server.ask("POST", "/v1/chat/completions", body).chunks
        whole = server.ask("POST", "/v1/chat/completions", {**body, "stream": False}).json
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert {chunk["object"] for chunk in (*chunks, usage)} == {"chat.completion.chunk"}
    text = "".join(delta["content"] for delta in deltas)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert whole["usage"] == usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


@cases("emit", "block", "step", "end")
def test_every_client_gets_all_its_tokens_however_they_are_emitted(twin: Twin, emit: str) -> None:
    with serving(twin(emit=emit)) as server:

        def client(i: int) -> tuple[int, int]:
            *chunks, usage = server.complete(prompt=list(range(1, 2 + i)), max_tokens=3 + i, stream=True).chunks
            assert usage["usage"]["completion_tokens"] == 3 + i
            sizes = [len(chunk["choices"][0]["text"].split()) for chunk in chunks]
            assert all(sizes[:-1])  # the last may say no more than that it is the last
            return sum(size > 0 for size in sizes), sum(sizes)

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(client, range(12)))
    assert [tokens for _, tokens in found] == [3 + i for i in range(12)]
    if emit == "end":
        assert {chunks for chunks, _ in found} == {1}
    table = server.behind.columns()
    assert table["num_emissions"][np.argsort(table["output_length"])].tolist() == [chunks for chunks, _ in found]


def test_the_journal_replays_plan_for_plan(twin: Twin) -> None:
    for policy in (CHUNK, "optimus,block_length=4,max_batch=4,num_pages=64,page_size=8"):
        journal = Collector()
        behind = twin(policy=policy, replicas=2, router="jsq", append=journal)
        with serving(behind) as server:
            server.complete_many()
        columns, steps, lists = behind.columns(), journal.steps, journal.lists
        assert len(columns["request"]) == 24
        assert set(steps["replica"]) == {0, 1}
        engines = behind.fleet.engines
        for r in (0, 1):
            fresh = Engine(parse(policy), engines[r].limits, RequestTable(24), replica=r, latency=FAST)
            assert list(replay(fresh, r, columns, steps, lists)) == []


def test_the_limit_of_a_request_is_known_and_no_step_is_spent_behind_it(twin: Twin) -> None:
    behind = twin(policy="vllm-ar,max_num_seqs=2,page_size=8,num_pages=64", eos=True)
    with serving(behind) as server:
        assert server.complete(prompt=[0, 1], max_tokens=5).status == 200
    totals = behind.fleet.engines[0].totals
    assert totals.num_prefill_steps + totals.num_decode_steps == 5  # the prompt's has the first of five tokens


def test_a_prompt_that_begins_as_another_is_found_by_its_tokens(twin: Twin) -> None:
    spec = "lmdeploy-0.18:4,threshold=0.9,max_batch=4,num_pages=64,page_size=8,prefix_caching=true"
    behind = twin(policy=spec, replicas=2, router="prefix")
    shared = list(range(40))
    with serving(behind) as server:
        for rest in ([1] * 10, [2] * 10, []):
            assert server.complete(prompt=shared + rest, max_tokens=3).status == 200
        assert server.complete(prompt=[9, *shared], max_tokens=3).status == 200  # another from its first token on
    totals = server.totals
    # Of the third prompt the last block is computed: it is the first denoising step.
    assert (totals.prefix_queries, totals.prefix_hits) == (50 + 50 + 40 + 41, 40 + 32)
    assert behind.columns()["replica"].tolist()[:3] == [0, 0, 0]


def test_the_manifest_of_what_was_served_names_the_law_that_its_blocks_took_their_steps_from() -> None:
    world = World(trace="", policy="vllm-diffusion", profile="h100-diffusiongemma-fp8")
    behind = open_twin(world)
    law = world.setting().law
    (model,) = behind.info.commit_models
    assert (model.workload, model.median_steps, model.canvas_length) == (law.workload, law.median, 256)


def test_a_full_journal_refuses_and_loses_nothing(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.serve.open.MAX_REQUESTS", 16)
    with serving(twin()) as server:
        assert {server.complete(prompt=[0], max_tokens=1).status for _ in range(14)} == {200}
        healthy = server.ask("GET", "/health").status
        found = [server.complete(prompt=[0], max_tokens=1) for _ in range(3)]
        health = server.ask("GET", "/health")
    assert [healthy, *(reply.status for reply in found)] == [200, 200, 200, 503]
    assert "retry-after" not in found[2].headers  # no later request is accepted, either
    why = "the journal holds 16 requests and is full: restart the server"
    assert found[2].json["error"]["message"] == why
    assert (health.status, health.body.decode()) == (503, why + "\n")
    assert server.behind.columns()["status"].tolist() == [0] * 16


def test_a_client_that_goes_away_frees_its_row_and_the_journal_replays(twin: Twin) -> None:
    journal = Collector()
    behind = twin(SLOW, append=journal)
    (engine,) = behind.fleet.engines
    with serving(behind) as server:
        connection = server.begin(prompt=[0], max_tokens=200, stream=True)
        connection.getresponse().read(10)
        connection.sock.close()
        connection.close()
        until(lambda: behind.columns()["status"].tolist() == [CANCELLED])
        assert engine.num_running == 0
        assert server.complete(prompt=[0], max_tokens=1).status == 200
    columns = behind.columns()
    assert columns["status"].tolist() == [CANCELLED, COMPLETED]
    assert 0 < columns["num_tokens"][0] < 200
    summary = behind.summarize(server.totals or StepTotals(), [])
    assert (summary.num_requests, summary.completed, summary.cancelled) == (2, 1, 1)
    fresh = Engine(engine.policy, engine.limits, RequestTable(2), latency=SLOW)
    assert list(replay(fresh, 0, columns, journal.steps, journal.lists)) == []


def test_a_request_that_is_cancelled_before_it_reaches_the_engine_is_cancelled_when_it_does(twin: Twin) -> None:
    behind = twin()
    (engine,) = behind.fleet.engines
    replica = Replica(engine, AllAtOnce(), Clock(), lambda *ended: None, lambda: None)
    replica.submit(Request(0, 0.5, 4, 4), 1.0)
    replica.cancel(0)
    assert replica.deliver(0.5)
    assert (behind.fleet.table["status"][0], replica.num_queued) == (UNFINISHED, 1)
    assert replica.deliver(1.0)
    assert (behind.fleet.table["status"][0], replica.num_queued) == (CANCELLED, 0)


def test_requests_reach_the_engine_after_the_profiles_front_end(twin: Twin) -> None:
    behind = twin(frontend=0.05)
    with serving(behind) as server:
        assert server.begin(prompt=[0], max_tokens=1).getresponse().status == 200
    columns = behind.columns()
    assert columns["scheduled"][0] >= columns["arrival"][0] + 0.05
    assert behind.info.profile.frontend == 0.05


def test_a_stop_serves_what_is_in_flight_to_its_end(twin: Twin) -> None:
    replies = []
    with serving(twin(SLOW)) as server:
        thread = threading.Thread(target=lambda: replies.append(server.complete(prompt=[0], max_tokens=8, stream=True)))
        thread.start()
        until(lambda: server.behind.fleet.engines[0].num_running == 1)
        server.server.should_exit = True
        thread.join()
    assert replies[0].chunks[-1]["usage"]["completion_tokens"] == 8
    assert server.behind.columns()["status"].tolist() == [0]


REFUSED = [
    (b"{", 400, "the request is not JSON"),
    (b"[" * 9_000_000, 413, "the request is larger than 8388608 bytes"),
    (b"[" * 60_000, 400, "the request is not JSON"),
    (b"[1]", 400, "the request is [1]: Input should be an object"),
    ({"prompt": [1, -2]}, 400, "prompt is missing or several, expected one text or one list of token ids"),
    ({"prompt": ""}, 400, "the prompt holds no tokens, expected at least 1"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0: Input should be greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens is true: Input should be a valid integer"),
    ({"prompt": "a", "priority": "high"}, 400, 'priority is "high": Input should be a valid integer'),
    ({"prompt": "a", "deadline": -1}, 400, "deadline is -1: Input should be greater than 0"),
    ({"prompt": "a", "slo_class": 3}, 400, "slo_class is 3: Input should be a valid string"),
    ({"prompt": "a", "stop": ["x"]}, 400, 'stop is ["x"], expected none'),
    ({"prompt": "a", "tools": [{}], "tool_choice": "required"}, 400, 'tool_choice is "required", expected none'),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format is {"),
    ({"prompt": "a", "n": 2}, 400, "n is 2, expected none"),
    ({"prompt": "a", "stream": "false"}, 400, 'stream is "false": Input should be a valid boolean'),
    ({"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served, expected 'a model'"),
    ({"prompt": [0], "max_tokens": 600}, 400, "prompt and output are 1 + 600 tokens, expected at most"),
]  # fmt: skip


def test_what_cannot_be_served_is_refused_with_both_values(twin: Twin) -> None:
    with serving(twin()) as server:
        for body, status, said in REFUSED:
            reply = server.ask("POST", "/v1/completions", body)
            assert (reply.status, reply.json["error"]["message"][: len(said)]) == (status, said)
    assert server.behind.fleet.num_requests == 0


def test_a_body_that_does_not_come_in_time_and_a_client_too_many_are_refused(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.serve.app.PATIENCE", 0.2)
    monkeypatch.setattr("dsim.serve.server.MAX_CONNECTIONS", 3)
    with serving(twin()) as server:
        late = server.connect()
        late.request("POST", "/v1/completions", b"{", {**JSON, "content-length": "9"})
        assert late.getresponse().status == 408
        late.close()
        until(lambda: not server.server.server_state.connections)
        idle = [server.connect() for _ in range(3)]
        for client in idle:
            client.connect()
        until(lambda: len(server.server.server_state.connections) == 3)
        assert server.ask("GET", "/health").status == 503
        for client in idle:
            client.close()
        until(lambda: not server.server.server_state.connections)
        assert server.ask("GET", "/health").status == 200


def test_only_the_api_is_served_and_by_no_name_that_a_page_gives_this_machine(twin: Twin) -> None:
    with serving(twin()) as server:
        for path in ("/", "/docs", "/openapi.json", "/static/../../etc/passwd", "/v1/engines", "/%2e%2e/etc/passwd"):
            assert server.ask("GET", path).status == 404, path
        assert server.ask("GET", "/v1/completions").status == 405
        (model,) = server.ask("GET", "/v1/models").json["data"]
        assert (model["id"], model["root"]) == ("a model", "a model")
        assert server.ask("GET", "/health").status == 200
        assert server.ask("GET", "/health", Host="evil.example").status == 400


def test_an_api_key_is_asked_for_where_there_is_one(twin: Twin) -> None:
    with serving(twin(), api_key="schl\xfcssel") as server:
        for given in (b"Bearer schl\xc3\xbcssel", b"", b"Bearer schl?ssel", b"schl\xc3\xbcssel"):
            headers: Any = {"authorization": given}
            status = 200 if given.startswith(b"Bearer schl\xc3") else 401
            assert server.ask("POST", "/v1/completions", {"prompt": [0], "max_tokens": 1}, **headers).status == status
            assert server.ask("GET", "/v1/models", **headers).status == status
        assert server.ask("GET", "/health").status == 200


def test_a_page_of_another_origin_can_post_nothing(twin: Twin) -> None:
    """A browser asks before it sends application/json to another origin, and is refused; other types it just sends."""
    body = {"prompt": [0], "max_tokens": 1}
    with serving(twin()) as server:
        for kind in ("text/plain", "text/plain;charset=utf-8", "application/x-www-form-urlencoded", ""):
            reply = server.ask("POST", "/v1/completions", body, content_type=kind, origin="http://evil.example")
            assert reply.status == 415, kind
        origin = server.ask("OPTIONS", "/v1/completions", origin="http://evil.example")
        assert (origin.status, "access-control-allow-origin" in origin.headers) == (405, False)
        assert server.ask("POST", "/v1/completions", body, content_type="Application/JSON; charset=utf-8").status == 200
    assert server.behind.fleet.num_requests == 1


@pytest.mark.slow
def test_a_model_answers_with_the_tokens_that_it_committed() -> None:
    pytest.importorskip("torch")
    from dsim.profiler.measure import open_any

    prompt = "def add(a, b):\n    return"
    for policy in ("chunk:8,block_length=8,max_batch=4", "lmdeploy-bd32,block_length=8,max_batch=4"):
        loaded = open_any("tiny", "cpu")
        vocab = loaded.model.config.vocab
        behind = open_live(loaded, World(trace="", policy=policy))
        with serving(behind) as server:
            whole = server.complete(prompt=prompt, max_tokens=24).json
            *chunks, usage = server.complete(prompt=list(prompt.encode()), max_tokens=24, stream=True).chunks
            for token in (vocab, 2**31 - 1):
                refused = server.complete(prompt=[1, token, 2], max_tokens=4)
                assert refused.json["error"]["message"] == f"prompt holds token id {token}, expected below {vocab}"
            assert server.complete(prompt=[vocab - 1], max_tokens=4).status == 200
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        # The same weights and the same prompt, as text and as ids, alone in a batch.
        assert whole["choices"][0]["text"] == streamed
        assert usage["usage"] == whole["usage"]
        assert usage["usage"]["prompt_tokens"] == len(prompt)
        assert len(streamed.encode()) == 24  # bytes are tokens
        assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    ends = " \n"
    loaded.model.config = replace(loaded.model.config, eos=tuple(ends.encode()))
    with serving(open_live(loaded, World(trace="", policy=policy, eos=True))) as server:
        ended = server.complete(prompt=prompt, max_tokens=24).json
        *chunks, _ = server.complete(prompt=prompt, max_tokens=24, stream=True).chunks
    own = -len(prompt) % 8  # an EOS in the block that holds some of the prompt is missed
    until = min(i for i, byte in enumerate(streamed) if i >= own and byte in ends) + 1
    assert until < 24
    assert (ended["choices"][0]["text"], ended["usage"]["completion_tokens"]) == (streamed[:until], until)
    assert ended["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop_and_writes_its_journal() -> None:
    process, server, said = begun("--speed", "50", "--slo", "ttft=1s", "--json", "-o", "run")
    assert said[0] == "Loading the twin of a100-sdar-8b, chunk:2\n"
    assert said[1].startswith(
        "Serving SDAR-8B: the twin of SDAR-8B on A100-80GB, chunk:2; times are simulated, 50 times as fast as the "
        "clock, on http://127.0.0.1:"
    )
    assert server.complete(prompt="hello", max_tokens=40).json["usage"]["completion_tokens"] == 40
    code, out, err = ended(process)
    assert code == 0, err
    assert out.startswith('{"schema": "dsim-run"')
    assert err.splitlines()[-1] == "Wrote run/ (run.json, requests.parquet, steps.parquet, report.html)"
    run = read_run("run")
    assert run.requests("chunk:2")["num_tokens"].tolist() == [40]
    assert run.num_steps == run.info.policies[0].num_decode_steps + 1
    assert run.info.live.device == "twin of A100-80GB"


@cases("number", signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
@cases("is_ignored", False, True)
def test_a_server_ends_in_its_own_time_unless_a_signal_is_ignored(number: signal.Signals, is_ignored: bool) -> None:
    server = Server(lambda: None, ServerOptions("127.0.0.1", 0, 1.0), None)  # type: ignore[arg-type]
    before = signal.signal(number, signal.SIG_IGN if is_ignored else signal.default_int_handler)  # nohup ignores SIGHUP
    try:
        for _ in range(2):
            with as_ctrl_c() if not is_ignored else nullcontext(), server.capture_signals():
                os.kill(os.getpid(), number)
            assert server.should_exit is not is_ignored
    finally:
        signal.signal(number, before)
    assert server.force_exit is not is_ignored


class AllAtOnce:
    """Commits every mask that a step computes, in no time."""

    def step(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome(0.0, plan.window & (plan.status == MASKED))


def test_a_stop_comes_after_the_rows_of_requests_that_are_over() -> None:
    """LMDeploy decides a step ahead: the last one is still to run when the last request ends."""
    spec = "lmdeploy-bd32,block_length=4,max_batch=4,num_pages=64,page_size=8"
    engine, idle, over = Engine(parse(spec), Limits(64, 256, 4), RequestTable(1)), [], threading.Event()

    def tell(plan: StepPlan, outcome: StepOutcome, done: Any, now: float) -> None:
        idle.append(engine.idle)
        if len(done):
            replica.stop()

    clock = Clock()
    replica = Replica(engine, AllAtOnce(), clock, tell, over.set)
    replica.submit(Request(0, clock(), 4, 8), 0.0)
    replica.start()
    assert over.wait(PATIENCE)
    assert idle[-2:] == [False, True]


def test_openais_own_client_gets_what_the_journal_says(twin: Twin) -> None:
    openai = pytest.importorskip("openai", reason="a client that nobody here wrote: pip install openai")
    behind = twin(SLOW)
    with serving(behind, api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["a model"]
        *chunks, last = client.completions.create(
            model="a model", prompt="12345678", max_tokens=10, stream=True, stream_options={"include_usage": True}
        )
        assert [len(chunk.choices[0].text.split()) for chunk in chunks] == [2, 4, 4]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 10)
        said = client.chat.completions.create(
            model="a model", messages=[{"role": "user", "content": "1234"}], max_completion_tokens=6
        )
        assert (said.choices[0].message.role, said.usage.completion_tokens) == ("assistant", 6)
        with pytest.raises(openai.NotFoundError, match="is not served, expected 'a model'"):
            client.completions.create(model="another", prompt="1", max_tokens=1)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        # One that hangs up on its stream is cancelled.
        stream = client.completions.create(model="a model", prompt="1", max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: behind.columns()["status"].tolist() == [COMPLETED, COMPLETED, CANCELLED])
    assert behind.columns()["num_tokens"][:2].tolist() == [10, 6]


ORDERED = """
from dataclasses import dataclass
import numpy as np
from dsim.engine.part import Discipline, Policy
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.spec import parse
from dsim.engine.view import class_of

@dataclass(frozen=True)
class Ordered(Discipline):
    def order(self, view):
        waiting = view.waiting()
        return np.lexsort((waiting.deadline, waiting.slo_class == class_of("batch"), waiting.priority))

POLICY = Policy("ordered", Continuous(num_loops=1), parse("lmdeploy-bd32:4").granularity, discipline=Ordered())
"""


def test_a_scheduler_in_plain_python_is_told_what_requests_say_of_themselves(twin: Twin) -> None:
    path = Path("ordered.py")
    path.write_text(ORDERED)
    spec = f"{path}:POLICY,max_batch=1,num_pages=64"
    behind = twin(LatencyModel(((0.0, 0.03), (16.0, 0.03), (32.0, 0.03)), 0.0), policy=spec, allow_code=allowed([path]))
    chat = {"slo_class": "chat", "prompt": "a", "max_tokens": 4}
    asked = [{"prompt": "a", "max_tokens": 48}, {**chat, "priority": 5}, {**chat, "slo_class": "batch"}, chat,
             {**chat, "deadline": 2.5}]  # fmt: skip
    with serving(behind) as server:
        clients = []
        for i, body in enumerate(asked):
            clients.append(server.begin(**body))
            until(lambda at=i: behind.fleet.num_requests > at)  # type: ignore[misc]
        assert [client.getresponse().status for client in clients] == [200] * 5
        table = behind.columns()
    assert table["priority"].tolist() == [0, 5, 0, 0, 0]
    assert np.nan_to_num(table["deadline"]).tolist() == [0, 0, 0, 0, 2.5]
    assert np.argsort(table["scheduled"]).tolist() == [0, 4, 3, 2, 1]


def test_an_access_log_is_a_trace(twin: Twin) -> None:
    behind = twin(speed=5.0)
    behind.fleet.access = AccessLog(Path("access.jsonl"), behind.fleet.clock.opened)
    with serving(behind) as server:
        server.complete_many()
        gone = server.begin(prompt=[0], max_tokens=200, stream=True)
        assert gone.getresponse().readline().startswith(b"data: ")
        gone.close()
    lines = [json.loads(line) for line in Path("access.jsonl").read_text().splitlines()]
    table = behind.columns()
    done = sorted((line for line in lines if line["status"] == "completed"), key=lambda line: int(line["id"]))
    assert [line["output_length"] for line in done] == table["num_tokens"][:24].tolist()
    for name, column in (("measured_ttft", "first_emission"), ("measured_e2el", "finish")):
        waited = table[column][:24] - table["arrival"][:24]
        assert [line[name] for line in done] == pytest.approx(waited.tolist())
    assert {line["status"] for line in lines} <= {"completed", "cancelled"}
    arrival = table["arrival"][:24] + behind.fleet.clock.opened
    assert [line["arrival"] for line in done] == pytest.approx(arrival.tolist())
    trace = load("access.jsonl")
    order = np.argsort([int(name) for name in trace.extras["id"]])
    assert trace.input_length[order].tolist() == table["input_length"].tolist()
    assert trace.arrival[order] == pytest.approx(table["arrival"] - table["arrival"][0], abs=1e-6)
    assert trace.extras["measured_ttft"][order[0]] == pytest.approx(table["first_emission"][0] - table["arrival"][0])
