"""Records of an array: their fields are attributes, and the memory is the array's."""

import numpy as np
import pytest

from dsim.engine.records import table
from dsim.engine.state import SEQUENCE


def test_a_field_is_read_from_and_written_to_the_array() -> None:
    array = np.zeros(3, SEQUENCE)
    rows = table(array)
    rows[1].pages = 7
    rows["start"][2] = 5
    assert (array["pages"].tolist(), rows[2].start) == ([0, 7, 0], 5)
    assert type(rows[1].pages) is np.int32  # so that sums wrap as in compiled code


def test_a_misspelt_field_is_neither_read_nor_written() -> None:
    row = table(np.zeros(1, SEQUENCE))[0]
    with pytest.raises(AttributeError, match="pagess"):
        row.pagess = 1
    with pytest.raises(AttributeError, match="pagess"):
        _ = row.pagess
