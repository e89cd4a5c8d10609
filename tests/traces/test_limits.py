"""The limit of a request beside its answer: columns, files, and the end of `--lengths`."""

import json
from pathlib import Path

import numpy as np

import dsim
from dsim.engine.errors import TraceError
from dsim.planner.grid import key_of, world_of
from dsim.results.world import World
from dsim.traces import Trace, load, synth
from dsim.traces.canonical import write

from ..checks import cases, refused
from .files import save

ROWS = (
    '{"timestamp": 0, "input_length": 9, "output_length": 40, "max_tokens": 64}\n'
    '{"timestamp": 5, "input_length": 8, "output_length": 30}\n'
)


def test_a_limit_is_read_and_written_again_and_is_the_answer_where_nobody_says() -> None:
    trace = load(save(ROWS))
    assert (trace.max_tokens.tolist(), trace.limit.tolist()) == ([64, 0], [64, 30])
    assert [(trace.request(i).max_tokens, trace.request(i).limit) for i in range(2)] == [(64, 64), (0, 30)]
    assert write(trace, "again.jsonl").read_text() == ROWS
    assert trace.take([1]).limit.tolist() == [30]
    named = load(save("at,p,a,cap\n0,9,40,64\n"), columns="arrival=at,input=p,output=a,max_tokens=cap")
    assert named.limit.tolist() == [64]
    with refused(r"max_tokens of row 0 is 39, expected 40 to", TraceError):
        Trace("t", np.zeros(1), np.array([9]), np.array([40]), {"max_tokens": [39]})


def test_lengths_may_end_in_the_limit_of_all_which_cuts_their_answers() -> None:
    free, limited = (synth(lengths=f"sharegpt{end}", num_requests=200) for end in ("", ",max_tokens=300"))
    assert limited.input_length.tolist() == free.input_length.tolist()
    assert limited.output_length.tolist() == np.minimum(free.output_length, 300).tolist()
    assert (set(limited.limit.tolist()), set(free.max_tokens.tolist())) == ({300}, {0})
    for limit in ("", "0", "-1", "1.5", "many", "99999999999"):
        with refused("expected 1 to 10000000", TraceError):
            synth(lengths=f"sharegpt,max_tokens={limit}")


@cases(
    "lengths eos ends",
    ("gsm8k", None, True), ("gsm8k,max_tokens=256", None, True), ("gsm8k", False, False),
    ("fixed:89,175", None, False), ("fixed:89,175", True, True), (None, None, False),
)  # fmt: skip
def test_answers_of_a_named_workload_end_at_an_eos_unless_said_otherwise(
    lengths: str | None, eos: bool | None, ends: bool
) -> None:
    folder = Path("run")
    dsim.replay("azure-conv", lengths=lengths, eos=eos, num_requests=20, arrival="poisson", rate=2.0, out=folder)
    assert json.loads((folder / "run.json").read_text())["eos"] is ends


@cases("end found", ("", {(40, 64), (30, 30)}), (",max_tokens=35", {(35, 35), (30, 35)}))
def test_lengths_of_a_file_keep_its_limits_unless_one_is_given(end: str, found: set[tuple[int, int]]) -> None:
    drawn = synth("poisson", 1.0, lengths=f"{save(ROWS)}{end}", num_requests=50)
    assert set(zip(drawn.output_length.tolist(), drawn.limit.tolist(), strict=True)) == found


def test_a_sweep_finds_the_file_of_lengths_that_end_in_a_limit() -> None:
    save(ROWS, "t.jsonl")
    cell = world_of(Path.cwd(), {"trace": "azure-conv", "lengths": "t.jsonl,max_tokens=64"})
    assert cell.lengths == f"{Path.cwd()}/t.jsonl,max_tokens=64"
    before = key_of(cell)
    save(ROWS.replace("40", "41"), "t.jsonl")
    assert key_of(cell) != before  # what the file holds counts
    assert World("azure-conv", lengths=cell.lengths).located().lengths == cell.lengths
