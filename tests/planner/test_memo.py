"""The memo of replays: what is asked twice is done once, in any process, and a file that is not dsim's is refused."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import DsimError, MachineError
from dsim.files.place import check_folder
from dsim.planner.backend import Pool
from dsim.planner.capacity import CAPACITY
from dsim.planner.memo import Memo

from ..stored import change, rows


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "replays.db"


def opened(store: Path) -> Memo:
    memo = Memo()
    memo.open(store)
    return memo


def doubling() -> Callable[[Memo, int], int]:
    """Twice a number, in two replays. A local function: processes take it by value, wherever the tests lie."""

    def double(memo: Memo, n: int) -> int:
        return sum(memo.replay(lambda i=i: {"of": n, "part": i}, lambda: n) for i in range(2))  # type: ignore[misc]

    return double


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_done_is_answered_by_the_store_whatever_the_jobs(store: Path, jobs: int) -> None:
    for stored, numbers in ((0, [1, 2, 3]), (6, [1, 2, 3]), (6, [1, 2, 3, 4])):
        memo = opened(store)
        with Pool(jobs) as pool:
            assert list(memo.map(pool, doubling(), numbers)) == [2 * n for n in numbers]
        assert (memo.num_stored, memo.num_replays) == (stored, 2 * len(numbers))
        memo.close()
    assert memo.sentence() == "8 replays, 6 of them from the store"
    assert [path.name for path in store.parent.iterdir()] == ["replays.db"]


def test_a_journal_that_a_kill_left_is_the_stores(store: Path) -> None:
    for path in (store, store.with_name("replays.db-journal")):
        path.touch()
    check_folder(store.parent, CAPACITY, force=False, add=True)


def test_without_a_file_nothing_is_kept() -> None:
    memo = Memo()
    with Pool(1) as pool:
        assert list(memo.map(pool, doubling(), [1, 1])) == [2, 2]
    assert (memo.num_stored, memo.sentence()) == (0, "")


@pytest.mark.parametrize("error", [DsimError("7 does not fit"), MachineError("the disk is full")])
def test_a_refusal_is_kept_and_a_failure_of_the_machine_is_not(store: Path, error: DsimError) -> None:
    def fail() -> None:
        raise error

    for _ in range(2):
        memo = opened(store)
        with pytest.raises(type(error), match=str(error)):
            memo.replay(lambda: {"of": 7}, fail)
        memo.close()
    assert memo.num_stored == len(rows(store)) == (type(error) is DsimError)


def test_numbers_come_back_as_they_were(store: Path) -> None:
    value = [0.1 + 0.2, float("inf"), -float("inf"), 2**60, None, True, "é\n"]
    for _ in range(2):
        memo = opened(store)
        assert memo.replay(dict, lambda: value) == value
        memo.close()


def test_another_search_is_told_from_the_one_that_has_the_folder(store: Path) -> None:
    memo = opened(store)
    for asked in ({"seed": 0, "trace": "t"}, {"seed": 0, "trace": "t"}):
        memo.claim("plan", asked)
    with pytest.raises(DsimError, match=r"holds another plan: its seed is 0, this one's is 1; choose another"):
        memo.claim("plan", {"seed": 1, "trace": "t"})


def _text(store: Path) -> None:
    store.write_text("dear diary\n")


def _of_another(store: Path) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("CREATE TABLE diary (day TEXT)")


def _newer(store: Path) -> None:
    opened(store).close()
    change(store, "PRAGMA user_version = 9")


def _filled(store: Path) -> None:
    memo = opened(store)
    doubling()(memo, 1)
    memo.close()


def _changed(store: Path) -> None:
    _filled(store)
    change(store, "UPDATE replays SET checksum = 'another'")


def _torn(store: Path) -> None:
    _filled(store)
    data = bytearray(store.read_bytes())
    data[4096:] = b"\x07" * len(data[4096:])
    store.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_text, "holds no replays of dsim, expected another file"),
        (_of_another, "holds no replays of dsim, expected another file"),
        (_newer, "version is 9, expected 1"),
        (_changed, "cannot be read as a store of replays: the checksum of"),
        (_torn, "cannot be read as a store of replays: "),
        (Path.mkdir, "is a directory, expected a file to keep replays in"),
    ],
)
def test_a_foreign_or_damaged_store_is_refused_in_one_line(
    store: Path, damage: Callable[[Path], Any], says: str
) -> None:
    damage(store)
    with pytest.raises(DsimError) as error, Pool(1) as pool:
        list(opened(store).map(pool, doubling(), [1]))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
