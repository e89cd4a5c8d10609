"""Traces with columns of one's own."""

from dsim.traces import load

from ..checks import cases
from .files import refusal, rows_of, save

MINE = "arrival=created_at,input=prompt_tokens,output=completion_tokens"
OWN = b"""\
created_at,prompt_tokens,completion_tokens,tenant
2026-03-01T10:00:00Z,374,44,a
2026-03-01T10:00:02.500Z,396,109,b
"""


def test_a_trace_with_columns_of_its_own_is_read_by_their_names() -> None:
    found = load(save(OWN), columns=f"{MINE}, slo_class=tenant")
    assert rows_of(found) == [(0, 374, 44), (2.5, 396, 109)]
    assert found.extras == {"slo_class": ["a", "b"]}
    assert found.notes.warnings == ()


@cases(
    "columns complaint",
    ("arrival=created,input=prompt_tokens,output=completion_tokens",
     "{path}:1: no column created (--columns arrival=created) (did you mean created_at?), expected one of: "
     "created_at, prompt_tokens, completion_tokens, tenant"),
    ("arrival=created_at,input=prompt_tokens",
     "--columns is 'arrival=created_at,input=prompt_tokens', expected arrival=COLUMN,input=COLUMN,output=COLUMN "
     "and, where there are, id, session_id, slo_class, model, max_tokens, first, end, status, kind"),
    ("arrival=created_at,input=tenant,output=completion_tokens",
     "{path}:2: tenant is \"a\", expected a whole number from 0 to 10000000 "
     "(--skip-bad leaves bad rows out)"),
    ("arrival=tenant,input=prompt_tokens,output=completion_tokens",
     "{path}:2: tenant is \"a\", expected a date and time from 1970 to 2116 such as 2026-03-01T10:00:00Z "
     "(--skip-bad leaves bad rows out)"),
)  # fmt: skip
def test_a_column_that_is_not_there_or_not_numbers_is_told_in_one_line(columns: str, complaint: str) -> None:
    path = save(OWN)
    assert refusal(path, columns=columns) == complaint.format(path=path)
