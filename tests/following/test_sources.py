"""What a follower reads: pages of three engines, and logs as they grow."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.following.sources.engines import sample_of
from dsim.following.sources.sample import Sample
from dsim.following.sources.scrape import MissingError, Target

from ..checks import cases, refused
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


@cases(
    "page said",
    ("process_cpu_seconds_total 3\n", "here: holds process_cpu_seconds_total, expected the metrics of an engine"),
    ("", "here: holds nothing, expected"),
    ("vllm:num_preemptions_total 1\n", "here: lacks vllm:num_requests_running, expected"),
    ("vllm:x{a=1} y\n", "here: cannot be read as Prometheus metrics"),
    (pages.vllm(10, 10**6), "here: 2e+06 requests run or wait, expected at most 100000"),
    ('vllm:num_requests_running 1\nvllm:time_to_first_token_seconds_bucket{le="x"} 1\n', "here: cannot be read"),
    (pages.vllm() + 'dsim_simulated{dsim_speed="nan"} 1\n', "here: cannot be read"),
)
def test_another_page_is_refused_with_what_it_holds(page: str, said: str) -> None:
    with refused(says=said):
        sample_of(page, 0.0, "here")


def test_a_restart_and_other_settings_end_a_stretch() -> None:
    first = sample_of(pages.vllm(10), 0.0, "here")
    assert sample_of(pages.vllm(11), 5.0, "here").follows(first)
    assert not sample_of(pages.vllm(9), 5.0, "here").follows(first)
    assert not replace(first, settings={"block_size": "32"}).follows(first)
    assert not replace(first, num_engines=1).follows(first)


def test_the_token_of_a_file_goes_with_each_request_and_a_redirect_is_not_followed() -> None:
    Path("token").write_text("secret\n")
    with pages.showing([pages.vllm()]) as (url, asked):
        assert Target(url, Path("token")).sample().engine == "vllm"
        assert [(a["Authorization"], a["path"]) for a in asked] == [("Bearer secret", "/metrics")]
        gone = Target(url)
    with refused("does not answer", MissingError):
        gone.sample()
    with pages.showing(["moved"], 302) as (url, _), refused("answers 302"):
        Target(url, Path("token")).sample()
    Path("token").write_text("two words")
    with refused("holds 2 words, expected one token"):
        Target(url, Path("token"))


def test_a_proxy_of_the_environment_is_asked_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages.showing([pages.vllm()]) as (url, asked):
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", url)
        Target("http://gpu.invalid:8000").sample()
        with refused("Tunnel connection failed: 501", MissingError):  # the test's proxy does not CONNECT
            Target("https://gpu.invalid:8000").sample()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        Target(url).sample()
    assert [request["path"] for request in asked] == ["http://gpu.invalid:8000/metrics", "/metrics"]
