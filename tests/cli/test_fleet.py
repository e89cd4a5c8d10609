"""dsim replay of fleets: pools, scalers, and what is refused."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ..checks import cases
from .command import dsim, succeed

SDAR, LLADA = "h100-sdar-8b,lmdeploy-bd32", "rtx4090-llada-8b,fast-dllm"
REPLAY = "replay azure-conv --num-requests 120 --rate 8"
FLEET = f"{REPLAY} --router jsq"


def test_a_fleet_of_two_pools_is_replayed_and_its_page_names_them() -> None:
    succeed(FLEET, "--pool fast:1@h100-sdar-8b,optimus --pool 2@a100-sdar-8b,lmdeploy-bd32", "-o run")
    info = json.loads(Path("run/run.json").read_text())
    assert info["fleet"]["pools"] == {"fast": 1, "pool1": 2}
    assert info["replicas"] == 3
    page = Path("run/report.html").read_text()
    assert "pools fast of 1 and pool1 of 2" in page
    assert "No device ran the steps of h100-sdar-8b and a100-sdar-8b" in page


def test_a_scaled_fleet_says_its_replica_hours() -> None:
    done = succeed(FLEET, "--policy optimus --scaler schedule,at=0/1/5/3,every=5 --startup 2", "-o run")
    (only,) = json.loads(Path("run/run.json").read_text())["fleet"]["runs"]
    assert [change[2:] for change in only["changes"]] == [[1, 1], [1, 3], [3, 3]]
    assert "1 replica at the start, scaler schedule,at=0/1/5/3,every=5, 2 s to start one" in done.out
    assert "Replicas over time" in Path("run/report.html").read_text()


@pytest.mark.slow
def test_a_prefill_pool_sends_keys_over_a_link_and_the_run_says_so() -> None:
    pools = [f"prefill:1@{SDAR}", f"decode:2@{SDAR}"]
    options = f"--pool {pools[0]} --pool {pools[1]} --link 450GB/s,10us --decider uncached,tokens=512"
    assert "links 450GB/s,10us, decider uncached,tokens=512" in succeed(FLEET, options, "-o run").out
    info = json.loads(Path("run/run.json").read_text())
    moved = info["fleet"]["runs"][0]["moved"]
    columns = pq.read_table(Path("run/requests.parquet")).to_pydict()
    assert moved == sum(tokens > 0 for tokens in columns["arrived"]) == sum(n >= 512 for n in columns["input_length"])
    parts = info["fleet"]["runs"][0]["parts"]
    assert parts["transfer"] > 0
    assert 1e3 * sum(parts.values()) == pytest.approx(info["policies"][0]["e2el_ms"]["mean"])
    # The same fleet in a file.
    file = Path("fleet.toml")
    file.write_text(f'pools = {pools}\nlinks = ["450GB/s,10us"]\nrouter = "jsq"\ndecider = "uncached,tokens=512"\n')
    assert dsim(REPLAY, "--fleet", file).out == dsim(FLEET, options).out


@cases(
    "given message",
    ("--link 450GB/s", "link is 450GB/s and 0 pools are given, expected 2 or more"),
    ("--decider never", "decider is never and no link is given"),
    (f"--pool 2@{SDAR} --fleet f.toml", "fleet is f.toml and pools is 2@"),
    (f"--pool 1@{SDAR} --pool 1@{SDAR} --link fast", "link 'fast': 'fast' is not a bandwidth"),
    (f"--pool 1@{LLADA} --pool 1@{LLADA} --link 450GB/s", "whose passes over whole sequences run where it decodes"),
    (["--pool", "2 optimus"], "pool is '2 optimus', expected [NAME:]COUNT@PROFILE,POLICY"),
    ("--pool 1@a100-sdar-8b,ar --policy ar", "expected pools alone"),
    ("--startup 4", "startup is 4 s and the scaler is fixed"),
    ("--scaler hpa --gpu-hour 2", "the price of a fixed fleet"),
    ("--scaler hpa --ensemble 19", "expected one pool of a fixed count"),
)
def test_a_fleet_that_cannot_be_is_refused_in_one_line(given: str | list[str], message: str) -> None:
    assert message in dsim(FLEET, given).refusal


@cases(
    "command",
    "replay azure-conv --num-requests 5",
    "capacity azure-conv --slo ttft=2s --num-requests 100 --jobs 1",
    "serve --twin a100-sdar-8b --port 0",
)
def test_a_router_s_file_that_is_not_there_is_named(command: str) -> None:
    said = dsim(command, "--router ./nowhere.py:ROUTER").refusal
    assert said.startswith("router '")
    assert said.endswith("/nowhere.py cannot be read: No such file or directory")
