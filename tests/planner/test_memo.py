"""The store of answers: what is asked twice is computed once, and a file that is not dsim's is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import DsimError, MachineError
from dsim.files.place import check_folder
from dsim.planner.backend import Pool
from dsim.planner.capacity import CAPACITY
from dsim.planner.memo import Memo

from ..checks import cases, refused
from ..stored import change, rows


@pytest.fixture
def store() -> Path:
    return Path("replays.db")


def opened(store: Path) -> Memo:
    memo = Memo()
    memo.open(store)
    return memo


def ask(memo: Memo, *cells: Any, function: Callable[[Any], Any] | None = None, jobs: int = 1) -> list[Any]:
    """The answers; by default twice a number. A local function: processes take it by value, wherever the tests lie."""

    def double(n: int) -> int:
        return 2 * n

    with Pool(jobs) as pool:
        return list(memo.map(pool, function or double, cells, lambda cell: {"of": cell}))


@cases("jobs", 1, 2)
def test_what_was_computed_is_answered_by_the_store_whatever_the_jobs(store: Path, jobs: int) -> None:
    for stored, numbers in ((0, [1, 2, 3]), (3, [1, 2, 3]), (3, [1, 2, 3, 4])):
        memo = opened(store)
        assert ask(memo, *numbers, jobs=jobs) == [2 * n for n in numbers]
        assert (memo.num_stored, memo.num_answers) == (stored, len(numbers))
        memo.close()
    assert memo.sentence() == "4 answers, 3 of them from the store"
    assert [path.name for path in store.parent.iterdir()] == ["replays.db"]


def test_a_journal_that_a_kill_left_is_the_stores(store: Path) -> None:
    for path in (store, store.with_name("replays.db-journal")):
        path.touch()
    check_folder(store.parent, CAPACITY, force=False, add=True)


def test_without_a_file_nothing_is_kept() -> None:
    memo = Memo()
    assert ask(memo, 1, 1) == [2, 2]
    assert (memo.num_stored, memo.sentence()) == (0, "")


@cases("error", DsimError("7 does not fit"), MachineError("the disk is full"))
def test_a_refusal_is_kept_and_a_failure_of_the_machine_is_not(store: Path, error: DsimError) -> None:
    def fail(_: int) -> None:
        raise error

    for _ in range(2):
        memo = opened(store)
        with refused(str(error)):
            ask(memo, 7, function=fail)
        memo.close()
    assert memo.num_stored == len(rows(store)) == (type(error) is DsimError)


def test_numbers_come_back_as_they_were(store: Path) -> None:
    value = [0.1 + 0.2, float("inf"), -float("inf"), 2**60, None, True, "é\n"]
    for _ in range(2):
        memo = opened(store)
        assert ask(memo, 1, function=lambda _: value) == [value]
        memo.close()


def test_another_search_is_told_from_the_one_that_has_the_folder(store: Path) -> None:
    memo = opened(store)
    for asked in ({"seed": 0, "trace": "t"}, {"seed": 0, "trace": "t"}):
        memo.claim("plan", asked)
    assert not memo.holds_any
    with refused(r"holds another plan, or a file that it names has changed: choose another folder or pass --force"):
        memo.claim("plan", {"seed": 1, "trace": "t"})


def _changed(store: Path) -> None:
    memo = opened(store)
    ask(memo, 1)
    memo.close()
    change(store, "UPDATE replays SET answer = '{}'")


def _torn(store: Path) -> None:
    _changed(store)
    data = bytearray(store.read_bytes())
    data[4096:] = b"\x07" * len(data[4096:])
    store.write_bytes(data)


@cases(
    "damage",
    lambda store: store.write_text("dear diary\n"),
    lambda store: change(store, "CREATE TABLE diary (day TEXT)"),
    _changed,
    _torn,
    Path.mkdir,
)
def test_a_foreign_or_damaged_store_is_refused_in_one_line(store: Path, damage: Callable[[Path], Any]) -> None:
    damage(store)
    with refused() as error:
        ask(opened(store), 1)
    assert str(error.value).startswith(f"{store} is no store of dsim's: ")
    assert str(error.value).endswith(" (delete it)")
