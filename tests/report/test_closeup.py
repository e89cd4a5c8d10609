"""Close-ups agree with the journal that they are drawn from."""

import itertools
from pathlib import Path

from dsim.engine.step import Phase
from dsim.report.closeup import MAX_LANES, NUM_STEPS, PHASES, engine_figure
from dsim.results.run import Run, read_run

from ..cli.command import succeed
from .fabricate import write_run

NUM = 12
SHORT = ["--num-requests", NUM, "--rate", 6]


def replayed(folder: Path, *more: object) -> Run:
    succeed("replay", "azure-conv", *SHORT, *more, "-o", folder / "run")
    return read_run(folder / "run")


def test_the_engine_is_drawn_as_its_journal_says(tmp_path: Path) -> None:
    run = replayed(tmp_path, "--policy", "optimus")
    figure = engine_figure(run, "optimus", 0, 0.0, "from the start")
    assert figure is not None
    steps = run.steps("optimus", ["step", "batch", "committed", "start", "latency"])
    drawn = [row for trace in figure.chart.data for row in trace["customdata"]]
    assert {step for _, step, _, _ in drawn} == set(range(NUM_STEPS))
    for step in range(NUM_STEPS):
        mine = [row for row in drawn if row[1] == step]
        assert len(mine) == steps["batch"][step] <= MAX_LANES
        assert sum(row[3] for row in mine) == steps["committed"][step]
    begin = min(base for trace in figure.chart.data for base in trace["base"])
    assert begin == 0.0
    # No two rows lie on each other.
    bars = [
        (y, base, base + x) for t in figure.chart.data for y, base, x in zip(t["y"], t["base"], t["x"], strict=True)
    ]
    bars.sort()
    for (lane, _, end), (other, start, _) in itertools.pairwise(bars):
        assert lane != other or start >= end


def test_a_run_that_kept_no_rows_has_no_close_ups(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_requests=20, rate=4.0)
    assert engine_figure(read_run(tmp_path / "run"), "optimus", 0, 0.0, "") is None


def test_a_pass_over_committed_tokens_is_solid_and_pale_while_it_waits_for_blocks_of_others(tmp_path: Path) -> None:
    run = replayed(tmp_path, "--policy", "sglang-sync:4", "--profile", "h100-sdar-8b")
    figure = engine_figure(run, "sglang-sync:4", 0, 0.0, "from the start")
    assert figure is not None
    [passes] = [trace for trace in figure.chart.data if trace["name"] == PHASES[Phase.FLUSH][0]]
    seen: set[tuple[int, int]] = set()
    depths = {1.0: 0, 0.35: 0}
    for (request, step, _, committed), depth in zip(passes["customdata"], passes["marker"]["opacity"], strict=True):
        assert committed == 0
        assert depth == (0.35 if (request, step - 1) in seen else 1.0)
        depths[depth] += 1
        seen.add((request, step))
    assert all(depths.values())
