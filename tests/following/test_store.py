"""The store: nothing but the last line is lost by a kill, and the disk does not fill."""

from pathlib import Path

import pytest

from dsim.following.store import Lines


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_kill_anywhere_in_a_line_loses_that_line_alone(tmp_path: Path, cut: int) -> None:
    store = Lines(tmp_path, 1 << 20)
    for i in range(3):
        store.append({"number": i})
    [path] = store.files
    path.write_bytes(path.read_bytes()[:-cut])
    again = Lines(tmp_path, 1 << 20)
    kept = [line["number"] for line in again]
    assert kept == ([0, 1] if cut > 1 else [0, 1, 2])
    again.append({"number": 9})
    assert [line["number"] for line in again] == [*([0, 1]), 9]


def test_the_oldest_lines_go_where_the_store_would_become_too_large(tmp_path: Path) -> None:
    store = Lines(tmp_path, 4000)
    for i in range(1000):
        store.append({"number": i})
    assert sum(path.stat().st_size for path in store.files) <= 4000
    kept = [line["number"] for line in store]
    assert kept == list(range(kept[0], 1000))
    assert len(kept) > 100
