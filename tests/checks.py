"""A table of a test's cases, and the rule that a refusal is one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dsim.engine.errors import DsimError


def cases(names: str, *rows: object) -> pytest.MarkDecorator:
    """Run a test once for each row: a value, or one for each of the names."""
    return pytest.mark.parametrize(",".join(names.split()), rows)


@contextmanager
def refused(
    pattern: str = ".", kind: type[Exception] = DsimError, *, says: str = ""
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind, whose one line matches the pattern and holds the text `says`."""
    with pytest.raises(kind, match=pattern) as error:
        yield error
    assert says in str(error.value)
    assert "\n" not in str(error.value)
