"""`--columns` in every command that takes a trace."""

import inspect
from pathlib import Path

import pytest

from dsim.cli import capacity, compare, importing, live, plan, replay, trace, tune, validate

from .command import dsim

MINE = "arrival=created_at,input=prompt_tokens,output=completion_tokens"
TAKE_A_TRACE = (
    capacity.capacity_command, compare.compare_command, importing.import_command, live.live_command, plan.plan_command,
    replay.replay, trace.info, trace.convert, tune.tune_command, validate.validate_command,
)  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    rows = "".join(f"2026-03-01T10:00:{i:02},100,48\n" for i in range(20))
    path.write_text("created_at,prompt_tokens,completion_tokens\n" + rows)
    return path


def test_every_command_that_takes_a_trace_takes_its_columns() -> None:
    for command in TAKE_A_TRACE:
        assert "columns" in inspect.signature(command).parameters, command.__name__


def test_a_trace_of_ones_own_is_replayed_and_described(mine: Path) -> None:
    assert dsim("trace", "info", mine, "--columns", MINE, "--json").json["num_requests"] == 20
    ran = dsim("replay", mine, "--columns", MINE, "--policy", "ar", "--json")
    assert ran.json["policies"][0]["completed"] == 20
