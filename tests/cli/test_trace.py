"""dsim trace: whole output, and one line for bad input."""

import json
from pathlib import Path

import pytest

from dsim.traces import load

from .command import dsim, succeed

BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,ChatGPT,10,0,10,Conversation log
118,GPT-4,417,276,693,Conversation log
"""


def run(*arguments: object) -> str:
    """What the command printed."""
    return succeed("trace", *arguments).out


@pytest.fixture
def burstgpt() -> Path:
    path = Path("BurstGPT.csv")
    path.write_text(BURSTGPT)
    return path


def test_info_shows_a_trace(burstgpt: Path) -> None:
    lines = [line.rstrip() for line in run("info", burstgpt).splitlines() if line.strip()]
    assert lines == [
        "BurstGPT (burstgpt)",
        "requests: 3 of 4 rows, 1 failed dropped",
        "rate: 0.0177 req/s for 113.0 s",
        "gap CV: 0.29 (burstiness 11.73)",
        "peak by minute: 0.0333 req/s, 1.00 x mean, in minute 1 of 1",
        " tokens   mean   std   p50   p90     p99     max   total",
        " ───────────────────────────────────────────────────────",
        " input     659   304   472   964   1,075   1,087   1,976",
        " output    175   112   230   267     275     276     524",
    ]


def test_info_shows_the_rate_by_minute_and_by_hour_and_when_the_peak_is() -> None:
    # One request a minute for three hours, and five more in the second minute of the second hour.
    at = sorted([60.0 * k for k in range(181)] + [3661.0 + k for k in range(5)])
    rows = [json.dumps({"timestamp": 1e3 * t, "input_length": 5, "output_length": 5}) for t in at]
    Path("t.jsonl").write_text("\n".join(rows) + "\n")
    shown = run("info", "t.jsonl")
    assert "peak by minute: 0.1 req/s, 5.84 x mean, in minute 62 of 180" in shown
    assert "peak by hour: 0.0181 req/s, 1.05 x mean, in hour 2 of 3" in shown
    assert json.loads(run("info", "t.jsonl", "--json"))["by_minute"]["peak_at"] == 61


def test_convert_writes_canonical_lines_and_says_so(burstgpt: Path) -> None:
    out = Path("out.jsonl")
    assert run("convert", burstgpt, out) == (f"Wrote {out} (3 requests, from 4 rows of burstgpt, 1 failed dropped)\n")
    [line] = [json.loads(text) for text in out.read_text().splitlines()[1:2]]
    assert (line["timestamp"], line["input_length"], line["output_length"]) == (40000, 1087, 230)
    assert (len(line["hash_ids"]), line["block_size"]) == (68, 16)  # vLLM's replayer makes prompts of them
    assert "exists: choose another name" in dsim("trace convert", burstgpt, out).refusal
    assert run("convert", burstgpt, out, "--force").startswith(f"Wrote {out} (3 requests")


def test_synth_writes_a_trace_and_the_same_one_again() -> None:
    one, two, out = Path("1.jsonl"), Path("2.jsonl"), Path("3.jsonl")
    common = "--arrival gamma --rate 5 --num-requests 200 --lengths fixed:512,64 --seed 9"
    result = run("synth", one, common)
    run("synth", two, common)
    assert one.read_bytes() == two.read_bytes()
    assert result.startswith(f"Wrote {one} (200 requests, gamma at 5 req/s, CV ")
    assert result.endswith(", seed 9)\n")
    trace = load(one)
    assert (len(trace), set(trace.input_length.tolist())) == (200, {512})
    assert dsim("trace synth", out).refusal.startswith("rate is missing, expected --rate R")
    assert not out.exists()
