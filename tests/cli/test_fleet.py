"""dsim replay of fleets: pools, scalers, and what is refused."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from .command import dsim, succeed

SDAR, LLADA = "h100-sdar-8b,lmdeploy-bd32", "rtx4090-llada-8b,fast-dllm"
FLEET = ["replay", "azure-conv", "--num-requests", "120", "--rate", "8", "--router", "jsq"]


def test_a_fleet_of_two_pools_is_replayed_and_its_page_names_them(tmp_path: Path) -> None:
    pools = ["--pool", "fast:1@h100-sdar-8b,optimus", "--pool", "2@a100-sdar-8b,lmdeploy-bd32"]
    succeed(*FLEET, *pools, "-o", str(tmp_path / "run"))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["fleet"]["pools"] == {"fast": 1, "pool1": 2}
    assert info["replicas"] == 3
    page = (tmp_path / "run" / "report.html").read_text()
    assert "pools fast of 1 and pool1 of 2" in page
    assert "No device ran the steps of h100-sdar-8b and a100-sdar-8b" in page


def test_a_scaled_fleet_says_its_replica_hours(tmp_path: Path) -> None:
    scaled = ["--policy", "optimus", "--scaler", "schedule,at=0/1/5/3,every=5", "--startup", "2"]
    done = succeed(*FLEET, *scaled, "-o", str(tmp_path / "run"))
    (only,) = json.loads((tmp_path / "run" / "run.json").read_text())["fleet"]["runs"]
    assert [change[2:] for change in only["changes"]] == [[1, 1], [1, 3], [3, 3]]
    assert "1 replica at the start, scaler schedule,at=0/1/5/3,every=5, 2 s to start one" in done.out
    assert "Replicas over time" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_prefill_pool_sends_keys_over_a_link_and_the_run_says_so(tmp_path: Path) -> None:
    pools = [f"prefill:1@{SDAR}", f"decode:2@{SDAR}"]
    options = ["--pool", pools[0], "--pool", pools[1], "--link", "450GB/s,10us", "--decider", "uncached,tokens=512"]
    done = succeed(*FLEET, *options, "-o", str(tmp_path / "run"))
    assert "links 450GB/s,10us, decider uncached,tokens=512" in done.out
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    moved = info["fleet"]["runs"][0]["moved"]
    columns = pq.read_table(tmp_path / "run" / "requests.parquet").to_pydict()
    assert moved == sum(tokens > 0 for tokens in columns["arrived"]) == sum(n >= 512 for n in columns["input_length"])
    parts = info["fleet"]["runs"][0]["parts"]
    assert parts["transfer"] > 0
    assert 1e3 * sum(parts.values()) == pytest.approx(info["policies"][0]["e2el_ms"]["mean"])
    # The same fleet in a file.
    file = tmp_path / "fleet.toml"
    file.write_text(f'pools = {pools}\nlinks = ["450GB/s,10us"]\nrouter = "jsq"\ndecider = "uncached,tokens=512"\n')
    assert dsim(*FLEET[:-2], "--fleet", str(file)).out == dsim(*FLEET, *options).out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--link", "450GB/s"], "link is 450GB/s and 0 pools are given, expected 2 or more"),
        (["--decider", "never"], "decider is never and no link is given"),
        (["--pool", f"2@{SDAR}", "--fleet", "f.toml"], "fleet is f.toml and pools is 2@"),
        (["--pool", f"1@{SDAR}", "--pool", f"1@{SDAR}", "--link", "fast"], "link 'fast': 'fast' is not a bandwidth"),
        (
            ["--pool", f"1@{LLADA}", "--pool", f"1@{LLADA}", "--link", "450GB/s"],
            "whose passes over whole sequences run where it decodes",
        ),
        (["--pool", "2 optimus"], "pool is '2 optimus', expected [NAME:]COUNT@PROFILE,POLICY"),
        (["--pool", "1@a100-sdar-8b,ar", "--policy", "ar"], "expected pools alone"),
        (["--startup", "4"], "startup is 4 s and the scaler is fixed"),
        (["--scaler", "hpa", "--gpu-hour", "2"], "the price of a fixed fleet"),
        (["--scaler", "hpa", "--ensemble", "19"], "expected one pool of a fixed count"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_one_line(given: list[str], message: str) -> None:
    assert message in dsim(*FLEET, *given).refusal


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "azure-conv", "--num-requests", "5"],
        ["capacity", "azure-conv", "--slo", "ttft=2s", "--num-requests", "100", "--jobs", "1"],
        ["serve", "--twin", "a100-sdar-8b", "--port", "0"],
    ],
)
def test_a_router_s_file_that_is_not_there_is_named(command: list[str]) -> None:
    said = dsim(*command, "--router", "./nowhere.py:ROUTER").refusal
    assert said.startswith("router '")
    assert said.endswith("/nowhere.py cannot be read: No such file or directory")
