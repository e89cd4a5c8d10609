"""`dsim profile` prints what it derived, writes the file, and refuses in one line."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dsim.cli.profile import profile_command, profiles_command
from dsim.engine.errors import DsimError
from dsim.profiler.profile import load, shipped

app = typer.Typer()
app.command("profile")(profile_command)
app.command("profiles")(profiles_command)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_roofline_is_told_and_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run("profile", "--roofline", "h200", "--model", "qwen3-8b", "-o", str(path)) == (
        "Qwen3-8B on H200, captured graphs, from data sheets: estimated, not measured\n"
        "  knee      182 tokens a step: reading the weights takes as long as multiplying with them\n"
        "  floor     4.9 ms a step, set by reading the weights\n"
        "  slope     22 us a token beyond the knee, before attention and LM head\n"
        "  memory    weights take 16.4 GB of 151 GB\n"
        "  KV pages  11231 of 64 tokens, at a batch of 1024 and prefills of 4096 tokens\n"
        "  commits   none: it can run `ar` only\n"
        "  trust     latencies to about ±30%\n"
        f"Wrote {path}\n"
    )
    assert load(path).name == "mine"
    with pytest.raises(DsimError, match="exists: choose another name, or pass --force"):
        run("profile", "--roofline", "h200", "--model", "qwen3-8b", "-o", str(path))


def test_json_is_one_object() -> None:
    facts = json.loads(run("profile", "--roofline", "a100", "--model", "SDAR-8B", "--eager", "--json"))
    assert (facts["floor_s"], facts["floor_is_launch"], facts["written"]) == (0.041, True, None)


def test_refusals_are_one_line() -> None:
    for arguments, message in {
        (): "measuring comes with `dsim live` and is not there yet; pass --roofline GPU --model MODEL",
        ("--roofline", "h200"): "--model is missing, expected one of SDAR-1.7B, SDAR-4B",
        ("--roofline", "b200", "--model", "SDAR-8B"): "no GPU is named b200; the known ones are A100-80GB",
        ("--roofline", "h200", "--model", "x"): "no model is named x; the known ones are SDAR-1.7B",
        (
            "--roofline",
            "rtx4090",
            "--model",
            "SDAR-30B-A3B",
        ): "SDAR-30B-A3B takes 61.1 GB of weights, 1 x RTX4090 holds",
    }.items():
        with pytest.raises(DsimError) as caught:
            run("profile", *arguments)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_shipped_profiles_take_one_line_each() -> None:
    assert [line.split("  ")[0] for line in run("profiles").splitlines()] == list(shipped())
    assert json.loads(run("profiles", "--json")) == shipped()
