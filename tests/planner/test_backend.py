"""Cells run once each, whoever runs them: in process, on cores that die, and on a Ray cluster that loses a worker."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import DsimError, MachineError
from dsim.planner.backend import Pool, in_order
from dsim.planner.capacity import capacity
from dsim.planner.ensemble import ensemble
from dsim.planner.sweep import sweep
from dsim.profiler.profile import load, save
from dsim.research.reproduce.experiment import read
from dsim.research.reproduce.points import reproduce
from dsim.results.world import World
from dsim.traces import synth, write

from ..checks import cases, refused
from ..held_up import PATIENCE
from ..ray_cluster import TwoWorkers, cluster, shared_cluster
from ..stored import rows

__all__ = ["cluster", "shared_cluster"]  # fixtures

CELLS = {f"cell {i}": i for i in range(7)}


def collect(function: Any, **how: Any) -> list[tuple[str, Any, str | None, bool]]:
    with Pool(**how) as pool:
        return sorted((o.key, o.value, o.error, o.refused) for o in pool.run(function, CELLS))


def in_turn(pool: Pool, function: Any, cells: Iterable[int]) -> Iterator[Any]:
    return in_order(pool.run(function, {str(i): cell for i, cell in enumerate(cells)}))


@cases("jobs", 1, 2)
def test_a_cells_exception_is_its_own(jobs: int) -> None:
    def square(cell: int) -> int:
        if cell == 2:
            raise ValueError("not\n  two")
        if cell == 4:
            raise DsimError("four is 4, expected another")
        return cell * cell

    expected: list[tuple[str, Any, str | None, bool]] = [(key, i * i, None, False) for key, i in CELLS.items()]
    expected[2] = ("cell 2", None, "ValueError: not two", False)
    expected[4] = ("cell 4", None, "four is 4, expected another", True)
    assert collect(square, jobs=jobs) == expected


def test_a_killed_worker_ends_the_run() -> None:
    def dies(cell: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return cell

    with refused(r"a worker was killed, .*: fewer jobs than 2 need less", MachineError):
        collect(dies, jobs=2)


def test_workers_leave_ctrl_c_to_the_parent() -> None:
    with Pool(jobs=2) as pool:
        ignored = in_turn(pool, lambda _: signal.getsignal(signal.SIGINT) == signal.SIG_IGN, range(4))
        assert list(ignored) == [True] * 4


def test_results_come_as_they_finish_and_a_map_s_in_order() -> None:
    go_on = Path("go-on").absolute()

    def first_waits(cell: int) -> int:
        until = time.monotonic() + PATIENCE
        while cell == 0 and not go_on.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        if cell == 6:
            go_on.touch()
        return cell

    with Pool(jobs=2) as pool:
        outcomes = pool.run(first_waits, {key: cell for key, cell in CELLS.items() if cell != 6})
        early = next(outcomes).key
        go_on.touch()  # the first cell can end only after another has been seen here
        assert early != "cell 0"
        assert {outcome.key for outcome in outcomes} == set(CELLS) - {"cell 6", early}
    go_on.unlink()
    with Pool(jobs=2) as pool:
        assert list(in_turn(pool, first_waits, range(7))) == list(range(7))


@cases("jobs", 1, 2)
def test_a_map_ends_with_the_first_failure(jobs: int) -> None:
    def fails(cell: int) -> int:
        if cell == 2:
            raise DsimError("two is 2, expected another")
        if cell == 4:
            raise KeyError("four")
        return cell

    with Pool(jobs=jobs) as pool:
        given = []
        with refused("two is 2, expected another"):
            given.extend(in_turn(pool, fails, range(5)))
        with pytest.raises(RuntimeError, match=r"in a worker:\nTraceback(.|\n)*KeyError: 'four'"):
            given.extend(in_turn(pool, fails, [0, 4]))
    assert given == [0, 1, 0]


def test_workers_that_are_in_another_folder_find_the_files() -> None:
    queue = World("q.csv", policy="ar,max_batch=1", slos=("mean:e2el=150ms",))
    found = []
    for name in ("first", "second"):  # the second's workers were begun in the first
        Path(name).mkdir()
        with contextlib.chdir(name):
            write(synth("poisson", 1.0, lengths="fixed:512,1", num_requests=100, seed=1), "q.csv")
            found.append(capacity(queue, jobs=2, num_requests=100, precision=0.5, curve=False))
            Path("q.csv").unlink()
    assert found[0] == found[1]


def test_a_wrong_number_of_jobs_is_refused_before_any_cell() -> None:
    with refused("jobs is 0, expected at least 1"):
        Pool(jobs=0)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(r"Ray is not installed: pip install '\.\[cluster\]' in a clone"), Pool(ray="127.0.0.1:6379"):
        pass


@pytest.mark.slow
def test_ensembles_and_published_experiments_give_on_a_cluster_what_one_core_gives(cluster: TwoWorkers) -> None:
    asked = World("azure-conv", policy="chunk", num_requests=20)
    with Pool(ray=cluster.address) as pool:
        there = ensemble([asked], asked.requests(), 2, pool=pool)
    assert there == ensemble([asked], asked.requests(), 2, pool=Pool(jobs=1))
    # Ray's workers have another folder: files are named from the root.
    save(replace(load("a100-sdar-8b"), name="mine"), "mine.json")
    about = "".join(f'{name} = "x"\n' for name in ("title", "system", "citation", "conditions"))
    Path("own.toml").write_text(
        f'{about}axis = "concurrency"\nmeasures = ["output_throughput"]\n'
        f'[machine]\nprofile = "{Path.cwd()}/mine.json"\n[base]\nnum_requests = 4\n'
        '[over]\nconcurrency = [1, 2]\n[[series]]\nname = "A"\n'
    )
    found = reproduce([read("own.toml")], Path("ray"), ray=cluster.address)
    assert found == reproduce([read("own.toml")], Path("local"), jobs=1)
    assert found.num_run == 2
    assert all(row.predicted for row in found.rows)
    assert Path("ray/results.csv").read_bytes() == Path("local/results.csv").read_bytes()


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_in_mid_sweep_finishes_every_cell_once(cluster: TwoWorkers) -> None:
    config = {
        "base": {"trace": "azure-conv", "num_requests": 200, "policy": "chunk"},
        "grid": {"policy.chunk": [4, 8], "rate": [1.0, 2.0, 3.0, 4.0]},
    }
    killed: list[int] = []

    def kill(finished: int, total: int) -> None:
        assert total == 8
        if finished == 3 and not killed:
            killed.append(finished)
            cluster.kill_a_worker()

    done = sweep(config, "ray", ray=cluster.address, progress=kill)
    assert (killed, done.num_run, done.num_reused, done.interrupted) == ([3], 8, 0, False)
    assert (done.num_failed, len({row["key"] for row in done.results})) == (0, 8)
    # The same answers as one core gives, byte for byte.
    sweep(config, "local", jobs=1)
    replays = rows(Path("ray/replays.db"))
    assert len(set(replays)) == 8
    assert set(replays) == set(rows(Path("local/replays.db")))
    for name in ("results.csv", "report.html", "sweep.json"):
        assert Path(f"ray/{name}").read_bytes() == Path(f"local/{name}").read_bytes()
    # A cell's own errors stay with it there too, and a lost process is not the cell's.
    once = Path("once").absolute()

    def mixed(cell: int) -> int:
        if cell == 2:
            raise ValueError("not two")
        if cell == 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return cell

    expected: list[tuple[str, Any, str | None, bool]] = [(key, i, None, False) for key, i in CELLS.items()]
    expected[2] = ("cell 2", None, "ValueError: not two", False)
    assert collect(mixed, ray=cluster.address, jobs=2) == expected
    assert once.exists()
