"""`--columns` names those of a trace of one's own."""

from pathlib import Path

from .command import dsim


def test_a_trace_of_ones_own_is_replayed_and_described() -> None:
    rows = "".join(f"2026-03-01T10:00:{i:02},100,48\n" for i in range(20))
    Path("mine.csv").write_text("created_at,prompt_tokens,completion_tokens\n" + rows)
    asked = ("mine.csv", "--columns", "arrival=created_at,input=prompt_tokens,output=completion_tokens", "--json")
    assert dsim("trace", "info", *asked).json["num_requests"] == 20
    assert dsim("replay", *asked, "--policy", "ar").json["policies"][0]["completed"] == 20
