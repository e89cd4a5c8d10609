"""`dsim metrics` prints every metric, for people and for programs."""

import json

import typer
from typer.testing import CliRunner

from dsim.cli.metrics import metrics_command
from dsim.report.metrics import METRICS

app = typer.Typer()
app.command()(metrics_command)


def test_every_metric_has_a_line() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert [line.split(" ")[0].rstrip(":") for line in result.stdout.splitlines()] == list(METRICS)
    assert "tpot [ms]: (e2el - ttft) / (N - 1) (exactly vLLM's; missing when N = 1;" in result.stdout


def test_json_is_one_object_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["--json"])
    found = json.loads(result.stdout)
    assert list(found) == list(METRICS)
    assert found["norm_latency"] == {
        "unit": "ms",
        "formula": "e2el / N",
        "note": "every request has one; a target such as 50ms/token is a bound on it",
    }
