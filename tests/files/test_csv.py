"""CSV files: no cell is a formula to a spreadsheet, and what is read back is what was written."""

import ast
import csv
from pathlib import Path

import pytest

import dsim
from dsim.files.read import read_csv, uncovered
from dsim.files.write import csv_of

FORMULAS = (
    "=1+1", '=HYPERLINK("x")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-\r=1", "-", "'=1", "''-x",
)  # fmt: skip
PLAIN = ("ar", "chunk:8,max_batch=4", "", "'quoted'", "it's", "a=b", " =1", "3 - 2", "'")
NUMBERS = ("-3", "+4.5", "-1e-05", "-inf", "nan", -3, -2.5, 7, None, True)


@pytest.mark.parametrize("text", FORMULAS)
def test_what_a_spreadsheet_would_run_is_text_and_reads_back(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(csv_of([["name", text], ["x", text]]), newline="")
    with (tmp_path / "t.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert [cell for cell in cells if cell[:1] in tuple("=+-@\t\r")] == []
    assert [uncovered(cell) for cell in cells] == ["name", text, "x", text]
    [(_, row)] = read_csv(tmp_path / "t.csv", ["name"])
    assert text in row.values()


def test_numbers_and_plain_text_stay_as_they_are() -> None:
    assert next(csv.reader([csv_of([PLAIN])])) == list(PLAIN)
    assert csv_of([["x\r=1", "two\nlines"]]) == '"x\r=1","two\nlines"\n'
    assert csv_of([NUMBERS]) == "-3,+4.5,-1e-05,-inf,nan,-3,-2.5,7,,True\n"
    assert [uncovered(text) for text in PLAIN] == list(PLAIN)


def test_tables_are_written_in_one_place() -> None:
    root, found = Path(dsim.__file__).parent, set()
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        if str(place).startswith((".", "tests", "benchmarks")) or b"csv" not in path.read_bytes():
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("csv.writer", "DictWriter", "s.to_csv")):
                found.add(str(place))
    assert found == {"files/write.py"}
