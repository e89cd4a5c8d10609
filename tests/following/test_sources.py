"""What a follower reads: pages of three engines, and logs as they grow."""

import json
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError
from dsim.following.sources.engines import sample_of
from dsim.following.sources.growing import AccessLog
from dsim.following.sources.sample import Sample
from dsim.following.sources.scrape import MissingError, Target

from . import pages


def test_a_page_of_vllm_is_summed_over_its_engines() -> None:
    found = sample_of(pages.vllm(), 5.0, "here")
    assert (found.engine, found.num_engines, found.time) == ("vllm", 2, 5.0)
    assert found.counters == {"requests": 10, "prompt_tokens": 1000, "generation_tokens": 500, "steps": 200}
    assert found.gauges == {"running": 4, "waiting": 1, "kv_usage": 0.5}
    assert found.histograms["ttft"].shares.tolist() == [0.1, 0.8, 0.1]
    assert found.settings == {"block_size": "16", "num_gpu_blocks": "1000"}
    assert Sample.from_json(json.loads(json.dumps(vars(found)))) == found


def test_sglang_says_how_long_forwards_take_and_lmdeploy_counts_requests_by_a_histogram() -> None:
    sglang, lmdeploy = sample_of(pages.SGLANG, 0.0, "here"), sample_of(pages.LMDEPLOY, 0.0, "here")
    assert (sglang.counters["forward_seconds"], sglang.counters["forwards"]) == (4.0, 100.0)
    assert (lmdeploy.engine, lmdeploy.counters["requests"], lmdeploy.gauges["waiting"]) == ("lmdeploy", 6, 4 + 2)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("process_cpu_seconds_total 3\n", "here: holds process_cpu_seconds_total, expected the metrics of an engine"),
        ("", "here: holds nothing, expected"),
        ("vllm:num_preemptions_total 1\n", "here: lacks vllm:num_requests_running, expected"),
        ("vllm:x{a=1} y\n", "here: cannot be read as Prometheus metrics"),
        (pages.vllm(10, 10**6), "here: 2e+06 requests run or wait, expected at most 100000"),
        ('vllm:num_requests_running 1\nvllm:time_to_first_token_seconds_bucket{le="x"} 1\n', "here: cannot be read"),
        (pages.vllm() + 'dsim_simulated{dsim_speed="nan"} 1\n', "here: cannot be read"),
    ],
)
def test_another_page_is_refused_with_what_it_holds(page: str, said: str) -> None:
    with pytest.raises(DsimError, match=re.escape(said)):
        sample_of(page, 0.0, "here")


def test_a_restart_and_other_settings_end_a_stretch() -> None:
    first = sample_of(pages.vllm(10), 0.0, "here")
    assert sample_of(pages.vllm(11), 5.0, "here").follows(first)
    assert not sample_of(pages.vllm(9), 5.0, "here").follows(first)
    assert not replace(first, settings={"block_size": "32"}).follows(first)
    assert not replace(first, num_engines=1).follows(first)


def test_the_token_of_a_file_goes_with_each_request_and_a_redirect_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pages.showing([pages.vllm()]) as (url, asked):
        assert Target(url, tmp_path / "token").sample().engine == "vllm"
        assert [(a["Authorization"], a["path"]) for a in asked] == [("Bearer secret", "/metrics")]
        gone = Target(url)
    with pytest.raises(MissingError, match="does not answer"):
        gone.sample()
    with pages.showing(["moved"], 302) as (url, _), pytest.raises(DsimError, match="answers 302"):
        Target(url, tmp_path / "token").sample()
    (tmp_path / "token").write_text("two words")
    with pytest.raises(DsimError, match="holds 2 words, expected one token"):
        Target(url, tmp_path / "token")


def test_a_proxy_of_the_environment_is_asked_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages.showing([pages.vllm()]) as (url, asked):
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", url)
        Target("http://gpu.invalid:8000").sample()
        with pytest.raises(MissingError, match="Tunnel connection failed: 501"):  # the test's proxy does not CONNECT
            Target("https://gpu.invalid:8000").sample()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        Target(url).sample()
    assert [request["path"] for request in asked] == ["http://gpu.invalid:8000/metrics", "/metrics"]


def test_an_access_log_is_read_as_it_grows_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-25 10:00:00,100,20\n2026-11-25 10:00:0")
    log = AccessLog(path, None, None, None)
    log.read_added()
    zero = 1795600800.0  # 10:00:00
    assert log.arrivals(zero, zero + 60).time.tolist() == [0.0]
    with path.open("a") as file:
        file.write("7,30,40\n2026-11-25 10:02:00,1,2\n")
    log.read()
    found = log.arrivals(zero, zero + 60)
    columns = [found.time, found.input_length, found.output_length]
    assert [column.tolist() for column in columns] == [[0, 7], [100, 30], [20, 40]]
    (tmp_path / "relative.jsonl").write_text('{"timestamp": 5, "input_length": 3, "output_length": 4}\n')
    with pytest.raises(DsimError, match=r"its last request is at 0.005 s, expected dates or seconds since 1970"):
        AccessLog(tmp_path / "relative.jsonl", None, None, None).read_added()


T = 1795600800
ROW = '{{"timestamp": {}000, "input_length": 3, "output_length": 4, "m": "{}"}}\n'


def test_a_rotated_log_loses_no_row_and_nothing_that_it_holds_ends_following(tmp_path: Path) -> None:
    path, told = tmp_path / "log.jsonl", list[str]()
    path.write_text(ROW.format(T, "a") + ROW.format(T + 1, "b"))
    logs = AccessLog(path, None, "m=a", None, told.append)
    logs.read_added()
    with path.open("a") as writer:
        writer.write(ROW.format(T + 2, "b") + "broken\n")
        writer.flush()
        logs.read()  # only another model and a broken line
        writer.write(ROW.format(T + 3, "a"))
        path.rename(tmp_path / "log.jsonl.1")
        writer.flush()
        logs.read()  # there is no file of this name
        path.touch()
        writer.write(ROW.format(T + 4, "a"))
    logs.read()
    path.write_text("".join(ROW.format(t, "a") for t in (T + 5, 0, 2 * T)) + "\0[[\n" + "[" * 10_000 + "\n")
    logs.read()
    assert (found := logs.arrivals(T, T + 60)) is not None
    assert found.time.tolist() == [0, 3, 4, 5]
    assert told == [f"Left out: {path}: no row is of m a, expected one of b: 1, without a name: 1"]


@pytest.mark.parametrize(("hours", "where"), [(8, "after"), (-8, "before"), (0, "")])
def test_a_log_of_another_clock_is_told_once_and_its_requests_are_not_taken(
    tmp_path: Path, hours: int, where: str
) -> None:
    path, told = tmp_path / "log.jsonl", list[str]()
    path.write_text("".join(ROW.format(T + 600 * i + 3600 * hours, "a") for i in range(72)))  # of twelve hours
    logs = AccessLog(path, None, None, None, told.append)
    for now in (T + 42_600, T + 43_200):
        logs.read()
        assert (logs.arrivals(now - 600, now, now) is None) == bool(hours)
    line = f"Left out: {path}: its newest request is 8.0 h {where} the server's page, expected"
    assert [words[: len(line)] for words in told] == [line] * bool(hours)


def test_a_page_that_drips_has_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.following.sources.scrape.PATIENCE", 0.2)

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as client, suppress(OSError):
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not time.sleep(0.02):
                client.sendall(b"# x\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        target = Target(f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(MissingError, match=r"its page takes more than 0.2 s"):
            target.sample()
